"""Gradients that were accumulated and not used: slices of sums over ranks, and what each rank has not reduced yet."""

from collections.abc import Mapping
from typing import Any

import torch

from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import GradientSlice, Norms


def describe(gradient_slice: GradientSlice) -> dict[str, Any]:
    """What every rank knows of a reduced gradient, to the bit; JSON-able."""
    norms = gradient_slice.norms
    known = None if norms is None else [norms.two.hex(), norms.largest.hex(), norms.nonfinite]
    # summed(): the same on all ranks, of which some may have read the mean.
    return {"divisor": gradient_slice.summed()[1], "norms": known}


def restore(
    param: torch.nn.Parameter,
    gradient_slice: GradientSlice,
    about: Mapping[str, Any] | None,
    own: torch.Tensor | None,
    world_size: int,
) -> None:
    """Makes ``param.grad`` what it was.

    Args:
        about: of the sum that the slice holds by now, from :func:`describe`; None: there was none.
        own: this rank's gradient that was not reduced.
        world_size: ranks that go on.
    """
    param.grad, gradient_slice.pending, gradient_slice.undivided = None, None, None
    with torch._C.DisableTorchFunctionSubclass():  # the param may be released
        if about is None:
            param.grad = own
            return
        gradient_slice.divisor = about["divisor"]
        if gradient_slice.divisor != world_size:
            gradient_slice.divide()  # a mean, which as many ranks as there are now can be added to
        known = about["norms"]
        if known is not None:
            saved = Norms(float.fromhex(known[0]), float.fromhex(known[1]), known[2])
            known = saved.over(1.0, param.numel(), gradient_slice.rounded)  # it may have been kept in another format
        gradient_slice.norms = known
        gradient_slice.is_used = False
        param.grad = GradientPart(gradient_slice, param)
        gradient_slice.pending = own
