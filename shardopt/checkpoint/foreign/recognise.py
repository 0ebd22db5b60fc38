"""Which optimizer a foreign state belongs to: by its hyper-parameters and the names of its states."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import CheckpointError
from ...optim import classes as optim
from .source import Foreign, Values

# How a step is computed, not what; what was chosen elsewhere is not carried over.
HOW = ("foreach", "fused", "capturable", "differentiable")
_OPTIONAL = {"maximize", "decoupled_weight_decay"}  # not in the dicts of every version


def optimizer_names() -> list[str]:
    return sorted(name.removeprefix("Sharded") for name in optim.__all__)


def recognise(foreign: Foreign, name: str | None) -> optim.Recipe:
    """Returns the rule and the defaults of the one class that fits. ``name``: the class that the user gave, or None.

    Raises:
        CheckpointError: no class fits, or several do.
    """
    every = {each: optim.recipe(getattr(optim, f"Sharded{each}")) for each in optimizer_names()}
    fitting = [each for each, made in every.items() if _states_fit(foreign, made)]
    if name is not None:
        if name not in fitting:
            raise CheckpointError(
                f"{foreign.origin} holds the states {sorted(_kinds(foreign))}, {name} needs others: training would "
                f"begin anew, so nothing was written. These would fit: {', '.join(fitting) or 'none'}."
            )
        return every[name]
    words = set().union(*(_words(made.defaults) for made in every.values()))
    fitting = [
        each
        for each in fitting
        if all(_words(every[each].defaults) == _words(group.hyper) & words for group in foreign.groups)
        and all(_decoupled(group.hyper, every[each].defaults) for group in foreign.groups)
    ]
    if len(fitting) != 1:
        raise CheckpointError(
            f"the states {sorted(_kinds(foreign))} with the hyper-parameters "
            f"{sorted(set().union(*(group.hyper for group in foreign.groups)))} are those of "
            f"{' or of '.join(fitting) if fitting else 'no optimizer that is known for certain'}: another rule would "
            f"train on otherwise, so nothing was written. Say it: --optimizer, one of {', '.join(optimizer_names())}."
        )
    return every[fitting[0]]


def _words(hyper: Iterable[str]) -> set[str]:
    return set(hyper) - set(HOW) - _OPTIONAL


def _decoupled(hyper: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    key = "decoupled_weight_decay"
    return key not in hyper or key not in defaults or bool(hyper[key]) == bool(defaults[key])


def _kinds(foreign: Foreign) -> set[str]:
    return {key for param in foreign.params.values() for key in param.state}


def _states_fit(foreign: Foreign, recipe: optim.Recipe) -> bool:
    for group in foreign.groups:
        flags = {**recipe.defaults, **plain_hyper(group.hyper)}
        try:
            needed = set(recipe.rule.variant(flags).states)
        except (KeyError, TypeError):
            return False
        for name in group.names:
            state = foreign.params[name].state
            found = {key for key, value in state.items() if value is not None}
            if found and found - {"step", "master"} != needed | set(recipe.rule.carried):
                return False
    return True


def plain_hyper(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be kept of a group, as numbers."""
    return {key: _plain(value) for key, value in hyper.items() if key not in HOW}


def _plain(value: Any) -> Any:
    if isinstance(value, Values):
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_plain(each) for each in value)  # type: ignore[call-arg]
    return value
