"""Some shards' streams in one store, the rest in memory.

What is written outside of a step must hold in both or in neither, so the rest is kept as it was until all is written.
A step does not need that: it updates the rest last, when nothing can fail any more.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from .lanes import Lanes, Mark, lift
from .store import Chunk, Fetched, Home, ResidentHome, ResidentStore, Store


class RevocableHome(ResidentHome):
    """What is written to it between ``begin`` and ``commit`` can be taken back."""

    def __init__(
        self,
        store: "RevocableStore",
        numel: int,
        zeros: Callable[[int, torch.dtype], torch.Tensor],
        device: torch.device,
    ):
        super().__init__(numel, zeros, store.tier, device)
        self._store = store

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._keep()
        super().write(name, start, values)

    def renew(self, zeroed: Collection[str]) -> None:
        self._keep()
        super().renew(zeroed)

    def _keep(self) -> None:
        kept = self._store.kept
        if kept is not None and self not in kept:
            kept[self] = dict(self.streams)
            super().renew(zeroed=())


class RevocableStore(ResidentStore):
    """In memory, of a device to which these lanes lead."""

    kept: dict[RevocableHome, dict[str, torch.Tensor]] | None = None  # streams of before ``begin``

    def __init__(self, tier: str, zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor], lanes: Lanes):
        super().__init__(tier, zeros)
        self._lanes = lanes
        self._read: Mark = None  # behind the last copy of gradients to the device; None: the host has waited for it

    def fetch(self, chunk: Chunk) -> Fetched:
        fetched = super().fetch(chunk)
        if not chunk.gradients:
            return fetched
        gradients, self._read = lift(self._lanes, chunk.home.device, chunk.gradients)
        return fetched._replace(gradients=gradients)

    def flush(self) -> None:
        """Until gradients were read: behind a step they are whoever's who scales or zeroes them."""
        if self._read is not None:
            self._lanes.settle(self._read)
            self._read = None

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> RevocableHome:
        return RevocableHome(self, numel, lambda items, dtype: self._zeros(items, dtype, device), device)

    def begin(self) -> None:
        self.kept = {}

    def commit(self) -> None:
        self.kept = None

    def roll_back(self) -> None:
        for home, streams in (self.kept or {}).items():
            home.streams = streams
        self.kept = None


class MixedStore:
    """Gives whole shards away until a fraction of all elements is, to within half of the largest shard."""

    def __init__(self, away: Store, near: RevocableStore, fraction: float):
        self.tier, self.is_final = away.tier, away.is_final
        self._away, self._near, self._fraction = away, near, fraction
        self._all = self._given = 0  # elements
        self._is_near: weakref.WeakSet[Home] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> Home:
        self._all += numel
        if self._given + numel / 2 <= self._fraction * self._all:
            self._given += numel
            return self._away.home(numel, dtype, device)
        home = self._near.home(numel, dtype, device)
        self._is_near.add(home)
        return home

    @property
    def note(self) -> str | None:
        return self._away.note

    def _store(self, home: Home) -> Store:
        return self._near if home in self._is_near else self._away

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._away.prefetch([chunk for chunk in chunks if self._store(chunk.home) is self._away])

    def fetch(self, chunk: Chunk) -> Fetched:
        return self._store(chunk.home).fetch(chunk)

    def write_back(self, chunk: Chunk) -> None:
        self._store(chunk.home).write_back(chunk)

    def flush(self) -> None:
        self._away.flush()
        self._near.flush()

    def begin(self) -> None:
        self._away.begin()
        self._near.begin()

    def commit(self) -> None:
        self._away.commit()
        self._near.commit()

    def roll_back(self) -> None:
        self._near.roll_back()
        self._away.roll_back()

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        return self._away.buffer_bytes

    def close(self) -> None:
        self._away.close()
