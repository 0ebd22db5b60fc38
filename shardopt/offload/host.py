"""Masters and states in host memory, for params that are on a device.

The store around this one chooses where the update runs: on the device (``ring.py``), on the CPU (``cpu_step.py``), or
where it takes less time (``measured.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .store import Fetched, ResidentStorage, Store

if TYPE_CHECKING:
    from .pinned import Pages
    from .store import Chunk
    from .streams import CopyStreams, Mark

_FP32 = 4  # bytes


class HostStorage(ResidentStorage):
    """Streams in host memory. Reads and writes wait for copies to it that are under way."""

    def __init__(self, store: HostStore, numel: int):
        super().__init__(numel, store.pages.zeros, store.tier, torch.device("cpu"))
        self._store = store

    def chunks(self) -> Sequence[tuple[int, int]]:
        numel = self._store.chunk_numel
        return [(start, min(start + numel, self._numel)) for start in range(0, self._numel, numel)]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._store.wait_for_copies()
        return super().read(name, start, stop)

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        self._store.copy_out(self.view(name, start, start + into.numel() * self.planes[name].grain), into)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._store.wait_for_copies()
        super().write(name, start, values)

    def fill(self, source: ResidentStorage) -> None:
        """Takes the streams of a storage on the device, as the first ones. They are here after :meth:`settle`.

        To register memory takes longer than to fill it: the next stream's is registered while one is copied.
        """
        for name in source.names:
            plane = source.planes[name]
            self.streams[name], self.planes[name] = self._fresh(plane, self._store.pages.unfilled), plane
            self._store.copy_in(source.streams[name], self.streams[name])

    def settle(self) -> None:
        """Waits for the copies that :meth:`fill` began."""
        self._store.wait_for_copies()

    def renew(self, zeroed: Collection[str]) -> None:
        self._store.wait_for_copies()
        before = list(self.streams.values())
        super().renew(zeroed)
        self._store.pages.give_back(before)

    def give_up(self, others: Mapping[str, torch.Tensor]) -> None:
        self._store.wait_for_copies()
        self._store.pages.give_back(others.values())

    def release(self) -> None:
        self._store.wait_for_copies()
        self._store.pages.keep(list(self.streams.values()))
        super().release()


class HostStore(Store):
    """The storages of one optimizer on this rank. Chunks are updated in place."""

    tier = "host"

    def __init__(
        self, pages: Pages, chunk_bytes: int, streams: CopyStreams | None = None, device: torch.device | None = None
    ):
        """
        Args:
            chunk_bytes: of one fp32 stream in a chunk.
            streams: to the device of the params.
        """
        self.pages = pages
        self.chunk_numel = max(chunk_bytes // _FP32 // 256, 1) * 256
        # Set by the store around this one, if it copies into this memory: waits until it holds what was written back,
        # the host, or kernels and copies that are launched from now on.
        self.wait_for_stores: Callable[[], None] = lambda: None
        self.order_stores: Callable[[], None] = lambda: None
        self._streams, self._device = streams, device
        # After the last copy that `copy_out` began, and `copy_in`; None once the host has waited for it.
        self._shown: Mark = None
        self._written: Mark = None
        self._homes: weakref.WeakSet[HostStorage] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostStorage:
        home = HostStorage(self, numel)
        self._homes.add(home)
        return home

    def wait_for_copies(self) -> None:
        """Waits until no copy from or to this memory is under way."""
        self.wait_for_stores()
        self.wait_for_reads()
        written = self._written
        if written is not None and self._streams is not None:
            self._streams.synchronize(written)
            if self._written is written:  # and not a later one: other threads call this, too
                self._written = None

    def wait_for_reads(self) -> None:
        """Waits until the host may write to what forwards and backwards have read."""
        shown = self._shown
        if shown is not None and self._streams is not None:
            self._streams.synchronize(shown)
            if self._shown is shown:
                self._shown = None

    def copy_out(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copies from this memory. Where that is to the device, kernels from now on find it, and the host goes on."""
        if self._streams is None or into.device != self._device:
            self.wait_for_stores()
            into.copy_(source)
            return
        self.order_stores()
        into.copy_(source, non_blocking=True)
        self._shown = self._streams.now()

    def copy_in(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copies to this memory; from the device the host goes on, and ``wait_for_copies`` waits."""
        if self._streams is None or source.device != self._device:
            into.copy_(source)
        else:
            self._written = self._streams.to_host([(into, source)], self._streams.now())

    def fetch(self, chunk: Chunk) -> Fetched:
        return Fetched(views_of(chunk), chunk.param, chunk.gradients)

    def write_back(self, chunk: Chunk) -> None:
        assert isinstance(chunk.home, HostStorage)
        chunk.home.revision += 1

    def close(self) -> None:
        for home in list(self._homes):
            home.release()


def views_of(chunk: Chunk) -> list[torch.Tensor]:
    """Returns the chunk's part of each stream, in host memory."""
    home = chunk.home
    assert isinstance(home, HostStorage)
    return [home.view(name, chunk.start, chunk.stop) for name in chunk.names]
