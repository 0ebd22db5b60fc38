"""Finds the optimizer class of a foreign state, by hyper-parameters and the names of states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from .source import HOW, plain_hyper

if TYPE_CHECKING:
    from ...rules import Rule
    from .source import Foreign, Hyper

_OPTIONAL = {"maximize", "decoupled_weight_decay"}  # not in the dicts of every version
Recipe = tuple["Rule", "Hyper"]  # the rule of an optimizer's class, and the defaults of its param groups


def recognise(foreign: Foreign, every: Mapping[str, Recipe], name: str | None) -> Recipe:
    """Returns the recipe of the one class that fits.

    Args:
        every: all classes, by name.
        name: of the class that the user chose; None: the class is recognised.

    Raises:
        CheckpointError: no class fits, or several do.
    """
    fitting = [each for each, (rule, defaults) in every.items() if _states_fit(foreign, rule, defaults)]
    if name is not None:
        if name not in fitting:
            raise CheckpointError(
                f"give --optimizer one of these: {', '.join(fitting) or 'none fits'}. {name} needs other states than "
                f"{foreign.origin} holds, {sorted(_kinds(foreign))}. Nothing was written."
            )
        return every[name]
    words = set().union(*(_words(defaults) for _, defaults in every.values()))
    fitting = [
        each
        for each in fitting
        if all(_words(every[each][1]) == _words(hyper) & words for _, hyper in foreign.groups)
        and all(_decoupled(hyper, every[each][1]) for _, hyper in foreign.groups)
    ]
    if len(fitting) != 1:
        raise CheckpointError(
            f"give --optimizer, one of {', '.join(every)}: the states {sorted(_kinds(foreign))} with the "
            f"hyper-parameters {sorted(set().union(*(hyper for _, hyper in foreign.groups)))} are those of "
            f"{' or of '.join(fitting) if fitting else 'no optimizer that is known for certain'}. Nothing was written."
        )
    return every[fitting[0]]


def _words(hyper: Iterable[str]) -> set[str]:
    return set(hyper) - set(HOW) - _OPTIONAL


def _decoupled(hyper: Hyper, defaults: Hyper) -> bool:
    key = "decoupled_weight_decay"
    return key not in hyper or key not in defaults or bool(hyper[key]) == bool(defaults[key])


def _kinds(foreign: Foreign) -> set[str]:
    return {key for param in foreign.params.values() for key in param.state}


def _states_fit(foreign: Foreign, rule: Rule, defaults: Hyper) -> bool:
    for names, hyper in foreign.groups:
        flags = {**defaults, **plain_hyper(hyper)}
        for name in names:
            state = foreign.params[name].state
            try:
                variant = rule.variant(flags, foreign.params[name].values.shape)
            except (KeyError, TypeError):
                return False
            needed = {*variant.margins, *variant.states}
            found = {key for key, value in state.items() if value is not None}
            if found and found - {"step", "master"} != needed | set(rule.carried):
                return False
    return True
