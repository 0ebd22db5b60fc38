"""Clipping to a global norm: the factor of all gradients of a step, by their own norm or by that of the step before.

A bucket that is updated in backward cannot know the norm of all gradients. The norm of the step before is known, and is
kept as a key of the param groups: state dicts and checkpoints hold it, and a training that resumes has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import Options

KEY = "previous_grad_norm"
# Keeps a norm of zero from dividing, as in torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6


def clip_factor(options: Options, norm: float | None, numbers: Iterable[Mapping[str, Any]]) -> float:
    """Returns the factor that clips gradients to ``max_grad_norm``.

    Args:
        norm: of this step's gradients.
        numbers: the param groups, which hold the norm of the step before. Without one nothing is clipped.
    """
    if options.clip_by == "previous":
        norm = next((group[KEY] for group in numbers if group.get(KEY) is not None), None)
    if norm is None or options.max_grad_norm is None:
        return 1.0
    clip = options.max_grad_norm / (norm + _EPS)
    return clip if math.isnan(clip) else min(1.0, clip)  # as torch: a norm of NaN makes all gradients NaN


def remember_norm(options: Options, groups: Iterable[dict[str, Any]], norm: float | None) -> None:
    """Keeps the norm of a step that was taken, for the next one. One that is Inf or NaN is no measure of the next."""
    if options.clip_by == "previous" and norm is not None and math.isfinite(norm):
        for group in groups:
            group[KEY] = norm
