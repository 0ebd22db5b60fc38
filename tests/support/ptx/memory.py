"""Memory as kernels see it: every access is checked before it is made."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from .numbers import Array, PtxError


@dataclass
class GlobalMemory:
    """The process's own memory, of which a launch may touch what was allowed."""

    regions: dict[int, Array] = field(default_factory=dict)  # address -> 1D bytes

    def allow(self, *tensors: torch.Tensor) -> None:
        """Allows what the tensors are, and not the rest of a storage that one is a view of."""
        for each in tensors:
            assert each.is_contiguous() and each.device.type == "cpu"
            nbytes = each.numel() * each.element_size()
            if nbytes > len(self.regions.get(each.data_ptr(), b"")):
                held = (ctypes.c_uint8 * nbytes).from_address(each.data_ptr())
                self.regions[each.data_ptr()] = np.frombuffer(held, dtype=np.uint8)

    def load(self, addresses: Array, nbytes: int) -> Array:
        """2D [accesses, nbytes]."""
        found = np.empty((len(addresses), nbytes), np.uint8)
        for mine, region, at in self._places(addresses, nbytes, "load"):
            found[mine] = region[at[:, None] + np.arange(nbytes)]
        return found

    def store(self, addresses: Array, items: Array) -> None:
        nbytes = items.shape[1]
        for mine, region, at in self._places(addresses, nbytes, "store"):
            region[at[:, None] + np.arange(nbytes)] = items[mine]

    def update(self, addresses: Array, values: Array, operation: np.ufunc) -> None:
        """Combines what lies there with 1D values, one after the other where several meet."""
        nbytes = values.itemsize
        for mine, region, at in self._places(addresses, nbytes, "update"):
            lead = int(at[0]) % nbytes  # a region may begin anywhere, an access may not
            words = region[lead : lead + (len(region) - lead) // nbytes * nbytes].view(values.dtype)
            operation.at(words, (at - lead) // nbytes, values[mine])

    def _places(self, addresses: Array, nbytes: int, verb: str) -> list[tuple[Array, Array, Array]]:
        """Region by region: which accesses fall into it, the region, where they begin in it."""
        _check_alignment(addresses, nbytes, verb)
        places, left = [], np.ones(len(addresses), bool)
        for start, region in self.regions.items():
            if not left.any():
                break
            at = addresses.astype(np.int64) - start
            mine = left & (at >= 0) & (at + nbytes <= len(region))
            if mine.any():
                places.append((mine, region, at[mine]))
                left &= ~mine
        if left.any():
            wrong = int(addresses[left.argmax()])
            raise PtxError(f"a {verb} of {nbytes} bytes at {wrong:#x}, which is in no tensor of the launch")
        return places


class SharedMemory:
    """The shared memory of every block. Warps may only rely on each other's accesses behind a barrier."""

    def __init__(self, blocks: int, nbytes: int) -> None:
        self._bytes = np.zeros((blocks, nbytes), np.uint8)
        self._is_written = np.zeros((blocks, nbytes), bool)
        # One bit for each warp of the block that did so since the last barrier.
        self._readers = np.zeros((blocks, nbytes), np.uint32)
        self._writers = np.zeros((blocks, nbytes), np.uint32)

    def load(self, blocks: Array, warps: Array, addresses: Array, nbytes: int) -> Array:
        at, mine = self._places(blocks, addresses, nbytes, "load"), _bit(warps)
        if not self._is_written[at].all():
            raise PtxError("a load of shared memory that nothing was stored to")
        np.bitwise_or.at(self._readers, at, mine)
        self._check(at, self._writers[at] & ~mine)
        return self._bytes[at]

    def store(self, blocks: Array, warps: Array, addresses: Array, items: Array) -> None:
        at, mine = self._places(blocks, addresses, items.shape[1], "store"), _bit(warps)
        # Several warps may store one and the same value, as they do with what all of them have.
        changes = (self._bytes[at] != items) | ~self._is_written[at]
        self._check(at, np.where(changes, (self._writers[at] | self._readers[at]) & ~mine, 0))
        np.bitwise_or.at(self._writers, at, mine)
        self._bytes[at], self._is_written[at] = items, True
        self._check(at, self._bytes[at] != items)

    def pass_barrier(self, blocks: Array) -> None:
        self._writers[blocks] = self._readers[blocks] = 0

    def _places(self, blocks: Array, addresses: Array, nbytes: int, verb: str) -> tuple[Array, Array]:
        _check_alignment(addresses, nbytes, verb)
        outside = addresses.astype(np.int64) + nbytes > self._bytes.shape[1]
        if outside.any():
            raise PtxError(f"a {verb} of {nbytes} bytes at {int(addresses[outside][0])}, beyond shared memory")
        return blocks[:, None], addresses[:, None].astype(np.int64) + np.arange(nbytes)

    def _check(self, at: tuple[Array, Array], conflicts: Array) -> None:
        if conflicts.any():
            where = int(at[1][conflicts != 0][0])
            raise PtxError(f"two warps use byte {where} of shared memory, and no barrier lies between them")


def _bit(warps: Array) -> Array:
    return np.left_shift(np.uint32(1), warps.astype(np.uint32))[:, None]


def _check_alignment(addresses: Array, nbytes: int, verb: str) -> None:
    misaligned = addresses % addresses.dtype.type(nbytes) != 0
    if misaligned.any():
        raise PtxError(f"a misaligned {verb} of {nbytes} bytes at {int(addresses[misaligned][0]):#x}")
