"""A mask: what ``isfinite``, ``isinf`` or ``isnan`` return of a gradient, whose norms say what holds on all ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from .expressions import Made, PartResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from .part import Part


class Mask(PartResult):
    """This rank's elements, and all() and any() of all.

    Attributes:
        every: all elements of the whole are true.
        some: any element of the whole is true.
    """

    every: bool | None
    some: bool | None

    @staticmethod
    def __new__(cls, local: Tensor, like: Part, made: Made, every: bool | None, some: bool | None) -> Self:
        """Makes a mask that is cut as ``like``."""
        mask = PartResult.__new__(cls, local, like, made)
        mask.every, mask.some = every, some
        return mask

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        mask = arguments[0] if arguments else None
        if isinstance(mask, Mask) and any(
            each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments
        ):
            mask.every = mask.some = None  # it is written
        if len(arguments) == 1 and isinstance(mask, Mask) and mask.every is not None and mask.some is not None:
            if function is torch.ops.aten.all.default:
                return torch.scalar_tensor(mask.every, dtype=torch.bool, device=mask.device)
            if function is torch.ops.aten.any.default:
                return torch.scalar_tensor(mask.some, dtype=torch.bool, device=mask.device)
            if function in (torch.ops.aten.logical_not.default, torch.ops.aten.bitwise_not.default):
                later = mask._made.later
                made = Made(None if later is None else partial(_inverse_of, later), f"not {mask.words}")
                return Mask(~mask.local, mask, made, not mask.some, not mask.every)
        return super()._answer(function, arguments, keywords)


def _inverse_of(fetch: Callable[[], Tensor]) -> Tensor:
    return ~fetch()
