"""State dicts in torch's format: params by number, states by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.param import named_params, without_process_group
from ..errors import StateError
from ..rules.choice import name_in

if TYPE_CHECKING:
    from ..domain.param import Group
    from ..domain.param_state import ParamState
    from ..rules import Rule
    from .table import StateTable


def to_state_dict(groups: Sequence[Group], states: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns ``{"state": {number: {...}}, "param_groups": [...]}``.

    Args:
        states: by param; other keys are the user's own and are kept.
    """
    index: dict[int, int] = {}
    for number, param in enumerate(param for group in groups for param in group["params"]):
        index.setdefault(id(param), number)  # as in torch, a param that is listed twice has its first number
    numbered = [
        {key: [index[id(param)] for param in value] if key == "params" else value for key, value in group.items()}
        for group in map(without_process_group, groups)
    ]
    shown = {
        index.get(id(key), key): dict(state) if isinstance(key, torch.Tensor) else state
        for key, state in states.items()
    }
    return {"state": shown, "param_groups": numbered}


def check_same_rules(
    rule: Rule, unread: Sequence[str], fixed: Mapping[str, Any], saved: Sequence[Group], own: Sequence[Group]
) -> None:
    """Checks that saved param groups have the same rules as the optimizer's own groups.

    Args:
        rule: of the optimizer.
        unread: keys that choose another rule than the optimizer has.
        fixed: values that belong to the optimizer's class. A flag that the rule reads keeps the class's value, whatever
            was saved, as in torch. A flag that the rule does not read shows that another rule was saved.

    Raises:
        StateError: a rule differs.
    """
    for number, (theirs, mine) in enumerate(zip(saved, own, strict=True)):
        for key in unread:
            if theirs.get(key) is not None:
                raise StateError(
                    f"construct the optimizer with {key}={theirs[key]!r}, of the class that was saved, or remove "
                    f"{key!r} from the dict's groups: group {number} has it, and no step of this optimizer would read "
                    "it. Nothing was loaded."
                )
        for key, value in fixed.items():
            if key not in rule.flags and bool(theirs.get(key, value)) != value:
                raise StateError(
                    f"construct an optimizer of the class that was saved: group {number} of the dict has "
                    f"{key}={theirs[key]!r}, which the rule {rule.name!r} does not read, so its steps would differ. "
                    "Nothing was loaded."
                )
        names = name_in(rule, theirs), name_in(rule, mine)
        if names[0] != names[1]:
            raise StateError(
                f"construct the optimizer with the groups that were saved: group {number} of the dict takes the rule "
                f"{names[0]!r}, here it takes {names[1]!r}, which has other states and updates. Nothing was loaded."
            )


def read_state_dict(
    state_dict: Mapping[str, Any], groups: Sequence[Group], table: StateTable
) -> tuple[dict[torch.nn.Parameter, ParamState], dict[Any, Any]]:
    """Returns the checked states by param, and the user's own entries. Changes nothing.

    Args:
        groups: the dict's groups with params in place of their numbers.

    Raises:
        StateError: tensors are missing, unknown or of other shapes.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    owners = dict(zip(keys, named_params(groups), strict=True))
    loaded, own, of_params = {}, {}, {int, *map(type, keys)}
    for key, state in state_dict["state"].items():
        if type(key) not in of_params:
            own[key] = state
            continue
        if key not in owners:
            raise StateError(
                f"load the state dict as it was saved: it has a state for {key!r}, which none of its param groups "
                "lists, so it was edited or belongs to another optimizer."
            )
        name, param, group = owners[key]
        loaded[param] = table.read(state, group, param, name)
        loaded[param].notes = {key: _cast(value, param) for key, value in loaded[param].notes.items()}
    return loaded, own


def _cast(value: Any, param: torch.nn.Parameter) -> Any:
    """Returns a script's own entry as torch loads it: tensors in the dtype of the param, on its device."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # a resharded param allows only its shape to be read
            return value.to(param.device, param.dtype if param.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: _cast(each, param) for key, each in value.items()}
    return type(value)(_cast(each, param) for each in value) if type(value) in (list, tuple) else value


def read_states_of_params(
    states: Mapping[Any, Any], groups: Sequence[Group], table: StateTable
) -> tuple[dict[torch.nn.Parameter, ParamState], dict[Any, Any]]:
    """Returns the checked states of a dict by param, as :func:`read_state_dict` does of one by number.

    Raises:
        StateError: as there; or a param is in no group.
    """
    own = {key: value for key, value in states.items() if not isinstance(key, torch.Tensor)}
    given: dict[Any, Any] = {key: state for key, state in states.items() if key not in own and state}
    known = {param: (name, group) for name, param, group in named_params(groups)}
    unknown = [tuple(param.shape) for param in given if param not in known]
    if unknown:
        raise StateError(
            "give states of params that are in param groups, by these params: found states of tensors of shapes "
            f"{unknown[:3]}, which no group has, and no step would read them. Nothing was loaded."
        )
    return {param: table.read(state, known[param][1], param, known[param][0]) for param, state in given.items()}, own
