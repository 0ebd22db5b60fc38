"""Memory for flat buffers: in huge pages on a CPU; it can be freed and allocated again in place.

Stage 3 frees and allocates whole buckets all the time, so the first touch of new pages must be cheap: see
``offload/huge_pages.py``.
"""

import ctypes
import mmap

import torch

from ..offload.huge_pages import CAN_ADVISE, map_huge_pages

# From this size on, in bytes, memory has a mapping of its own. In the allocator's heap, long-lived memory would lie
# between gradients that come and go, and the holes that gradients leave could not go back to the system.
MAPPED_FROM = 128 << 10


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of zeros, 1D."""
    return Memory(numel, dtype, device).tensor


def return_free_pages() -> None:
    """Returns freed memory that the C library's heap keeps to the system, where the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Memory:
    """Memory of a fixed size. Views of ``tensor`` stay views of it, whether it is allocated or not."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        """Allocates zeros."""
        self.nbytes = numel * dtype.itemsize
        self.is_allocated = True
        self._mapping: mmap.mmap | None = None
        if device.type != "cpu" or self.nbytes < MAPPED_FROM or not CAN_ADVISE:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
            return
        # Private: a forked process (a worker of a DataLoader) must not write into our memory.
        self._mapping, start = map_huge_pages(self.nbytes, mmap.MAP_PRIVATE)
        # The tensor keeps the mapping alive.
        self.tensor = torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=start)

    def free(self) -> None:
        """Frees the memory and loses the values. The owner must keep others from reading it: they would find zeros."""
        self.is_allocated = False
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        elif self.tensor.untyped_storage().resizable():  # not resizable once a view was given to NumPy: it stays
            self.tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocates the memory again; it holds anything."""
        self.is_allocated = True
        if self._mapping is None and self.tensor.untyped_storage().resizable():
            self.tensor.untyped_storage().resize_(self.nbytes)
