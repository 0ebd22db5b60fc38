"""What of a rule depends on a param: its variant, where the rule asks for facts, and the order of its elements."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.products import Geometry, geometry_of

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..rules import Rule, Variant
    from ..rules.rule import Shape

_geometry = functools.cache(geometry_of)


class Variants:
    """The variants of a rule for the params of a step: one a group, or where it asks of params two or more."""

    def __init__(self, rule: Rule, numbers: Sequence[Mapping[str, Any]]):
        self._rule, self._numbers = rule, numbers
        self._known: dict[tuple[int, Shape], Variant] = {}

    def __call__(self, group: int, shape: Shape = ()) -> Variant:
        """Returns the variant for a param of this shape in group ``group``."""
        key = group, tuple(shape) if self._rule.asked_of_param else ()
        if key not in self._known:
            self._known[key] = self._rule.variant(self._numbers[group], key[1])
        return self._known[key]


def eps_of(param: torch.Tensor) -> float:
    """Returns the distance from 1 to the next number of the param's dtype."""
    return float(torch.finfo(param.dtype).eps)


def param_geometry(entry: ParamRecord) -> Geometry:
    """Returns how rows and columns of a param lie in its storage order.

    Raises:
        ShardoptError: its dimensions lie in an order that no table has room for.
    """
    return _geometry(tuple(entry.param.shape), entry.shard.strides(entry.index))
