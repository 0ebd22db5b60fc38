"""Host memory in huge pages of 2 MiB, mapped from the system.

The system zeroes each page at its first touch. With pages of 4 KiB the first touch takes ten times as long as filling
the same memory again (16 MiB: 6 ms and 0.4 ms), with huge pages twice as long. Kernels that stream miss fewer address
translations, and a direct transfer pins fewer pages.
"""

import ctypes
import mmap
import weakref
from typing import Any

import torch

HUGE_PAGE = 2 << 20  # bytes
# By the address that its user was given. A mapping that is gone is not here any more.
_MAPPINGS: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()
CAN_ADVISE = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTNEED")


# Of Linux' mremap(): the pages move, to this address, and the old range stays mapped, empty.
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4


def move_pages(source: int, target: int, nbytes: int, whole: int = 0) -> bool:
    """Moves the pages of one private mapping to another, whose own are given back, without a copy.

    Args:
        source, target: addresses of whole pages.
        whole: the bytes at the beginning that lie in huge pages, in both. They move first: to the system huge pages
            and others are two mappings, and before Linux 6.17 one call moves pages of one mapping.

    Returns:
        True; False where the system cannot move all of them. The pages that it moved lie at the target then.
    """
    mremap = getattr(ctypes.CDLL(None), "mremap", None)
    if mremap is None:
        return False
    pieces = ((0, whole), (whole, nbytes - whole))
    return all(_move(mremap, source + start, target + start, size) for start, size in pieces if size)


def _move(mremap: Any, source: int, target: int, nbytes: int) -> bool:
    mremap.restype, size, address = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    flags = _MAYMOVE | _FIXED | _DONTUNMAP
    moved = mremap(address(source), size(nbytes), size(nbytes), ctypes.c_int(flags), address(target))
    return bool(moved == target)


def map_huge_pages(nbytes: int, flags: int) -> tuple[mmap.mmap, int]:
    """Maps zeroed memory that belongs to no file.

    Args:
        flags: ``mmap.MAP_PRIVATE`` or ``mmap.MAP_SHARED``: what a forked process sees of later writes.

    Returns:
        The mapping, and the offset in it from which ``nbytes`` lie in huge pages.
    """
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    start = -address % HUGE_PAGE
    _MAPPINGS[address + start] = mapping
    # Whole huge pages only: the system would allocate all of a huge page of which the end uses a corner.
    whole = nbytes // HUGE_PAGE * HUGE_PAGE
    if whole and CAN_ADVISE:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return mapping, start


def show_to_forks(address: int, shows: bool) -> None:
    """Sets whether processes that are forked from now on get the memory that :func:`map_huge_pages` gave out there.

    Does nothing for memory of another origin: a page of the heap holds what others need.
    """
    mapping = _MAPPINGS.get(address)
    if mapping is not None and hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DOFORK if shows else mmap.MADV_DONTFORK)
