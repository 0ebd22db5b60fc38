"""Checks, at construction, whether a rule that takes norms of whole params can run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .dtensors import box_of

if TYPE_CHECKING:
    from ..config import Options
    from ..rules import Rule


def check_takes_norms(rule: Rule, options: Options) -> None:
    """Raises ValueError if params are to be updated before all of their elements' gradients are known."""
    if rule.takes_norms and options.release_gradients:
        raise ValueError(
            f"omit release_gradients: {rule.name} takes norms of whole params, for which all ranks must meet before a "
            "param is updated, and release_gradients=True updates each bucket in the middle of backward."
        )


def check_slices(rule: Rule, params: Iterable[Any]) -> None:
    """Raises BindingError if a rule takes sums over rows and columns, and which ones a rank holds is unknown."""
    if rule.margins:
        for index, param in enumerate(params):
            box_of(param, f"param {index} of the group")
