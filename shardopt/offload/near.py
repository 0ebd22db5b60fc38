"""States that stay in memory while those of other shards of the same optimizer are offloaded.

The store of the others may be a disk, whose writes hold only after a vote of all ranks. What is written here meanwhile
must not outlive a write there that fails. So streams are copied before they are first written to, and put back. A step
needs that for passes that measure alone: it makes the last pass, over all that stays in memory, after the vote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from .store import Fetched, ResidentStorage, ResidentStore

if TYPE_CHECKING:
    from .store import Chunk
    from .streams import CopyStreams, Mark


class NearStorage(ResidentStorage):
    """The streams of a shard as tensors on the device of its params; writes to them can be undone."""

    def __init__(
        self, store: NearStore, numel: int, zeros: Callable[[int, torch.dtype], torch.Tensor], device: torch.device
    ):
        super().__init__(numel, zeros, store.tier, device)
        self._store = store

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._store.keep(self, [name])
        super().write(name, start, values)

    def renew(self, zeroed: Collection[str]) -> None:
        self._store.keep_tensors(self)
        super().renew(zeroed)


class NearStore(ResidentStore):
    """The streams that stay on the device, beside a store that offloads others."""

    def __init__(
        self,
        zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor],
        is_undone: bool,
        streams: CopyStreams | None = None,
    ):
        """
        Args:
            is_undone: the other store can undo its writes, so this one does too.
            streams: bring gradients that are offloaded; None: they are where the update runs.
        """
        super().__init__("device", zeros)
        self._is_undone, self._streams = is_undone, streams
        # From `begin` on: the streams of before, by storage; None outside of a transaction.
        self._kept: dict[NearStorage, dict[str, torch.Tensor]] | None = None
        self._replaced: dict[NearStorage, dict[str, torch.Tensor]] = {}  # tensors that `renew` replaced
        self._read: Mark = None  # after the last copy of gradients; None once the host has waited for it

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> NearStorage:
        return NearStorage(self, numel, lambda items, dtype: self._zeros(items, dtype, device), device)

    def fetch(self, chunk: Chunk) -> Fetched:
        assert isinstance(chunk.home, NearStorage)
        self.keep(chunk.home, [name for name in chunk.names if name not in chunk.unwritten])
        found = super().fetch(chunk)
        if not chunk.gradients:
            return found
        assert self._streams is not None
        copies = [(torch.empty_like(each, device=chunk.home.device), each) for each in chunk.gradients]
        self._read = self._streams.to_device(copies, self._streams.now())
        self._streams.wait(self._read)
        return found._replace(gradients=[into for into, _ in copies])

    def flush(self) -> None:
        """Waits until gradients were copied: after a step anybody may scale or zero them."""
        if self._read is not None and self._streams is not None:
            self._streams.synchronize(self._read)
            self._read = None

    # -- transactions ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._kept is not None

    def begin(self) -> None:
        self._kept, self._replaced = {} if self._is_undone else None, {}

    def commit(self) -> None:
        self._kept, self._replaced = None, {}

    def roll_back(self) -> None:
        for home, tensors in self._replaced.items():
            home.streams.update(tensors)
        for home, streams in (self._kept or {}).items():
            for name, values in streams.items():
                home.streams[name].copy_(values)
        self.commit()

    def keep(self, home: NearStorage, names: Collection[str]) -> None:
        """Copies streams that are about to be written to, once a transaction."""
        if self._kept is not None and home not in self._replaced:  # else the tensors of before are kept
            before = self._kept.setdefault(home, {})
            before.update({name: home.streams[name].clone() for name in names if name not in before})

    def keep_tensors(self, home: NearStorage) -> None:
        """Keeps tensors that are about to be replaced, once a transaction."""
        if self._kept is not None:
            self._replaced.setdefault(home, dict(home.streams))
