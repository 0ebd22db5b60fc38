"""Gradient accumulation in checkpoints: slices of sums over ranks, and gradients that a rank has not reduced yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import Norms

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..tensors.gradient_slice import GradientSlice


def describe(gradient_slice: GradientSlice) -> dict[str, Any]:
    """Returns what every rank knows of a reduced gradient, to the bit; JSON-able."""
    norms = gradient_slice.norms
    known = None if norms is None else [norms.two.hex(), norms.largest.hex(), norms.nonfinite]
    return {
        "divisor": gradient_slice.summed()[1],
        "norms": known,
    }  # the same on all ranks, of which some may have looked


def restore(
    entry: ParamRecord,
    gradient_slice: GradientSlice,
    about: Mapping[str, Any] | None,
    own: torch.Tensor | None,
    world_size: int,
) -> None:
    """Makes ``param.grad`` what it was when it was saved.

    Args:
        about: what :func:`describe` returned of the sum that ``gradient_slice`` holds by now; None: there was no sum.
        own: this rank's gradient that was not reduced.
        world_size: ranks that go on.
    """
    gradient_slice.pending = gradient_slice.undivided = None
    with torch._C.DisableTorchFunctionSubclass():  # the param may be released
        if about is None:
            entry.show_gradient(own)
            return
        gradient_slice.divisor = about["divisor"]
        if gradient_slice.divisor != world_size:
            gradient_slice.divide()  # a mean, to which a sum over the present number of ranks can be added
        known = about["norms"]
        if known is not None:
            saved = Norms(float.fromhex(known[0]), float.fromhex(known[1]), known[2])
            known = saved.over(
                1.0, entry.param.numel(), gradient_slice.rounded
            )  # the sum may have had another format when it was saved
        gradient_slice.norms = known
        gradient_slice.is_used = False
        entry.show_gradient(GradientPart(gradient_slice, entry.param))
        gradient_slice.pending = own
