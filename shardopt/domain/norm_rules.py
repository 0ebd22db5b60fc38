"""Where a rule that takes norms of whole params cannot run; it is said at construction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .dtensors import is_dtensor

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


def check_whole(rule: Rule, params: Iterable[Any]) -> None:
    """Raises ValueError if a factored rule would take a tensor-parallel slice for the whole param."""
    if not rule.margins:
        return
    for index, param in enumerate(params):
        if is_dtensor(param) and any(not placement.is_replicate() for placement in param.placements):
            raise ValueError(
                f"give param {index} of the group (a DTensor of shape {tuple(param.shape)}) to another optimizer: "
                f"{rule.name} takes sums over rows and columns of whole params, and each rank of the tensor mesh would "
                "take those of its own slice, and scale its update by other factors than the other ranks."
            )
