"""What ``optimizer.state`` shows: a mapping as torch's, read-only, made when it is looked at."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .entry import named_params
from .errors import StateError

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer


class StateView(Mapping[torch.nn.Parameter, Mapping[str, Any]]):
    """Params without a state have an empty one, and are left out when iterated over."""

    def __init__(self, optimizer: "ShardedOptimizer"):
        self._optimizer = optimizer

    def __getitem__(self, param: torch.nn.Parameter) -> Mapping[str, Any]:
        optimizer = self._optimizer
        for _, each, group in named_params(optimizer.param_groups):
            if each is param:
                state = optimizer._param_state(param, group)
                return MappingProxyType({} if state is None else state.to_torch(optimizer.rule))
        raise KeyError(param)

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        states = self._optimizer._param_states()
        # SGD without momentum keeps none.
        return iter([param for param, state in states.items() if state.to_torch(self._optimizer.rule)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, param: object) -> bool:
        return any(each is param for each in self)

    def __repr__(self) -> str:
        return f"StateView({dict(self)!r})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "optimizer.state is a view of shards and cannot be changed: an assignment would be lost. Change what you "
            "need in state_dict() and give it to load_state_dict(); `optimizer.state = {}` forgets all states."
        )

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = _refuse
