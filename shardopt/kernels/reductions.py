r"""Norms whose bits depend on nothing but the numbers: not on ranks, buckets, threads or the order of addition.

Each block of 256 gradient elements is summed as integers on the grid of its own largest element: with :math:`E` the
largest biased exponent of the block, an element is truncated to :math:`q\,2^{E-153}` with :math:`q < 2^{27}`, and
:math:`S = \sum q^2 < 2^{62}` is exact in any order. The error this makes in a block's norm is below
:math:`2^{-21}` of it. Blocks then meet in a number wide enough for every fp32 square there is::

    S * 2**(2 E - 306),  E in 1..254      ->      18 limbs of 32 bits, each kept in an int64

Limbs are added without carries (up to 2**30 blocks), on any device, by any collective, in any order: integer sums. Only
the total is rounded, once, to float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .tables import Gradients

LIMBS = 18
LIMB_BITS = 32
_BASE = 2 - 306  # the binary exponent of bit 0 of limb 0


@dataclass(frozen=True)
class BlockSums:
    """What one pass over the gradients of a shard leaves for each of its blocks."""

    mantissa: torch.Tensor  # 1D [num_blocks] int64: S, the finite elements' squares
    exponent: torch.Tensor  # 1D [num_blocks] int32: E
    largest: torch.Tensor  # 1D [num_blocks] int32: bits of the largest finite magnitude
    nonfinite: torch.Tensor  # 1D [num_blocks] int32: count of Inf and NaN

    @staticmethod
    def empty(gradients: Gradients) -> "BlockSums":
        kinds = (torch.int64, torch.int32, torch.int32, torch.int32)
        return BlockSums(*(torch.zeros_like(gradients.row_of_block, dtype=kind) for kind in kinds))

    def limbs(self) -> torch.Tensor:
        """The sum of squares of the whole shard, 1D [18] int64."""
        bit = 2 * self.exponent.clamp(min=1).long() - 2
        limb, shift = bit // LIMB_BITS, bit % LIMB_BITS
        low_mask = (1 << LIMB_BITS) - 1
        # S has up to 62 bits; shifted by up to 31 it spans three limbs. Its halves are shifted apart to stay in int64.
        low = (self.mantissa & low_mask) << shift
        high = (self.mantissa >> LIMB_BITS) << shift
        total = torch.zeros(LIMBS + 2, dtype=torch.int64, device=bit.device)
        for offset, part in (
            (0, low & low_mask),
            (1, low >> LIMB_BITS),
            (1, high & low_mask),
            (2, high >> LIMB_BITS),
        ):
            total.index_add_(0, limb + offset, part)
        return total[:LIMBS]


class Totals(NamedTuple):
    """What the blocks of a shard add up to."""

    limbs: tuple[int, ...]
    nonfinite: int


def sum_of_squares(limbs: Sequence[int]) -> float:
    """The total that limbs (already added over ranks) stand for, rounded once to float64; infinity beyond its range."""
    total = sum(limb << (LIMB_BITS * index) for index, limb in enumerate(limbs))
    return float(np.ldexp(*_mantissa(total), dtype=np.float64))


def _mantissa(total: int) -> tuple[float, int]:
    """``total * 2**_BASE`` as (float, exponent), correctly rounded (Python rounds int to float to nearest even)."""
    excess = max(total.bit_length() - 1000, 0)  # int to float overflows beyond 2**1024
    return float(total >> excess), excess + _BASE
