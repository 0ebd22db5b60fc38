"""What ``optimizer.state`` shows: a mapping as torch's, made when it is looked at."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .entry import named_params
from .errors import StateError
from .kept import counts_steps
from .local_params import LocalParams

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer


class StateView(Mapping[torch.nn.Parameter, Mapping[str, Any]]):
    """Params without a state have an empty one, and are left out when iterated over."""

    def __init__(self, optimizer: "ShardedOptimizer"):
        self._optimizer = optimizer
        self._counts_steps = counts_steps(optimizer.rule, optimizer.options)

    def _find(self, param: torch.nn.Parameter) -> tuple[str, Mapping[str, Any]]:
        for name, each, group in named_params(self._optimizer.param_groups):
            if each is param:
                return name, group
        raise KeyError(param)

    def __getitem__(self, param: torch.nn.Parameter) -> Mapping[str, Any]:
        _, group = self._find(param)
        state = self._optimizer._states.find(param, group)
        shown = {} if state is None else LocalParams.outside(param, state.to_torch(self._counts_steps))
        return MappingProxyType(shown)

    def __setitem__(self, param: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """Loads the state of one param: frameworks assign what they moved to a device."""
        name, group = self._find(param)
        read = self._optimizer._states.read(state, group, param, name)
        self._optimizer._check_weights("loading a state")
        self._optimizer._states.put(param, read, bool(state))

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        states = self._optimizer._states.all(self._optimizer.param_groups)
        # SGD without momentum keeps none.
        return iter([param for param, state in states.items() if state.to_torch(self._counts_steps)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, param: object) -> bool:
        return any(each is param for each in self)

    def __repr__(self) -> str:
        return f"StateView({dict(self)!r})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "optimizer.state is a view of shards, and this change would be lost. Assign a param's whole state "
            "(`state[param] = {...}`), or change what you need in state_dict() and give it to load_state_dict(); "
            "`optimizer.state = {}` forgets all states."
        )

    __delitem__ = pop = popitem = clear = update = setdefault = _refuse
