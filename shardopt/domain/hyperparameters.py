"""The hyper-parameters of a param group, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import RuleError, ShardoptError

if TYPE_CHECKING:
    from ..rules.rule import Rule

Group = Mapping[str, Any]  # a param group, as torch has it


def plain_numbers(group: Group) -> dict[str, Any]:
    """Returns a param group's hyper-parameters as plain numbers. Omits values of other types (a user's own notes)."""
    found = {}
    for key, value in group.items():  # each step reads all groups
        if type(value) in _PLAIN:
            found[key] = value
        elif key not in ("params", "param_names"):
            plain = _plain(value)
            if plain is not _NOT_PLAIN:
                found[key] = plain
    return found


_NOT_PLAIN = object()
_PLAIN = (float, bool, int, str, type(None))


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        items: list[Any] = []
        for item in value:
            items += (item if type(item) in _PLAIN else _plain(item),)
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _NOT_PLAIN
    if isinstance(value, np.generic):  # else ranks compare a numpy bool by its text, and a numpy float computes in fp32
        return value.item()
    return value if isinstance(value, _PLAIN) else _NOT_PLAIN


def check_numbers(numbers: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Raises TypeError if a hyper-parameter of a group is not a number."""
    for index, group in enumerate(numbers):
        if defaults.keys() <= group.keys():
            continue
        missing = [key for key in defaults if key not in group]
        if missing:
            raise TypeError(
                f"assign a number to {missing} of param group {index}: it is missing or not a plain number (a tensor "
                "must hold one element), and the update cannot be computed."
            )


def check_group(rule: Rule, group: dict[str, Any], check: Callable[[Mapping[str, Any]], dict[str, Any]] | None) -> None:
    """Checks a new param group by the arguments of its class, if that has any, and by the scalars of a first step.

    Raises:
        ValueError, TypeError: a number that the update needs is not finite.
    """
    if check is not None:
        group.update(check(group))
    numbers = plain_numbers(group)
    try:
        rule.evaluate(rule.variant(numbers), numbers, 1, {})
    except RuleError:
        pass  # the user may add a key for a rule of their own later
    except ShardoptError as error:
        if not isinstance(error.__cause__, TypeError):  # a TypeError: the number is None for now
            raise ValueError(str(error)) from error.__cause__
    except KeyError:
        pass
