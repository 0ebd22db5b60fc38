"""Sums of gradients in host memory, and slots on the device in which they are made.

A slot is lent behind the copy that took its last sum away, or brought another sum behind it. There are as many as were
ever lent at a time: what the reducer has under way, and one on its way up. Not measured on a GPU yet.
"""

import torch

from .pinned import Pages
from .streams import Copy, Lanes, Mark

SLOTS = 2  # at least: a sum is made in one while the last one leaves the other


class _Slot:
    """Memory on the device for one sum."""

    here: torch.Tensor  # 1D: of the sum that it is lent for

    def __init__(self, nbytes: int, device: torch.device, mark: Mark):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.mark = mark  # behind all that used the memory so far, and what is brought to it


class HostLanding:
    """Keeps the sums of one optimizer on this rank."""

    def __init__(self, device: torch.device, lanes: Lanes, pages: Pages):
        self._device, self._lanes, self._pages = device, lanes, pages
        self._resting: list[torch.Tensor] = []
        self._slot_bytes = 0  # the longest sum's
        self._free: list[_Slot] = []
        self._made = 0  # slots
        self._up: Mark = None  # behind the last copy to the device; None where the host has waited for it
        self._down: Mark = None  # and from it

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1D: where a sum will rest. Between rounds."""
        resting = self._pages.zeros(numel, dtype)
        self._resting.append(resting)
        if resting.nbytes > self._slot_bytes:
            self.settle()  # copies are not known to the allocator, which the slots go back to
            self._slot_bytes, self._free, self._made = resting.nbytes, [], 0
        return resting

    def give_back(self, resting: torch.Tensor) -> None:
        """A sum that will not be made after all."""
        self._resting = [each for each in self._resting if each is not resting]
        self._pages.give_back([resting])

    def _enter(self, resting: torch.Tensor) -> _Slot:
        if self._free and self._made >= SLOTS:
            slot = self._free.pop(0)  # whose copy has been under way for longest
        else:
            # The allocator hands out what kernels before this point may still use.
            slot = _Slot(self._slot_bytes, self._device, self._lanes.now())
            self._made += 1
        slot.here = slot.memory[: resting.nbytes].view(resting.dtype)
        return slot

    def lend(self, resting: torch.Tensor) -> _Slot:
        """A slot for a sum such as this one. It holds anything, and kernels from now on may write to it."""
        slot = self._enter(resting)
        self._lanes.join(slot.mark)
        return slot

    def bring(self, resting: torch.Tensor) -> _Slot:
        """A slot with a copy of a sum that is at rest; for kernels behind ``arrive``."""
        slot = self._enter(resting)
        self._up = slot.mark = self._lanes.bring([Copy(slot.here, resting)], slot.mark)
        return slot

    def arrive(self, slot: _Slot) -> None:
        """Kernels from now on find in the slot what was brought."""
        self._lanes.join(slot.mark)

    def take(self, slot: _Slot, resting: torch.Tensor) -> None:
        """Copies what kernels so far made in the slot to where it rests. The slot is lent no more."""
        self._down = slot.mark = self._lanes.take([Copy(resting, slot.here)], self._lanes.now())
        self._free.append(slot)

    def settle(self) -> None:
        """The host waits until nothing is copied."""
        up, self._up = self._up, None
        down, self._down = self._down, None
        for mark in (up, down):
            if mark is not None:
                self._lanes.settle(mark)

    @property
    def slot_bytes(self) -> int:
        """Of memory on the device that is kept between rounds."""
        return sum(slot.memory.nbytes for slot in self._free)

    def close(self) -> None:
        """The sums are not copied any more. Their memory lives on as long as anybody looks at it."""
        self.settle()
        self._pages.give_back(self._resting)
        self._resting, self._free = [], []
