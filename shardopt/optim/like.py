"""From a signature to a constructor: arguments as torch checks them, defaults of param groups, and a rule.

The torch class of the same name checks the arguments and names the keys of the param groups, so that defaults and error
messages are torch's to the letter.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from ..arguments import flag, number, plain
from .optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ..rules.rule import Rule

Init = TypeVar("Init", bound=Callable[..., None])


Defaults = Callable[..., dict[str, Any]]
# Keys of param groups that one rule alone reads. The moments of another rule may have the same names: a state dict with
# such a key is refused where no step would read it (test_dicts_of_other_rules_are_refused).
_OF_ONE_RULE = ("clip_update", "trust", "trust_coefficient")
# Of each class its rule, and what makes the defaults of its param groups.
_RECIPES: dict[Callable[..., None], tuple[Rule, Callable[[], dict[str, Any]]]] = {}


def like(
    made: type[torch.optim.Optimizer] | Defaults,
    rule: Rule,
    chosen_by: Mapping[str, Callable[[], Rule]] | None = None,
) -> Callable[[Init], Init]:
    """Make the ``__init__`` of a sharded optimizer out of its bare signature ``(self, params, ..., **options)``.

    Args:
        made: the torch class with these arguments, or a function that makes the defaults of param groups of them, and
            raises the errors.
        chosen_by: arguments that torch's class does not have, None by default, else a number above 0: one that is
            given becomes a key of the param groups, and the function returns the rule that it chooses.
    """
    choosers = chosen_by or {}

    def decorate(signature_only: Init) -> Init:
        signature = inspect.signature(signature_only)
        others = ("self", "params", "options", *choosers)
        own = {name: each for name, each in signature.parameters.items() if name not in others}

        def check_group(chosen: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
            """Returns the arguments that a param group gives, checked like those of the constructor."""
            arguments = {name: _checked(each, group[name]) for name, each in own.items() if name in group}
            defaults_of(made, arguments)
            for name in choosers:
                if name in chosen and name in group:
                    arguments[name] = number(group[name], name, above=0)
                elif group.get(name) is not None:
                    raise ValueError(
                        f"give {name} to the optimizer too, and {name}=inf to groups without it: a param group has "
                        f"{name}={group[name]!r}, which the optimizer's rule does not read."
                    )
            return arguments

        def default_group() -> dict[str, Any]:
            return defaults_of(made, {name: each.default for name, each in own.items()})

        @functools.wraps(signature_only)
        def __init__(self: ShardedOptimizer, *positional: Any, **keywords: Any) -> None:
            bound = signature.bind(self, *positional, **keywords)
            bound.apply_defaults()
            arguments = bound.arguments
            params, options = arguments["params"], arguments["options"]
            given = {name: _checked(each, arguments[name]) for name, each in own.items()}
            defaults = defaults_of(made, given)
            chosen = {name: arguments[name] for name in choosers if arguments[name] is not None}
            defaults |= {name: number(value, name, above=0) for name, value in chosen.items()}
            self._check_group, self._given = functools.partial(check_group, chosen), given
            self._unread = tuple(name for name in _OF_ONE_RULE if name not in own and name not in chosen)
            of_these = next((choosers[name]() for name in chosen), rule)
            ShardedOptimizer.__init__(self, params, defaults, rule=of_these, **options)

        _RECIPES[__init__] = rule, default_group
        return cast(Init, __init__)

    return decorate


def checked_for(kind: type[ShardedOptimizer], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of a class that is made by :func:`like` as its constructor takes them, or raises its errors."""
    signature = inspect.signature(kind.__init__)
    return {name: _checked(signature.parameters[name], value) for name, value in arguments.items()}


def recipe(kind: type[ShardedOptimizer]) -> tuple[Rule, dict[str, Any]]:
    """Returns the rule of a class that is made by :func:`like`, and the defaults of its param groups.

    It constructs no optimizer, for which torch would import its compiler, in seconds.
    """
    rule, default_group = _RECIPES[kind.__init__]
    return rule, default_group()


def _checked(parameter: inspect.Parameter, value: Any) -> Any:
    """Returns the value, converted from NumPy's types to Python's. torch checks its range.

    Raises:
        TypeError: it is not a number, flag or tuple of numbers like the parameter's default.
    """
    default, name = parameter.default, parameter.name
    if "str" in str(parameter.annotation) or "Mapping" in str(parameter.annotation):
        return value  # checked where the defaults are made
    if default is None or isinstance(default, bool):
        return None if value is None and default is None else flag(value, name, or_none=" or None" * (default is None))
    may_be_tensor = "Tensor" in str(parameter.annotation)
    if not isinstance(default, tuple):
        return _number(value, name, may_be_tensor)
    if not isinstance(value, tuple | list) or len(value) != len(default):
        raise TypeError(f"{name} takes {len(default)} numbers, as {default}, found {value!r}.")
    return type(value)(
        None if each is None and own is None else _number(each, f"{name}[{index}]", may_be_tensor)
        for index, (each, own) in enumerate(zip(value, default, strict=True))
    )


def _number(value: Any, name: str, may_be_tensor: bool) -> Any:
    """Returns Python's number; a tensor if torch takes one, since a scheduler may write to it."""
    with suppress(ValueError):  # NaN, for which torch has its own message
        found = number(value, name)
        if isinstance(value, Tensor) and not may_be_tensor:
            return found
    return plain(value)


@functools.cache
def _bare(torch_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns the class without torch's own ``add_param_group``, which imports its compiler."""

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **param_group})

    return type(torch_class.__name__, (torch_class,), {"add_param_group": add_param_group})


def _refuse_nan(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for a NaN that torch accepts: no step could use it."""
    for name, value in arguments.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, float | Tensor):
                number(each, name)


def defaults_of(made: type[torch.optim.Optimizer] | Defaults, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults of param groups that torch makes of these arguments, or raises torch's error."""
    if isinstance(made, type):
        construct = cast(Callable[..., torch.optim.Optimizer], _bare(made))
        defaults = construct([torch.empty(0, 0, device="cpu")], **arguments).defaults
    else:
        defaults = made(**arguments)
    _refuse_nan(arguments)
    return defaults


def in_range(**arguments: Any) -> dict[str, Any]:
    """Returns the defaults of param groups of a class that torch does not have: its arguments.

    Raises:
        ValueError: one is out of range; the message is that of torch's classes.
    """
    for name, value in arguments.items():
        if name == "lr":
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError("Tensor lr must be 1-element")
            if not 0.0 <= value < math.inf:
                raise ValueError(f"Invalid learning rate: {value}")
        elif name == "betas":
            for index, beta in enumerate(value):
                if not 0.0 <= beta < 1.0:
                    raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        elif not 0.0 <= value < math.inf:
            raise ValueError(f"Invalid {name} value: {value}")
    return arguments
