"""State dicts in torch's format: params by number, states by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.param import named_params, without_process_group
from ..errors import StateError

if TYPE_CHECKING:
    from ..domain.param import Group
    from ..domain.param_state import ParamState
    from .table import StateTable


def to_state_dict(groups: Sequence[Group], states: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns ``{"state": {number: {...}}, "param_groups": [...]}``.

    Args:
        states: by param; another key is the user's own and stays.
    """
    index: dict[int, int] = {}
    for number, param in enumerate(param for group in groups for param in group["params"]):
        index.setdefault(id(param), number)  # as torch: a param that is listed twice has its first number
    numbered = [
        {key: [index[id(param)] for param in value] if key == "params" else value for key, value in group.items()}
        for group in map(without_process_group, groups)
    ]
    shown = {
        index.get(id(key), key): dict(state) if isinstance(key, torch.Tensor) else state
        for key, state in states.items()
    }
    return {"state": shown, "param_groups": numbered}


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
                "lists. It was edited or belongs to another optimizer."
            )
        name, param, group = owners[key]
        loaded[param] = table.read(state, group, param, name)
    return loaded, own
