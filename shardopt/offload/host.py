"""Masters and states in host memory, for params that are on a device.

The store around this one chooses where the update runs: on the device (``ring.py``), on the CPU (``cpu_step.py``), or
where it takes less time (``measured.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from .store import Fetched, ResidentStorage, Store

if TYPE_CHECKING:
    from .pinned import Pages
    from .store import Chunk

_FP32 = 4  # bytes


class HostStorage(ResidentStorage):
    """Streams in host memory. Reads and writes wait for copies to it that are under way."""

    def __init__(self, store: HostStore, numel: int):
        super().__init__(numel, store.pages.zeros, store.tier, torch.device("cpu"))
        self._store = store

    def chunks(self) -> Sequence[tuple[int, int]]:
        numel = self._store.chunk_numel
        return [(start, min(start + numel, self._numel)) for start in range(0, self._numel, numel)]

    def view(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Like ``read``, but does not wait: the caller knows which copies are under way."""
        return super().read(name, start, stop)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._store.wait_for_copies()
        return super().read(name, start, stop)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._store.wait_for_copies()
        super().write(name, start, values)

    def renew(self, zeroed: Collection[str]) -> None:
        self._store.wait_for_copies()
        before = list(self.streams.values())
        super().renew(zeroed)
        self._store.pages.give_back(before)

    def release(self) -> None:
        self._store.wait_for_copies()
        self._store.pages.keep(list(self.streams.values()))
        super().release()


class HostStore(Store):
    """The storages of one optimizer on this rank. Chunks are updated in place."""

    tier = "host"

    def __init__(self, pages: Pages, chunk_bytes: int):
        """``chunk_bytes``: of one fp32 stream in a chunk."""
        self.pages = pages
        self.chunk_numel = max(chunk_bytes // _FP32 // 256, 1) * 256
        self.wait_for_copies: Callable[[], None] = lambda: None  # set by the store around this one
        self._homes: weakref.WeakSet[HostStorage] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostStorage:
        home = HostStorage(self, numel)
        self._homes.add(home)
        return home

    def fetch(self, chunk: Chunk) -> Fetched:
        return Fetched(views_of(chunk), chunk.param, chunk.gradients)

    def close(self) -> None:
        for home in list(self._homes):
            home.release()


def views_of(chunk: Chunk) -> list[torch.Tensor]:
    """Returns the chunk's part of each stream, in host memory."""
    home = chunk.home
    assert isinstance(home, HostStorage)
    return [home.view(name, chunk.start, chunk.stop) for name in chunk.names]
