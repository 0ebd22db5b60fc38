"""This rank's slice of one param's reduced gradient, and the norms of the whole gradient, which every rank knows."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

Rounding = Callable[[float], float]


def fp32(number: float) -> float:
    """Rounds to the nearest fp32 value, as kernels that scale do with a factor."""
    return ctypes.c_float(number).value


def bf16(number: float) -> float:
    """Rounds to the nearest fp32 value and that to the nearest bf16 value, ties to even. The number must not be NaN."""
    bits = ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value
    upper = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return ctypes.c_float.from_buffer(ctypes.c_uint32(upper)).value


_ROUNDINGS: dict[torch.dtype, Rounding] = {torch.float32: fp32, torch.bfloat16: bf16}


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of the whole mean gradient of one param, the same on all ranks.

    After scaling, ``largest`` is exact to the bit, and ``two`` up to the rounding of the scaled elements.
    """

    two: float  # 2-norm of the finite elements
    largest: float  # largest magnitude of the finite elements, a value that the slice can hold
    nonfinite: int  # number of elements that are Inf or NaN

    def times(self, factor: float, numel: int, rounded: Rounding) -> "Norms | None":
        """Returns the norms after all ``numel`` elements were multiplied; None if finite elements overflowed."""
        factor = abs(fp32(factor))
        if not factor < math.inf:
            return Norms(0.0, 0.0, numel)
        return self._scaled(self.two * factor, rounded(self.largest * factor))

    def over(self, divisor: float, numel: int, rounded: Rounding) -> "Norms | None":
        """Returns the norms after all ``numel`` elements were divided; None if finite elements overflowed."""
        divisor = abs(fp32(divisor))
        if not divisor > 0:
            return Norms(0.0, 0.0, numel)
        return self._scaled(self.two / divisor, rounded(self.largest / divisor))

    def _scaled(self, two: float, largest: float) -> "Norms | None":
        # Products and quotients of fp32 values, rounded twice by way of float64, are those rounded once.
        if largest == math.inf:
            return None  # the number of elements that are infinite now is unknown
        return Norms(two if largest else 0.0, largest, self.nonfinite)


class GradientSlice:
    """This rank's slice of one param's reduced gradient. The reducer fills it; it outlives the parts that show it.

    Attributes:
        total: 1D, sum over ranks and backwards, fp32 or bf16; the same memory for life. Scaling computes in fp32 and
            rounds once to this dtype.
        start: index of the slice's first element in the param's storage order.
        receive: takes a full local gradient that autograd adds to the part.
        gather: collective; returns the whole mean gradient (the param's shape), once every rank has divided its slice.
            None where this rank holds the whole gradient.
        rounded: rounds a number to the dtype of ``total``.
        divisor: number by which ``total`` still has to be divided; 1 once it is the mean.
        undivided: the sum that ``total`` held before ``show_mean()`` divided it.
        part: the part that shows this gradient. Any other part of this slice is stale.
        is_used: True if a step used this gradient after the last backward.
        edits: in-place edits of the mean since the last round: each the name of a method of the part and its arguments.
        pending: this rank's own gradient (the param's shape), which autograd added to the part under ``no_sync()``; the
            next round reduces it.
        unreduced: address of the gradient that autograd accumulated while nothing reduced it; 0: none.
        was_early: that was before the param was bound.
        is_spoilt_elsewhere: gradients of other ranks' experts hold an Inf or NaN.
    """

    def __init__(
        self,
        total: Tensor,
        start: int,
        receive: Callable[[Tensor], None],
        gather: Callable[[Tensor], Tensor] | None = None,
    ):
        self.total, self.start, self.receive, self.gather = total, start, receive, gather
        self.rounded = _ROUNDINGS[total.dtype]
        self.divisor = 1
        self.undivided: Tensor | None = None
        self._undivided_by = 1  # the divisor that made the mean of it
        self.part: Tensor | None = None
        self.is_used = False
        self.edits: list[list[Any]] = []
        self.pending: Tensor | None = None
        self.unreduced, self.was_early = 0, False
        self.is_spoilt_elsewhere = False
        self._norms: Norms | None = None
        self._lent: Tensor | None = None
        self._lent_version = 0
        self._is_aliased = False

    @property
    def was_written(self) -> bool:
        """True if the user may have written single elements, which would change the norms."""
        return self._is_aliased or (self._lent is not None and self._lent._version != self._lent_version)

    @property
    def norms(self) -> Norms | None:
        """Norms of the mean. None if they are not known: after clamping, an overflow, or a write to a lent tensor."""
        return None if self.was_written else self._norms

    @norms.setter
    def norms(self, norms: Norms | None) -> None:
        self._norms = norms
        if self._lent is not None:
            self._lent_version = self._lent._version

    def divide(self) -> None:
        """Makes ``total`` the mean: divides once and rounds once, as a kernel that divides on reading does."""
        self.undivided = None
        if self.divisor != 1:
            divide_(self.total, self.divisor)
            self.divisor = 1

    def show_mean(self) -> None:
        """Makes ``total`` the mean for a reader, and keeps the sum: rounds and steps have the same bits as without."""
        if self.divisor != 1:
            total, self._undivided_by = self.total.clone(), self.divisor
            self.divide()
            self.undivided = total

    def summed(self) -> tuple[Tensor, int]:
        """Returns the sum and its divisor: the undivided sum after ``show_mean()``, else ``total``.

        Elements of the mean that the user wrote since ``show_mean()`` are multiplied by the divisor.
        """
        if self.undivided is None:
            return self.total, self.divisor
        mean = self.undivided.clone()
        divide_(mean, self._undivided_by)
        return torch.where(self.total == mean, self.undivided, self.total * self._undivided_by), self._undivided_by

    def replace(self, mean: Tensor) -> None:
        """Makes this the mean, 1D. Its norms are not known."""
        self.divide()
        self.total.copy_(mean)
        self.norms = None

    def restore_sum(self, count: int) -> Tensor | None:
        """Makes ``total`` the sum of ``count`` ranks again, so that a round can add to it.

        Returns:
            Memory that was read and is not needed any more.
        """
        if self.divisor == count:
            return None
        if self.undivided is not None and self._undivided_by == count:
            self.total.copy_(self.summed()[0])
            read, self.undivided = self.undivided, None
            return read
        self.divide()
        self.total.mul_(count)
        return None

    def shows_in(self, grad: Tensor | None) -> bool:
        """True if ``grad`` is the part that shows this gradient, or an alias of that part (``.detach()``)."""
        return getattr(grad, "gradient_slice", None) is self and not cast(Any, grad).is_stale

    def lend(self) -> Tensor:
        """Returns the mean, to be read. After a write to it the norms are unknown."""
        self.show_mean()
        if self._lent is None:
            # ``total`` shares its version counter with the whole buffer; ``.data`` has a counter of its own.
            self._lent = self.total.data
            self._lent_version = self._lent._version
        return self._lent

    def alias(self) -> Tensor:
        """Returns the mean, for views. Writes to views go unnoticed: the norms of this slice are never known again."""
        self.show_mean()
        self._is_aliased = True
        return self.total


def divide_(tensor: Tensor, divisor: float) -> None:
    """Divides in place by IEEE division in fp32, and rounds once.

    With a divisor in host memory, torch's CUDA kernel would multiply by the reciprocal.
    """
    # The divisor is 1D: torch would round a 0-d divisor to bf16 before it divides a bf16 tensor.
    tensor.div_(divisor if tensor.device.type == "cpu" else torch.full((1,), divisor, device=tensor.device))
