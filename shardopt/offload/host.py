"""Masters and states in host memory, for params that are on a device: chunks of them as they lie there.

The store around this one tells where the update runs: on the device (``ring.py``), on the CPU (``cpu_step.py``), or
where it takes less time (``measured.py``).
"""

import weakref
from collections.abc import Callable, Collection, Sequence

import torch

from .pinned import Pages
from .store import Chunk, Fetched, FinalStore, ResidentStorage

_FP32 = 4  # bytes


class HostStorage(ResidentStorage):
    """Streams in host memory. Whoever reads or writes them waits for what is still on its way there."""

    def __init__(self, store: "HostStore", numel: int):
        super().__init__(numel, store.pages.zeros, store.tier, torch.device("cpu"))
        self._store = store

    def chunks(self) -> Sequence[tuple[int, int]]:
        numel = self._store.chunk_numel
        return [(start, min(start + numel, self._numel)) for start in range(0, self._numel, numel)]

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As ``read``, without waiting: for who knows what is on its way."""
        return super().read(name, start, stop)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._store.settle()
        return super().read(name, start, stop)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._store.settle()
        super().write(name, start, values)

    def renew(self, zeroed: Collection[str]) -> None:
        self._store.settle()
        before = list(self.streams.values())
        super().renew(zeroed)
        self._store.pages.give_back(before)

    def release(self) -> None:
        self._store.settle()
        self._store.pages.give_back(list(self.streams.values()))
        super().release()


class HostStore(FinalStore):
    """The homes of one optimizer on this rank; chunks are updated where they lie."""

    tier = "host"

    def __init__(self, pages: Pages, chunk_bytes: int):
        """``chunk_bytes`` of one fp32 stream in a chunk."""
        self.pages = pages
        self.chunk_numel = max(chunk_bytes // _FP32 // 256, 1) * 256
        self.settle: Callable[[], None] = lambda: None  # waits until host memory holds all that was sent there
        self._homes: weakref.WeakSet[HostStorage] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostStorage:
        home = HostStorage(self, numel)
        self._homes.add(home)
        return home

    def fetch(self, chunk: Chunk) -> Fetched:
        return Fetched(parts_of(chunk), chunk.param, chunk.gradients)

    def close(self) -> None:
        for home in list(self._homes):
            home.release()


def parts_of(chunk: Chunk) -> list[torch.Tensor]:
    """The chunk's part of each stream, where it rests."""
    home = chunk.home
    assert isinstance(home, HostStorage)
    return [home.part(name, chunk.start, chunk.stop) for name in chunk.names]
