"""Gradient accumulation in checkpoints: slices of reduced sums, and gradients that a rank has not reduced yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import settle
from .records import GradientInfo

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..tensors.gradient_slice import GradientSlice


def describe(gradient_slice: GradientSlice) -> GradientInfo:
    """Returns the divisor and norms of a reduced gradient, to the bit; the same on all ranks."""
    return GradientInfo(divisor=gradient_slice.summed()[1], norms=gradient_slice.norms)


def accumulates_alone(domain: Domain | None) -> bool:
    """True if gradients of ``no_sync()`` are the only ones that a script accumulates: no sum of others is kept."""
    return domain is not None and domain.options.release_gradients


def restore(
    entry: ParamRecord,
    gradient_slice: GradientSlice | None,
    about: GradientInfo | None,
    own: torch.Tensor | None,
    world_size: int,
) -> None:
    """Restores ``param.grad`` as it was saved.

    Args:
        about: what :func:`describe` returned of the sum that ``gradient_slice`` holds now; None: there was no sum.
        own: this rank's gradient that was not reduced.
        world_size: the number of data-parallel ranks now.
    """
    if gradient_slice is not None:
        gradient_slice.pending = gradient_slice.undivided = None
    with torch._C.DisableTorchFunctionSubclass():  # the param may be released
        if about is None or gradient_slice is None:
            entry.show_gradient(own)
            return
        gradient_slice.divisor = about.divisor
        if gradient_slice.divisor != world_size:
            gradient_slice.divide()  # to a mean, so that a sum over another number of ranks can be added
        gradient_slice.norms = about.norms
        # Rounded: the format of the sum may be another one than in the checkpoint.
        gradient_slice.table.divide([gradient_slice.row], 1.0)
        gradient_slice.is_used = False
        gradient_slice.edit_count += 1
        settle([gradient_slice])
        entry.show_gradient(GradientPart(gradient_slice, entry.param))
        gradient_slice.pending = own
