"""Gradients that were accumulated and not used: slices of sums over ranks, and what each rank has not reduced yet."""

from collections.abc import Mapping
from typing import Any

import torch

from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import Norms, Slot


def describe(slot: Slot) -> dict[str, Any]:
    """What every rank knows of a reduced gradient, to the bit; JSON-able."""
    norms = slot.norms
    known = None if norms is None else [norms.two.hex(), norms.largest.hex(), norms.nonfinite]
    return {"divisor": slot.summed()[1], "norms": known}  # the same on all ranks, of which some may have looked


def restore(
    param: torch.nn.Parameter,
    slot: Slot,
    about: Mapping[str, Any] | None,
    own: torch.Tensor | None,
    world_size: int,
) -> None:
    """Makes ``param.grad`` what it was.

    Args:
        about: of the sum that the slot holds by now, from :func:`describe`; None: there was none.
        own: this rank's gradient that was not reduced.
        world_size: ranks that go on.
    """
    param.grad, slot.pending, slot.kept = None, None, None
    with torch._C.DisableTorchFunctionSubclass():  # the param may be released
        if about is None:
            param.grad = own
            return
        slot.divisor = about["divisor"]
        if slot.divisor != world_size:
            slot.settle()  # a mean, which as many ranks as there are now can be added to
        known = about["norms"]
        if known is not None:
            saved = Norms(float.fromhex(known[0]), float.fromhex(known[1]), known[2])
            known = saved.over(1.0, param.numel(), slot.rounded)  # it may have been kept in another format
        slot.norms = known
        slot.is_used = False
        param.grad = GradientPart(slot, param)
        slot.pending = own
