"""``optimizer.state``: a mapping as torch's, made when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch

from ..domain.dtensors import DTensorLocals
from ..domain.formats import counts_steps, formats_for
from ..domain.param import named_params
from ..domain.param_state import ParamState, is_note
from ..errors import StateError
from .held_state import HeldState

if TYPE_CHECKING:
    from ..domain.param import Group
    from ..engine import Engine
    from ..states.table import StateTable


def _is_param(key: object) -> TypeGuard[torch.nn.Parameter]:
    return isinstance(key, torch.Tensor)


class StateView(Mapping[Any, Any]):
    """A mapping from params to states. A param without a state shows an empty one, and iteration omits it.

    Keys that are not tensors are the user's own: their values go with ``state_dict()``, as in torch.
    """

    def __init__(self, engine: Engine, in_dict: bool = False):
        """``in_dict``: for a state dict."""
        self._engine, self._in_dict = engine, in_dict

    @property
    def _states(self) -> StateTable:
        return self._engine.states

    def _counts_steps(self, group: Group) -> bool:
        return counts_steps(self._engine.rule.of(group), self._engine.options)

    def _group_of(self, param: torch.nn.Parameter) -> Group:
        groups = self._engine.groups
        group = self._states.group_of(groups, param) or self._states.group_left(groups, param)
        if group is None:
            raise KeyError(f"a tensor of shape {tuple(param.shape)} that is in none of the optimizer's param groups")
        return group

    def __getitem__(self, param: Any) -> Any:
        if not _is_param(param):
            return self._states.own[param]
        return HeldState(StateView(self._engine), param, self.shown(param))

    def take(self) -> AbstractContextManager[None]:
        """Context of one read or change in the optimizer's turn."""
        return self._engine.turn.take("optimizer.state")

    def shown(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Returns the state of a param in torch's form; empty if it has none."""
        if param in self._states.unplaced and self._states.group_of(self._engine.groups, param) is None:
            return dict(self._states.unplaced[param])
        group = self._group_of(param)
        self._states.settle(self._engine.groups)
        if param in self._states.unfit:
            self._states.check_fit(self._engine.groups)
        found = self._states.held(param, group, self._counts_steps(group), self._in_dict)
        if found is None:
            state = self._states.find(param, group)
            shown = {} if state is None else state.to_torch(self._counts_steps(group))
            found = dict(DTensorLocals.outside(param, shown, () if state is None else state.margins))
        notes = self._states.notes.get(param)
        return {**found, **notes} if notes else found

    def note(self, param: torch.nn.Parameter, given: dict[str, Any]) -> dict[str, Any]:
        """Keeps what of these entries are a script's own, and returns the others."""
        if param in self._states.unplaced:
            return given
        rule = self._engine.rule.of(self._group_of(param))
        notes = {key: value for key, value in given.items() if is_note(key, rule)}
        if notes:
            self._states.set_notes(param, {**self._states.notes.get(param, {}), **notes})
        return {key: value for key, value in given.items() if key not in notes}

    def drop_note(self, param: torch.nn.Parameter, key: str) -> bool:
        """Drops a note; returns False if there is none of this key."""
        notes = dict(self._states.notes.get(param, {}))
        is_there = notes.pop(key, self) is not self
        self._states.set_notes(param, notes)
        return is_there

    def keep_unfit(self, param: torch.nn.Parameter, found: str) -> None:
        """Notes that a param's state was assigned what its record cannot hold; the next step raises it."""
        self._states.unfit[param] = found

    def __setitem__(self, param: Any, state: Any) -> None:
        """Loads the state of one param: frameworks assign states that they moved to a device."""
        if not _is_param(param):
            self._states.own[param] = state
            return
        group = self._states.group_of(self._engine.groups, param)
        if group is None:  # surgery puts the param into its group next
            self._states.unplaced[param] = dict(state)
            return
        name = next(name for name, each, _ in named_params(self._engine.groups) if each is param)
        read = self._states.read(state, group, param, name)
        self._engine.check_weights("loading a state")
        self._states.put(param, read, len(state) > len(read.notes))

    # The methods below read no tensor: frameworks iterate and look up without a use for the values, and a state may lie
    # on a disk or have to be decoded.

    def __iter__(self) -> Iterator[Any]:
        self._states.settle(self._engine.groups)
        grouped = {param: group for group in self._engine.groups for param in group["params"]}
        has = self._states.has
        found = [param for param, group in grouped.items() if has(param, group, self._counts_steps(group))]
        return iter([*found, *self._states.own])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        """True too where no step makes a state, as for plain SGD.

        torch's ``get_optimizer_state_dict()`` takes a step while this is false: a rank that saves alone would wait for
        the others. Test: test_one_rank_reads_alone_over_messages in tests/domain/test_full_state_dict.py.
        """
        return len(self) > 0 or not any(map(self._makes_states, self._engine.groups))

    def _makes_states(self, group: Group) -> bool:
        """True if the params of a group have states after a step."""
        rule, options = self._engine.rule, self._engine.options

        def keeps(param: torch.nn.Parameter) -> bool:
            variant = rule.variant(group, tuple(param.shape))
            has_master = formats_for(rule, options, param.dtype, param.numel()).master is not None
            return bool(variant.states or variant.margins or has_master)

        return bool(self._counts_steps(group) or rule.of(group).carried) or any(map(keeps, group["params"]))

    def __contains__(self, param: object) -> bool:
        if not _is_param(param):
            return param in self._states.own
        self._states.settle(self._engine.groups)
        group = self._states.group_of(self._engine.groups, param)
        return group is not None and self._states.has(param, group, self._counts_steps(group))

    def __repr__(self) -> str:
        return f"StateView({dict(self)!r})"

    def __delitem__(self, param: Any) -> None:
        """Forgets the state of one param, as before its first step; every rank must do it."""
        if not _is_param(param):
            del self._states.own[param]
            return
        # Surgery may replace the param first, and torch's mapping has an empty state of each param that was looked up.
        self._engine.check_weights("loading a state")
        self._states.put(param, ParamState(), False)

    def pop(self, param: Any, *default: Any) -> Any:
        if not _is_param(param):
            return self._states.own.pop(param, *default)
        popped = self.get(param)
        if popped is None:
            if default:
                return default[0]
            raise KeyError(param)
        del self[param]
        return dict(popped)

    def get(self, param: Any, default: Any = None) -> Any:
        """Returns the state of a param, or ``default`` where there is none yet, as torch's mapping does."""
        try:
            return self[param] or default if _is_param(param) else self[param]
        except KeyError:
            return default

    def setdefault(self, param: Any, default: Any = None) -> Any:
        if _is_param(param):
            self._refuse()
        return self._states.own.setdefault(param, default)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "assign a param's state (`state[param] = {...}`) or forget it (`del state[param]`), or change state_dict() "
            "and give it to load_state_dict(); `optimizer.state = {}` forgets all states. optimizer.state is a view "
            "of shards, and this change would be lost."
        )

    popitem = clear = update = _refuse


class StateInTurn(StateView):
    """What a script sees: each read and each change takes the optimizer's turn.

    So a lookup in the middle of a step waits (from another thread) or raises StateError (from a signal handler).
    """

    def __getitem__(self, param: Any) -> Any:
        with self.take():
            return super().__getitem__(param)

    def __setitem__(self, param: Any, state: Any) -> None:
        with self.take():
            super().__setitem__(param, state)

    def __iter__(self) -> Iterator[Any]:
        with self.take():
            return super().__iter__()

    def __contains__(self, param: object) -> bool:
        with self.take():
            return super().__contains__(param)

    def __delitem__(self, param: Any) -> None:
        with self.take():
            del StateView(self._engine)[param]

    def pop(self, param: Any, *default: Any) -> Any:
        with self.take():
            return StateView(self._engine).pop(param, *default)

    def get(self, param: Any, default: Any = None) -> Any:
        with self.take():
            return StateView(self._engine).get(param, default)

    def setdefault(self, param: Any, default: Any = None) -> Any:
        with self.take():
            return super().setdefault(param, default)
