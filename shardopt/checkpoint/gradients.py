"""Gradient accumulation in checkpoints: slices of reduced sums, and gradients that a rank has not reduced yet."""

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
    """Returns the divisor and norms of a reduced gradient, to the bit, as JSON; the same on all ranks."""
    norms = gradient_slice.norms
    known = None if norms is None else [norms.two.hex(), norms.largest.hex(), norms.nonfinite]
    return {"divisor": gradient_slice.summed()[1], "norms": known}


def restore(
    entry: ParamRecord,
    gradient_slice: GradientSlice,
    about: Mapping[str, Any] | None,
    own: torch.Tensor | None,
    world_size: int,
) -> None:
    """Restores ``param.grad`` as it was saved.

    Args:
        about: what :func:`describe` returned of the sum that ``gradient_slice`` holds now; None: there was no sum.
        own: this rank's gradient that was not reduced.
        world_size: the number of data-parallel ranks now.
    """
    gradient_slice.pending = gradient_slice.undivided = None
    with torch._C.DisableTorchFunctionSubclass():  # the param may be released
        if about is None:
            entry.show_gradient(own)
            return
        gradient_slice.divisor = about["divisor"]
        if gradient_slice.divisor != world_size:
            gradient_slice.divide()  # to a mean, so that a sum over another number of ranks can be added
        known = about["norms"]
        if known is not None:
            saved = Norms(float.fromhex(known[0]), float.fromhex(known[1]), known[2])
            # The format of the sum may be another one than in the checkpoint.
            known = saved.over(1.0, entry.param.numel(), gradient_slice.rounded)
        gradient_slice.norms = known
        gradient_slice.is_used = False
        entry.show_gradient(GradientPart(gradient_slice, entry.param))
        gradient_slice.pending = own
