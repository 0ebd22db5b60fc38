"""One param in a step, with the gradient that updates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..tensors.gradient_slice import GradientSlice

_NO_GRADIENT = torch.empty(0)


class ParamUpdate(NamedTuple):
    """One param in a step: where it stands in the param groups, and the gradient that updates it.

    Attributes:
        group: index of the param's group.
        number: index of the param, counted through all groups. The upper 32 bits number the slice of a DTensor.
        grad: dense, in the param's storage order: the whole gradient, or this rank's slice of a reduced one.
        start: index in the param of the first element of ``grad``.
        gradient_slice: the slice whose ``total`` is ``grad``; None for a gradient that is not reduced by shardopt.
        divisor: number by which ``grad`` still has to be divided; 1 for a mean.
        is_on_host: true if ``grad`` is in host memory and the param is on a device.
    """

    entry: ParamRecord
    group: int
    number: int
    grad: torch.Tensor = _NO_GRADIENT
    start: int = 0
    gradient_slice: GradientSlice | None = None
    divisor: int = 1
    is_on_host: bool = False
