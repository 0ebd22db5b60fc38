"""A slot: this rank's slice of one param's reduced gradient, and the few numbers that every rank knows of the whole."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

Rounding = Callable[[float], float]


def fp32(number: float) -> float:
    """Rounded to the nearest fp32 value, as the kernels that scale do with a factor."""
    return ctypes.c_float(number).value


def bf16(number: float) -> float:
    """Rounded to the nearest fp32 value and that to the nearest bf16 one, ties to even; not of a NaN."""
    bits = ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value
    upper = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return ctypes.c_float.from_buffer(ctypes.c_uint32(upper)).value


_ROUNDINGS: dict[torch.dtype, Rounding] = {torch.float32: fp32, torch.bfloat16: bf16}


@dataclass(frozen=True, slots=True)
class Norms:
    """What all ranks know of the whole mean gradient of one param.

    Scaling keeps ``largest`` to the bit and ``two`` to the rounding of the scaled elements.
    """

    two: float  # 2-norm of the finite elements
    largest: float  # largest magnitude of the finite elements, a value that the slot can hold
    nonfinite: int  # how many elements are Inf or NaN

    def times(self, factor: float, numel: int, rounded: Rounding) -> "Norms | None":
        """After all ``numel`` elements were multiplied; None where that took finite ones out of range."""
        factor = abs(fp32(factor))
        if not factor < math.inf:
            return Norms(0.0, 0.0, numel)
        return self._scaled(self.two * factor, rounded(self.largest * factor))

    def over(self, divisor: float, numel: int, rounded: Rounding) -> "Norms | None":
        """After all ``numel`` elements were divided; None where that took finite ones out of range."""
        divisor = abs(fp32(divisor))
        if not divisor > 0:
            return Norms(0.0, 0.0, numel)
        return self._scaled(self.two / divisor, rounded(self.largest / divisor))

    def _scaled(self, two: float, largest: float) -> "Norms | None":
        # Products and quotients of fp32 values, rounded twice by way of float64, are those rounded once.
        if largest == math.inf:
            return None  # how many there are now is not known
        return Norms(two if largest else 0.0, largest, self.nonfinite)


class Slot:
    """This rank's slice of one param's reduced gradient. The reducer fills it; it outlives the parts that show it.

    Attributes:
        total: 1D, sum over ranks and backwards, fp32 or bf16; the same memory for life. Whatever scales it computes in
            fp32 and rounds once to its dtype.
        start: index of its first element in the param's storage order.
        receive: takes a full local gradient that autograd adds to the part.
        gather: collective, makes the whole mean gradient (the param's shape) out of every rank's settled slice; None:
            this slice is the whole, on every rank that has one.
        rounded: a number as ``total`` would hold it.
        divisor: what ``total`` is still to be divided by; 1 once settled.
        kept: the sum that ``total`` was, where it was divided only to be looked at.
        part: the one that shows this gradient. Any other of this slot is stale.
        is_used: by a step, since the last backward.
        edits: what was done to the mean in place since the last round: the name of a method of the part, its arguments.
        pending: this rank's own gradient (the param's shape), which autograd added to the part in a backward that was
            not reduced; the next one that is takes it along.
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
        self.kept: Tensor | None = None
        self._kept_of = 1  # what that was divided by
        self.part: Tensor | None = None
        self.is_used = False
        self.edits: list[list[Any]] = []
        self.pending: Tensor | None = None
        self._norms: Norms | None = None
        self._lent: Tensor | None = None
        self._lent_version = 0
        self._is_aliased = False

    @property
    def was_written(self) -> bool:
        """Whether elements may have been written one by one, unknown to anybody."""
        return self._is_aliased or (self._lent is not None and self._lent._version != self._lent_version)

    @property
    def norms(self) -> Norms | None:
        """Of the mean. None: nobody knows, after clamping, an overflow or a write to what was lent."""
        return None if self.was_written else self._norms

    @norms.setter
    def norms(self, norms: Norms | None) -> None:
        self._norms = norms
        if self._lent is not None:
            self._lent_version = self._lent._version

    def settle(self) -> None:
        """Makes ``total`` the mean: divided once, rounded once, as a kernel that divides on reading does."""
        self.kept = None
        if self.divisor != 1:
            divide_(self.total, self.divisor)
            self.divisor = 1

    def look(self) -> None:
        """As ``settle``, for whoever only reads: nothing that follows has other bits for it."""
        if self.divisor != 1:
            kept, self._kept_of = self.total.clone(), self.divisor
            self.settle()
            self.kept = kept

    def summed(self) -> tuple[Tensor, int]:
        """(the sum, what it is to be divided by), where the mean was only looked at; else ``total`` as it is.

        What was written to the mean meanwhile is multiplied.
        """
        if self.kept is None:
            return self.total, self.divisor
        mean = self.kept.clone()
        divide_(mean, self._kept_of)
        return torch.where(self.total == mean, self.kept, self.total * self._kept_of), self._kept_of

    def add_up(self, count: int) -> None:
        """Makes ``total`` the sum of so many means, to which others are added."""
        if self.divisor == count:
            return
        if self.kept is not None and self._kept_of == count:
            self.total.copy_(self.summed()[0])
            self.kept = None
        else:
            self.settle()
            self.total.mul_(count)

    def shows_in(self, grad: Tensor | None) -> bool:
        """Whether this is a part that shows the slot's gradient, or an alias of it (``.detach()``)."""
        return getattr(grad, "slot", None) is self and not cast(Any, grad).is_stale

    def lend(self) -> Tensor:
        """The mean, for others to read. A write to it is noticed: the norms are then no longer known."""
        self.look()
        if self._lent is None:
            # ``total`` shares its count of writes with the whole buffer; ``.data`` has a count of its own.
            self._lent = self.total.data
            self._lent_version = self._lent._version
        return self._lent

    def alias(self) -> Tensor:
        """The mean, for views that may be written unnoticed: norms of this slot are never known again."""
        self.look()
        self._is_aliased = True
        return self.total


def divide_(tensor: Tensor, divisor: float) -> None:
    """IEEE, in fp32. torch's CUDA kernel multiplies by the reciprocal where the divisor lies in host memory."""
    # 1D: beside a bf16 tensor one of no dimension would be rounded to bf16 before it divides.
    tensor.div_(divisor if tensor.device.type == "cpu" else torch.full((1,), divisor, device=tensor.device))
