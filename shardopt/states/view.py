"""What ``optimizer.state`` shows: a mapping as torch's, made when it is looked at."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeGuard

import torch

from ..config import Options
from ..domain.dtensors import LocalParams
from ..domain.formats import counts_steps
from ..domain.param import Group, named_params
from ..errors import StateError
from ..rules import Rule
from .table import StateTable


class Viewed(Protocol):
    """What is seen of an optimizer's engine."""

    lock: threading.RLock
    states: StateTable
    rule: Rule
    options: Options

    @property
    def groups(self) -> Sequence[Group]:
        """The param groups."""

    def check_weights(self, call: str) -> None:
        """Raises ShardoptError where params show the average of the weights."""


def _is_param(key: object) -> TypeGuard[torch.nn.Parameter]:
    return isinstance(key, torch.Tensor)


class StateView(Mapping[Any, Any]):
    """Params without a state have an empty one, and are left out when iterated over.

    Keys that are no tensors are the user's own: what is kept under them goes with ``state_dict()``, as torch's does.
    """

    def __init__(self, engine: Viewed):
        self._engine = engine
        self._counts_steps = counts_steps(engine.rule, engine.options)

    @property
    def _states(self) -> StateTable:
        return self._engine.states

    def _group_of(self, param: torch.nn.Parameter) -> Group:
        group = self._states.places.group_of(self._engine.groups, param)
        if group is None:
            raise KeyError(f"a tensor of shape {tuple(param.shape)} that is in none of the optimizer's param groups")
        return group

    def __getitem__(self, param: Any) -> Any:
        if not _is_param(param):
            return self._states.own[param]
        group = self._group_of(param)
        state = self._states.find(param, group)
        shown = {} if state is None else LocalParams.outside(param, state.to_torch(self._counts_steps))
        return MappingProxyType(shown)

    def __setitem__(self, param: Any, state: Any) -> None:
        """Loads the state of one param: frameworks assign what they moved to a device."""
        if not _is_param(param):
            self._states.own[param] = state
            return
        group = self._group_of(param)
        name = next(name for name, each, _ in named_params(self._engine.groups) if each is param)
        read = self._states.read(state, group, param, name)
        self._engine.check_weights("loading a state")
        with self._engine.lock:
            self._states.put(param, read, bool(state))

    # Frameworks count and look up without reading: a state may lie on a disk, or have to be decoded.

    def __iter__(self) -> Iterator[Any]:
        grouped = {param: group for group in self._engine.groups for param in group["params"]}
        has = self._states.has
        found = [param for param, group in grouped.items() if has(param, group, self._counts_steps)]
        return iter([*found, *self._states.own])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, param: object) -> bool:
        if not _is_param(param):
            return param in self._states.own
        group = self._states.places.group_of(self._engine.groups, param)
        return group is not None and self._states.has(param, group, self._counts_steps)

    def __repr__(self) -> str:
        return f"StateView({dict(self)!r})"

    def __delitem__(self, param: Any) -> None:
        if _is_param(param):
            self._refuse()
        del self._states.own[param]

    def pop(self, param: Any, *default: Any) -> Any:
        if _is_param(param):
            self._refuse()
        return self._states.own.pop(param, *default)

    def setdefault(self, param: Any, default: Any = None) -> Any:
        if _is_param(param):
            self._refuse()
        return self._states.own.setdefault(param, default)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "optimizer.state is a view of shards, and this change would be lost. Assign a param's whole state "
            "(`state[param] = {...}`), or change what you need in state_dict() and give it to load_state_dict(); "
            "`optimizer.state = {}` forgets all states."
        )

    popitem = clear = update = _refuse
