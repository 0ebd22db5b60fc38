"""Memory for flat buffers: in huge pages on a CPU; it can be freed and allocated again in place.

Stage 3 frees and allocates whole buckets all the time, so the first touch of new pages must be cheap: see
``huge_pages.py``. Cheaper still are the pages of the bucket that was freed just before: they move, and are not zeroed.
"""

import ctypes
import mmap

import torch

from ..huge_pages import CAN_ADVISE, HUGE_PAGE, map_huge_pages, move_pages

# From this size on, in bytes, memory has a mapping of its own. In the allocator's heap, long-lived memory would lie
# between gradients that come and go, and the holes that gradients leave could not go back to the system.
MAPPED_FROM = 128 << 10


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of zeros, 1D."""
    return Memory(numel, dtype, device).tensor


def return_free_pages() -> None:
    """Returns memory that the C library's heap keeps after it was freed to the system, if the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_free_memory(device: torch.device) -> None:
    """Returns freed memory of the process's host and of this device to the system, once much of it was freed."""
    return_free_pages()
    if device.type == "cuda":
        # Params that moved into buckets leave holes in torch's blocks, which no bucket and no large activation fits:
        # up to the params' own bytes. Test: test_binding_returns_what_params_leave in tests/partition/test_memory.py.
        torch.cuda.empty_cache()


class Memory:
    """Memory of a fixed size. Views of ``tensor`` stay views of it, whether it is allocated or not."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        """Allocates zeros."""
        self.nbytes = numel * dtype.itemsize
        self.is_allocated = True
        self._mapping: mmap.mmap | None = None
        self._is_small = device.type == "cpu" and self.nbytes < MAPPED_FROM
        if device.type != "cpu" or self._is_small or not CAN_ADVISE:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
            return
        # Private: a forked process (a worker of a DataLoader) must not write into our memory.
        self._mapping, start = map_huge_pages(self.nbytes, mmap.MAP_PRIVATE)
        # The tensor keeps the mapping alive.
        self.tensor = torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=start)

    def free(self, keeps_pages: bool = False) -> bool:
        """Frees the memory and loses the values. The owner must keep others from reading it: they would find zeros.

        Args:
            keeps_pages: pages stay until ``give_pages_back``, or until another memory takes them.

        Returns:
            True if pages stay.
        """
        self.is_allocated = False
        if self._mapping is not None:
            if not keeps_pages:
                self.give_pages_back()
            return keeps_pages
        if self._is_small:
            # Not freed: code that no hook knows of would read through a null pointer. NaN, all bits set, is noticed.
            # The address is asked each time: share_memory_(), or a queue of torch.multiprocessing, moves the tensor.
            # Test: test_small_memory_may_move in tests/partition/test_memory.py.
            ctypes.memset(self.tensor.data_ptr(), 0xFF, self.nbytes)
        elif self.tensor.untyped_storage().resizable():  # not resizable once a view was given to NumPy: it stays
            self.tensor.untyped_storage().resize_(0)
        return False

    def give_pages_back(self) -> None:
        """Gives the pages to the system, unless the memory is allocated."""
        if self._mapping is not None and not self.is_allocated:
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def allocate(self, freed: "Memory | None" = None) -> None:
        """Allocates the memory again. Its content is undefined.

        Args:
            freed: memory whose pages were kept. They are taken over, so that the system need not zero others.
        """
        assert freed is None or not freed.is_allocated
        self.is_allocated = True
        if freed is not None and freed is not self and self._mapping is not None and freed._mapping is not None:
            fits = min(self.nbytes, freed.nbytes)
            nbytes, whole = (fits // page * page for page in (mmap.PAGESIZE, HUGE_PAGE))
            move_pages(freed.tensor.data_ptr(), self.tensor.data_ptr(), nbytes, whole)
            freed.give_pages_back()  # what did not fit
        if self._mapping is None and not self._is_small:
            storage = self.tensor.untyped_storage()
            if storage.resizable():
                storage.resize_(self.nbytes)
