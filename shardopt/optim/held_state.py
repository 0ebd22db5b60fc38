"""``optimizer.state[param]``: a dict of one param's state, whose assignments reach the record."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, Self

import torch

from ..errors import StateError


class States(Protocol):
    """The states of all params, to a caller that has the optimizer's turn."""

    def take(self) -> AbstractContextManager[None]:
        """Context of one read or change in the optimizer's turn."""

    def shown(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Returns the state of a param in torch's form; empty if it has none."""

    def keep_unfit(self, param: torch.nn.Parameter, found: str) -> None:
        """Notes that a param's state was assigned what its record cannot hold; the next step raises it."""

    def note(self, param: torch.nn.Parameter, given: dict[str, Any]) -> dict[str, Any]:
        """Keeps what of these entries are a script's own, and returns the others."""

    def drop_note(self, param: torch.nn.Parameter, key: str) -> bool:
        """Drops a note; returns False if there is none of this key."""

    def __contains__(self, param: object) -> bool: ...

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None: ...


class HeldState(dict[str, Any]):
    """A dict whose assignments load the param's state anew, in any format and on any tier; every rank must assign.

    Once the record is forgotten, or the param has left its group, it is the caller's own dict, as in torch: surgery
    reads a state, deletes it, changes what it read and assigns that to a new param. Some surgery changes shapes first
    and deletes then: from the first tensor of another shape on it is the caller's own dict, too, and the next step
    raises a StateError unless the record was forgotten by then. Copies and pickles are plain dicts.
    """

    _is_unfit = False  # a tensor of another shape was assigned

    def __init__(self, states: States, param: torch.nn.Parameter, shown: dict[str, Any]):
        super().__init__(shown)
        self._states, self._param = states, param

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *given: Any, **named: Any) -> None:
        with self._states.take():
            new = dict(*given, **named)
            if self._is_apart():
                super().update(new)
                return
            if "master" in new and "master" not in self:
                raise StateError(
                    "write to the param: 'master' was assigned to the state of a param that has no master weights, "
                    "and no step would read it. Nothing was written."
                )
            rest = self._states.note(self._param, new)
            super().update({name: value for name, value in new.items() if name not in rest})
            if rest and self._changes_shape(rest):
                super().update(rest)
            elif rest:  # from the state of now: a step may have passed since this was read
                self._load({**self._states.shown(self._param), **rest})

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        with self._states.take():
            if self._is_apart() or self._states.drop_note(self._param, name):
                super().__delitem__(name)
                return
            state = self._states.shown(self._param)
            state.pop(name, None)
            if not state:
                self._refuse()
            self._load(state)

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def clear(self) -> None:
        """Forgets the record, as ``del optimizer.state[param]`` does."""
        with self._states.take():
            if self and not self._is_apart():
                self._states[self._param] = {}
        super().clear()

    def popitem(self) -> tuple[str, Any]:
        self._refuse()

    def _is_apart(self) -> bool:
        return self._is_unfit or (bool(self) and self._param not in self._states)

    def _changes_shape(self, new: dict[str, Any]) -> bool:
        """True, once noted, if one of the tensors has another shape than what it replaces."""
        tensors = {name: value for name, value in new.items() if isinstance(value, torch.Tensor)}
        present = {name: self[name] for name in tensors if isinstance(self.get(name), torch.Tensor)}
        for name, its in present.items():
            if its.dim() and its.shape != tensors[name].shape:
                self._is_unfit = True
                self._states.keep_unfit(self._param, f"{name} of shape {tuple(tensors[name].shape)}")
        return self._is_unfit

    def _load(self, state: dict[str, Any]) -> None:
        self._states[self._param] = state
        super().clear()
        super().update(self._states.shown(self._param))

    def _refuse(self) -> NoReturn:
        raise StateError(
            "forget the whole state (`del optimizer.state[param]`): a step needs all of its entries or none, and this "
            "change would leave some of them out."
        )

    def copy(self) -> dict[str, Any]:
        return dict(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
