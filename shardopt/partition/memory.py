"""Memory for flat buffers: in huge pages on a CPU, and such that it can be given back and taken again in place.

What has just been asked of the system comes in pages, each zeroed at its first touch: with pages of 4 KiB that takes
ten times as long as filling the same memory again (16 MiB: 6 ms and 0.4 ms). Stage 3 takes and gives back whole buckets
all the time. With pages of 2 MiB the first touch takes twice as long, and kernels that stream miss fewer translations.
"""

import ctypes
import mmap

import torch

HUGE_PAGE = 2 << 20
# From here on memory is mapped on its own. In the allocator's heap, what lives long would lie between gradients that
# come and go, and keep the holes that they leave from going back to the system.
MAPPED_FROM = 128 << 10
_CAN_ADVISE = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTNEED")


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1D, zero."""
    return Room(numel, dtype, device).tensor


def return_free_pages() -> None:
    """Gives what the C library's heap keeps of freed memory back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Room:
    """Memory of a fixed size. Views of ``tensor`` stay views of it, whether the memory is there or not."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        """It is there at first, and zero."""
        self.nbytes = numel * dtype.itemsize
        self.is_there = True
        self._pages: mmap.mmap | None = None
        if device.type != "cpu" or self.nbytes < MAPPED_FROM or not _CAN_ADVISE:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
            return
        # Private, so that a forked process (a DataLoader's worker) does not write into ours.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, self.nbytes + HUGE_PAGE, flags=flags)
        start = -torch.frombuffer(self._pages, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
        # Not the end of it: a huge page of which a corner is used would be there in full.
        whole = self.nbytes // HUGE_PAGE * HUGE_PAGE
        if whole:
            self._pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
        # The tensor keeps the mapping.
        self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=numel, offset=start)

    def give_back(self) -> None:
        """The values are lost. Reading is an error or gives zeros: who owns the tensor must prevent it."""
        self.is_there = False
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
        elif self.tensor.untyped_storage().resizable():  # it stays where a view of it was given to NumPy
            self.tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """Memory again; it holds anything."""
        self.is_there = True
        if self._pages is None and self.tensor.untyped_storage().resizable():
            self.tensor.untyped_storage().resize_(self.nbytes)
