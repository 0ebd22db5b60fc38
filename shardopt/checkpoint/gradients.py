"""Gradient accumulation in checkpoints: slices of reduced sums, and gradients that a rank has not reduced yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import Norms
from .elements import own_part, reader_of
from .records import TensorInfo, TensorKey

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..tensors.gradient_slice import GradientSlice
    from .model_param import ModelParam
    from .plan_save import SavePlan


def plan_gradient(plan: SavePlan, member: ModelParam) -> dict[str, Any] | None:
    """Plans the gradient that was accumulated since the last step. Returns what :func:`describe` returns of its sum."""
    slot, grad = (None, None) if member.entry is None else (member.entry.gradient_slice, member.entry.grad)
    about = None
    if slot is None or grad is None or member.shard is None:
        return None
    own: torch.Tensor | None = grad
    if slot.shows_in(grad):
        own = slot.pending
        if not slot.is_used:
            about = describe(slot)
            tensor = TensorInfo(tuple(member.param.shape), member.shard.strides(member.index), slot.total.dtype, ())
            key, where = TensorKey("gradients", member.box_name, "reduced"), member.shard.slice_of(member.index)
            assert member.domain is not None
            first, last = own_part(slot.total.numel(), member.domain.mesh)
            read = reader_of(slot.summed()[0][first:last])
            if member.is_planned:
                plan.add(key, tensor, where.start + first, where.start + last, read)
    if own is not None:  # accumulated under no_sync()
        plan.add_of_one(TensorKey("gradients", member.box_name, str(plan.world.rank)), own, True)
    return about


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
