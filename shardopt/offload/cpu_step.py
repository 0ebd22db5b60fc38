"""Updates on the CPU of params that are on a device: gradients are copied to the host, params back to the device.

::

    to host   | grads 0 | grads 1 | grads 2 | grads 3 | ...        into slots: staging buffers of pinned host memory
    CPU                 | update 0    | update 1    | update 2
    to device                         | params 0    | params 1     into the params; kernels that read them wait

For a bf16 param with fp32 masters and states that is 2 bytes to the host and 2 to the device, where streaming the
states through the device takes 12 and 12. The update reads and writes a copy of this rank's params in host memory, and
only what it wrote is copied to the device. A chunk whose params something else wrote is copied to the host first: the
device keeps a checksum of each chunk from when its params arrived. Gradients that are offloaded are read where they
lie.

The store wraps a store of host memory or of a disk. A disk's updates hold only after all ranks have voted, so its
params are copied to the device after the vote.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .host import HostStore
from .store import Fetched, Store
from .streams import Slot
from .sum_of_products import sum_of_products

if TYPE_CHECKING:
    from .pinned import Pages
    from .store import Chunk, ShardStorage
    from .streams import CopyStreams, Mark

SLOTS = 3  # one that an update reads, two that copies fill


class CpuStepStore(Store):
    """Updates chunks in host memory or on a disk on the CPU."""

    def __init__(self, streams: CopyStreams, pages: Pages, inner: Store):
        """``inner`` fetches chunks into host memory."""
        self.tier, self.is_final = inner.tier, inner.is_final
        # Before the update writes to memory that a forward or a backward has read.
        self._wait_for_reads = inner.wait_for_reads if isinstance(inner, HostStore) else lambda: None
        self._streams, self._pages, self._inner = streams, pages, inner
        # Updates write this rank's params here, 1D in host memory.
        self._params: weakref.WeakKeyDictionary[ShardStorage, torch.Tensor] = weakref.WeakKeyDictionary()
        # Start of a chunk -> the checksum of its params, on the device, when device and host last held the same.
        self._sums: weakref.WeakKeyDictionary[ShardStorage, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()
        # Of each chunk before its update, on the device: its checksum, and True if that is not the one before; 1D [1].
        self._now: dict[Chunk, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: list[Slot] = []
        self._waiting: deque[tuple[Chunk, Chunk]] = deque()
        self._gradients_made: Mark = None  # after the kernels that compute the gradients
        # Chunk -> the chunk with params in host memory, and the slot that its gradients are copied to.
        self._staged: dict[Chunk, tuple[Chunk, Slot]] = {}
        self._unsent: list[tuple[Chunk, Chunk]] = []  # chunks whose params wait for the vote
        self._sent: Mark = None  # after the last copy of params to the device

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ShardStorage:
        home = self._inner.home(numel, dtype, torch.device("cpu"))
        self.update_here(home)
        return home

    def update_here(self, home: ShardStorage) -> None:
        """Lets updates of this shard run on the CPU from now on."""
        home.device, home.updates_on_host = torch.device("cpu"), True

    # -- a step ----------------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        self._inner.read_ahead()

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._drop_staged()
        inside = [self._inside(chunk) for chunk in chunks]
        self._inner.prefetch(inside)
        self._now = {chunk: self._compared(chunk, chunk.param) for chunk in chunks if chunk.param is not None}
        self._make_slots(max((Slot.nbytes(self._staged_of(each)) for each in chunks), default=0), len(chunks))
        self._waiting, self._gradients_made = deque(zip(chunks, inside, strict=True)), self._streams.now()
        for slot in self._slots:
            self._fill(slot)

    def _inside(self, chunk: Chunk) -> Chunk:
        if chunk.param is None:
            return chunk
        if chunk.home not in self._params:
            numel = chunk.home.chunks()[-1][1]
            self._params[chunk.home] = self._pages.zeros(numel, chunk.param.dtype)
        return replace(chunk, param=self._params[chunk.home][chunk.start : chunk.stop])

    def _make_slots(self, nbytes: int, most: int) -> None:
        if self._slots and self._slots[0].memory.numel() < nbytes:
            self._pages.give_back(slot.memory for slot in self._slots)
            self._slots = []
        nbytes = self._slots[0].memory.numel() if self._slots else nbytes
        while len(self._slots) < min(SLOTS, most):
            self._slots.append(Slot(self._pages.zeros(nbytes, torch.uint8)))

    def _fill(self, slot: Slot) -> None:
        if not self._waiting:
            return
        chunk, inside = self._waiting.popleft()
        coming = self._staged_of(chunk)
        copies = [*zip(slot.stage(coming), coming, strict=True)]
        self._staged[chunk] = inside, slot
        slot.mark = self._streams.to_host(copies, self._gradients_made)

    def _compared(self, chunk: Chunk, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now, before = _checksum(params), self._sums.get(chunk.home, {}).get(chunk.start)
        return now, torch.ones_like(now, dtype=torch.bool) if before is None else now != before

    def _staged_of(self, chunk: Chunk) -> tuple[torch.Tensor, ...]:
        """Returns what comes to the host with a chunk: its gradients, and whether its params were written."""
        return (*chunk.gradients, self._now[chunk][1]) if chunk in self._now else chunk.gradients

    def fetch(self, chunk: Chunk) -> Fetched:
        inside, slot = self._staged[chunk]
        # Gradients are copied after kernels that ran after the last step's copies of params: those copies have ended.
        self._streams.synchronize(slot.mark)
        if chunk.param is not None and inside.param is not None:
            *_, is_written = slot.staged
            if is_written:
                copied = self._streams.to_host([(inside.param, chunk.param)], self._gradients_made)
                self._streams.synchronize(copied)
            self._sums.setdefault(chunk.home, {})[chunk.start], _ = self._now[chunk]
        self._wait_for_reads()
        streams, param, _ = self._inner.fetch(inside)
        return Fetched(streams, param, slot.staged[: len(chunk.gradients)])

    def write_back(self, chunk: Chunk) -> None:
        inside, slot = self._staged.pop(chunk)
        self._inner.write_back(inside)
        self._fill(slot)
        if self.is_final:
            self._send(chunk, inside)
        else:
            self._unsent.append((chunk, inside))

    def _send(self, chunk: Chunk, inside: Chunk) -> None:
        if chunk.param is not None and inside.param is not None and chunk.written:
            copies = [(chunk.param[each], inside.param[each]) for each in chunk.written]
            # The copy waits for kernels that still read the params. Kernels that are launched from now on wait for the
            # copy.
            self._sent = self._streams.to_device(copies, self._streams.now())
            self._streams.wait(self._sent)
            self._sums[chunk.home][chunk.start] = _checksum(chunk.param)

    def flush(self) -> None:
        self._inner.flush()

    def begin(self) -> None:
        self._inner.begin()

    def commit(self) -> None:
        self._inner.commit()
        for chunk, inside in self._unsent:
            self._send(chunk, inside)
        self._unsent = []

    def roll_back(self) -> None:
        self._inner.roll_back()
        self._unsent = []
        self._sums.clear()  # the update wrote to the copies on the host

    def _drop_staged(self) -> None:
        """Waits for the copies that a failed step began, and drops what it staged."""
        if self._staged:
            self._sums.clear()
        for _, slot in self._staged.values():
            self._streams.synchronize(slot.mark)
        self._staged = {}
        self._waiting.clear()

    def wait_for_copies(self) -> None:
        """Waits until no copy is under way, also of the last step's params."""
        self._drop_staged()
        if self._sent is not None:
            self._streams.synchronize(self._sent)
            self._sent = None

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        found = dict(self._inner.buffer_bytes)
        return {**found, "host": found.get("host", 0) + sum(each.nbytes for each in self._own())}

    def _own(self) -> list[torch.Tensor]:
        return [*self._params.values(), *(slot.memory for slot in self._slots)]

    def free_buffers(self) -> None:
        """Leaves all buffers to the pages. The next step takes or makes those that it needs."""
        self.wait_for_copies()
        self._pages.keep(self._own())
        self._params.clear()
        self._sums.clear()
        self._slots = []

    def close(self) -> None:
        self.free_buffers()
        self._inner.close()


def _checksum(params: torch.Tensor) -> torch.Tensor:
    """Returns the checksum of these params, 1D [1] int64 on their device."""
    return sum_of_products(params.view(torch.int32)).view(1)
