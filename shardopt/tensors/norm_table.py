"""The norms of the mean gradients of many params, the same on all ranks: a table with a row for each param.

Clipping, unscaling and zeroing change all rows by the same factor, so they do it to whole columns.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .edits import Edits

Array = np.ndarray[Any, Any]
Rows = slice | Array | list[int]


def fp32(number: float) -> float:
    """Rounds to the nearest fp32 value, as kernels that scale do with a factor."""
    return ctypes.c_float(number).value


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of the whole mean gradient of one param, the same on all ranks: a row of the table.

    After scaling, ``largest`` is exact to the bit, and ``two`` up to the rounding of the scaled elements.
    """

    two: float  # 2-norm of the finite elements
    largest: float  # largest magnitude of the finite elements, a value that the slice can hold
    nonfinite: int  # number of elements that are Inf or NaN


class NormTable:
    """The norms of the gradients of params whose slices have one dtype.

    Attributes:
        every: all rows, in order.
        two, largest: 1D [rows] float64, as in :class:`Norms`.
        nonfinite: 1D [rows] int64, as in :class:`Norms`.
        known: 1D [rows] bool: False after clamping, an overflow, or a write to a lent tensor.
    """

    def __init__(self, dtype: torch.dtype, numels: Sequence[int], edits: Edits | None = None):
        """
        Args:
            dtype: of the slices.
            numels: by row, elements of the whole gradient.
            edits: where changes are noted that these norms do not show.
        """
        self.edits = Edits() if edits is None else edits
        self._dtype = dtype
        self._numels = np.array(numels, np.int64)
        self.every = list(range(len(numels)))

    # Made in the first round, and not at binding, where params have moved already: an error would come too late. Test:
    # test_each_allocation_of_the_binding_fails_once in tests/step/test_allocations.py.

    @cached_property
    def two(self) -> Array:
        return np.zeros(len(self._numels))

    @cached_property
    def largest(self) -> Array:
        return np.zeros(len(self._numels))

    @cached_property
    def nonfinite(self) -> Array:
        return np.zeros(len(self._numels), np.int64)

    @cached_property
    def known(self) -> Array:
        return np.zeros(len(self._numels), bool)

    def __getitem__(self, row: int) -> Norms | None:
        if not self.known[row]:
            return None
        return Norms(float(self.two[row]), float(self.largest[row]), int(self.nonfinite[row]))

    def __setitem__(self, row: int, norms: Norms | None) -> None:
        self.known[row] = norms is not None
        if norms is not None:
            self.two[row], self.largest[row], self.nonfinite[row] = norms.two, norms.largest, norms.nonfinite

    def fill(self, rows: Rows, two: Array, largest: Array, nonfinite: Array) -> None:
        """Sets the norms of new gradients; ``largest`` is rounded as the slices are."""
        is_rounded = self._dtype is torch.float32 and largest.dtype == np.float32  # nearly always
        self.two[rows], self.nonfinite[rows] = two, nonfinite
        self.largest[rows] = largest if is_rounded else self._rounded(largest)
        self.known[rows] = True

    def multiply(self, rows: Rows, factor: float) -> None:
        """Sets the norms to those after all elements were multiplied; unknown where finite elements overflowed."""
        factor = abs(fp32(factor))
        if factor < math.inf:
            # Products and quotients of fp32 values, rounded twice by way of float64, are those rounded once.
            self._set(rows, self.two[rows] * factor, self._rounded(self.largest[rows] * factor))
        else:
            self._spoil(rows)

    def divide(self, rows: Rows, divisor: float) -> None:
        """Sets the norms to those after all elements were divided; unknown where finite elements overflowed."""
        divisor = abs(fp32(divisor))
        if divisor > 0:
            self._set(rows, self.two[rows] / divisor, self._rounded(self.largest[rows] / divisor))
        else:
            self._spoil(rows)

    def zero(self, rows: Rows) -> None:
        """Sets the norms to those of zeros."""
        self.two[rows], self.largest[rows], self.nonfinite[rows], self.known[rows] = 0.0, 0.0, 0, True

    def forget(self, rows: Rows) -> None:
        """Norms are not known any more."""
        self.known[rows] = False

    def _rounded(self, numbers: Array) -> Array:
        """Rounds float64 to the nearest fp32 values, and those as the slices are; too large ones to infinity."""
        if self._dtype is not torch.float32:  # NumPy has no bf16; torch rounds float64 to it by way of fp32
            return torch.from_numpy(numbers.astype(np.float64)).to(self._dtype).double().numpy()
        with np.errstate(all="ignore"):
            return numbers.astype(np.float32).astype(np.float64)

    def _set(self, rows: Rows, two: Array, largest: Array) -> None:
        is_known = largest < np.inf  # else the number of elements that are infinite now is unknown
        self.known[rows] &= is_known
        self.two[rows] = np.where(is_known & (largest > 0), two, 0.0)
        self.largest[rows] = np.where(is_known, largest, 0.0)

    def _spoil(self, rows: Rows) -> None:
        """All elements are Inf or NaN."""
        self.two[rows], self.largest[rows], self.nonfinite[rows] = 0.0, 0.0, self._numels[rows]
