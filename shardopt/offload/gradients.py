"""Sums of gradients in host memory, and the slots on the device in which they are reduced.

``domain/host_sum.py`` decides when a sum is copied to the host and back.

A slot is a staging buffer. A slot is reused after the copy of its last sum to the host. There are as many slots as were
ever in use at a time: one for each reduction under way, and one for the sum that is loaded next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .streams import Slot

if TYPE_CHECKING:
    from .pinned import Pages
    from .streams import CopyStreams, Mark

SLOTS = 2  # at least: a sum is reduced in one slot while the last sum is copied out of the other


class HostLanding:
    """Offloads the sums of one optimizer on this rank."""

    def __init__(self, device: torch.device, streams: CopyStreams, pages: Pages):
        self._device, self._streams, self._pages = device, streams, pages
        self._sums: list[torch.Tensor] = []
        self._slot_bytes = 0  # the longest sum's
        self._free: list[Slot] = []
        self._num_slots = 0
        self._to_device: Mark = None  # after the last copy to the device; None once the host has waited for it
        self._to_host: Mark = None  # after the last copy to the host, likewise

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Makes the host memory of a sum, 1D. To be called between rounds."""
        total = self._pages.zeros(numel, dtype)
        self._sums.append(total)
        if total.nbytes > self._slot_bytes:
            # The old slots go back to torch's allocator, which does not know of the copies of other streams.
            self.wait_for_copies()
            self._slot_bytes, self._free, self._num_slots = total.nbytes, [], 0
        return total

    def give_back(self, total: torch.Tensor) -> None:
        """Forgets a sum whose binding failed."""
        self._sums = [each for each in self._sums if each is not total]
        self._pages.give_back([total])

    def _next_slot(self, total: torch.Tensor) -> Slot:
        if self._free and self._num_slots >= SLOTS:
            slot = self._free.pop(0)  # the one whose copy has been under way for longest
        else:
            # The allocator may hand out memory that kernels launched so far still use: the first copy waits for them.
            slot = Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device), self._streams.now())
            self._num_slots += 1
        slot.stage([total])
        return slot

    def acquire(self, total: torch.Tensor) -> Slot:
        """Returns a slot for a new value of this sum. Kernels launched from now on may write to it."""
        slot = self._next_slot(total)
        self._streams.wait(slot.mark)
        return slot

    def load(self, total: torch.Tensor) -> Slot:
        """Returns a slot into which this sum is being copied. Kernels may use it after ``wait_loaded``."""
        slot = self._next_slot(total)
        self._to_device = slot.mark = self._streams.to_device([(slot.staged[0], total)], slot.mark)
        return slot

    def wait_loaded(self, slot: Slot) -> None:
        """Kernels launched from now on find the loaded sum in the slot."""
        self._streams.wait(slot.mark)

    def offload(self, slot: Slot, total: torch.Tensor) -> None:
        """Copies what kernels so far made in the slot to the host, and frees the slot."""
        self._to_host = slot.mark = self._streams.to_host([(total, slot.staged[0])], self._streams.now())
        self._free.append(slot)

    def wait_for_copies(self) -> None:
        """The host waits until no copy is under way."""
        marks = (self._to_device, self._to_host)
        self._to_device = self._to_host = None
        for mark in marks:
            if mark is not None:
                self._streams.synchronize(mark)

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory that are kept between rounds."""
        return sum(slot.memory.nbytes for slot in self._free)

    def close(self) -> None:
        """Ends all copies of the sums. Their memory lives as long as somebody refers to it."""
        self.wait_for_copies()
        self._pages.give_back(self._sums)
        self._sums, self._free = [], []
