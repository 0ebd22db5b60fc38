r"""Norms whose bits depend on nothing but the numbers: not on ranks, buckets, threads or the order of addition.

Each block of 256 gradient elements is summed as integers on the grid of its own largest element: with :math:`E` the
largest biased exponent of the block, an element is truncated to :math:`q\,2^{E-153}` with :math:`q < 2^{27}`, and
:math:`S = \sum q^2 < 2^{62}` is exact in any order. The error this makes in a block's norm is below
:math:`2^{-21}` of it. Blocks then meet in a number wide enough for every fp32 square there is::

    S * 2**(2 E - 306),  E in 1..254      ->      18 limbs of 32 bits, each kept in an int64

Limbs are integer sums: they are added without carries (up to 2**30 blocks), on any device, by any collective, in any
order. Only the total is rounded, once, to float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LIMBS = 18
LIMB_BITS = 32
# Columns of a row of totals, after the limbs: the largest magnitude and the count of non-finite elements.
LARGEST, NONFINITE = LIMBS, LIMBS + 1
COLUMNS = LIMBS + 2
_BASE = 2 - 306  # the binary exponent of bit 0 of limb 0
_LIMB_WEIGHTS = np.ldexp(1.0, LIMB_BITS * np.arange(LIMBS) + _BASE)


class BlockSums:
    """The results of one pass over the gradients of a shard, for each of its blocks: zeros at first.

    Their columns, 1D [num_blocks] each, lie one after the other in ``memory``, as each piece of memory costs the host
    time::

        mantissa   int64   S, the finite elements' squares
        exponent   int32   E
        largest    int32   bits of the largest finite magnitude
        nonfinite  int32   count of Inf and NaN
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.memory = np.zeros(5 * num_blocks, np.int32)
        self._at = torch.from_numpy(self.memory).data_ptr()

    def addresses(self, first: int = 0) -> list[int]:
        """Returns where each column would begin if these blocks were those from ``first`` on."""
        at, count = self._at, self.num_blocks
        return [at - 8 * first, *[at + 4 * (number * count - first) for number in (2, 3, 4)]]


def new_totals(num_rows: int, device: torch.device) -> torch.Tensor:
    """Returns totals of nothing: 2D [num_rows, COLUMNS] int64 of zeros.

    A row holds the sums over the blocks of one param, as in ``tables.py``. Columns [0, LIMBS) are the limbs of the sum
    of squares, column LARGEST the bits of the largest finite magnitude in fp32, which sort as it does, column NONFINITE
    the count of Inf and NaN. All sums are one tensor, so that one message carries them. To join rows of several shards
    and ranks, add the limbs and the counts, and take the larger magnitude.
    """
    if device.type == "cpu":  # in NumPy: see native_backend.py
        return torch.from_numpy(np.zeros((num_rows, COLUMNS), np.int64))
    return torch.zeros(num_rows, COLUMNS, dtype=torch.int64, device=device)


def sum_of_rows(totals: torch.Tensor, uncounted: Sequence[int] = ()) -> tuple[list[int], int]:
    """Returns the limbs and the count of non-finite elements of all rows; ``uncounted`` rows add only the count.

    Args:
        totals: in host memory.
    """
    table = totals.numpy()  # in NumPy: see native_backend.py
    limbs = table[:, :LIMBS].sum(axis=0) - table[list(uncounted), :LIMBS].sum(axis=0)
    return limbs.tolist(), int(table[:, NONFINITE].sum())


def sum_of_squares(limbs: Sequence[int]) -> float:
    """Returns the value of limbs that were added over ranks, rounded once to float64; infinity beyond its range."""
    total = sum(limb << (LIMB_BITS * index) for index, limb in enumerate(limbs))
    return float(np.ldexp(*_mantissa(total), dtype=np.float64))


def squares_of_limbs(limbs: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns the values of many sums, 2D [n, 18] int64 to 1D [n] float64: within 2 ulp, a function of the limbs."""
    # Scaling by powers of two is exact. The terms are added one by one, from the smallest: sum() has its own order.
    total: np.ndarray[Any, Any] = np.add.accumulate(limbs.astype(np.float64) * _LIMB_WEIGHTS, axis=1)[:, -1]
    return total


def norms_of_limbs(limbs: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns the 2-norms of many sums, as :func:`squares_of_limbs` has them."""
    norms: np.ndarray[Any, Any] = np.sqrt(squares_of_limbs(limbs))
    return norms


def _mantissa(total: int) -> tuple[float, int]:
    """Returns ``total * 2**_BASE`` as (float, exponent), correctly rounded: Python rounds int to float to even."""
    excess = max(total.bit_length() - 1000, 0)  # int to float overflows beyond 2**1024
    return float(total >> excess), excess + _BASE
