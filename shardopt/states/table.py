"""The states of an optimizer's params: waiting to be bound, in shards, or consolidated.

``optimizer.state`` is a view of this table (``optim/state_view.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.dtensors import DTensorLocals
from ..domain.param import named_params
from ..domain.param_state import ParamState
from .shard_io import complete_parts, load_states, names_of, put_state, read_state

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.domains import Domains
    from ..domain.param import Group
    from ..rules import Rule

States = dict[torch.nn.Parameter, ParamState]


class StateTable:
    """The states by local param: a DTensor has the state of its local tensor.

    Attributes:
        domains_of_model: None before the first step.
        waiting: states that were loaded, until their params are bound.
        consolidated: the states of all params, from ``consolidate_state_dict()`` to the next step.
        own: the user's own entries, by keys that are not tensors.
    """

    def __init__(self, rule: Rule, locals_: DTensorLocals):
        self.domains_of_model: Domains | None = None
        self.waiting: States = {}
        self.consolidated: States | None = None
        self.own: dict[Any, Any] = {}
        self._places: dict[torch.nn.Parameter, tuple[int, int]] = {}  # group, index in it
        self._rule, self._locals = rule, locals_

    @property
    def domains(self) -> list[Domain]:
        return [] if self.domains_of_model is None else self.domains_of_model.domains

    def domain_of(self, local: torch.nn.Parameter) -> Domain | None:
        return None if self.domains_of_model is None else self.domains_of_model.domain_of(local)

    def find(self, param: torch.nn.Parameter, group: Group) -> ParamState | None:
        """Returns the state of a param; None before its first step, unless the rule has initial states."""
        local = self._locals.of(param)
        if self.consolidated is not None:
            return self.consolidated.get(local) or self._initial(local, group)
        domain = self.domain_of(local)
        if domain is not None:
            entry = domain.entries[local]
            return read_state(domain, entry, group) if entry.has_state else None
        return self.waiting.get(local) or self._initial(local, group)

    def _initial(self, local: torch.nn.Parameter, group: Group) -> ParamState | None:
        """Returns the state before the first step of a param that is not bound; None if the rule has none."""
        values = self._rule.initial_values(group)
        with torch._C.DisableTorchFunctionSubclass():  # a resharded param allows only its shape to be read
            tensors = {name: torch.full_like(local, value, dtype=torch.float32) for name, value in values.items()}
        return ParamState(tensors=tensors) if values else None

    def has(self, param: torch.nn.Parameter, group: Group, counts_steps: bool) -> bool:
        """True if the param's state is not empty in torch's form, as that of plain SGD is. Reads no tensor.

        Args:
            counts_steps: True if a state shows its step count.
        """
        local = self._locals.of(param)
        domain = self.domain_of(local) if self.consolidated is None else None
        if domain is not None:
            entry = domain.entries[local]
            shown: Any = counts_steps or entry.carried or names_of(domain, entry, group)
            return entry.has_state and bool(shown)
        state = (self.waiting if self.consolidated is None else self.consolidated).get(local)
        if state is None and self._rule.initial_values(group):
            return True
        return state is not None and bool(counts_steps or state.carried or state.tensors)

    def all(self, groups: Sequence[Group]) -> States:
        """Returns the states of all params that have one."""
        found = {param: self.find(param, group) for _, param, group in named_params(groups)}
        return {param: state for param, state in found.items() if state is not None}

    def read(self, state: Mapping[str, Any], group: Group, param: torch.nn.Parameter, name: str) -> ParamState:
        """Reads and checks a state in torch's form. Changes nothing.

        Raises:
            StateError: tensors are missing, unknown or of other shapes, or parts of which the rest cannot be fetched.
        """
        local = self._locals.of(param)
        shape = tuple(param.shape)
        own = DTensorLocals.inside(param, state, name, self._rule.variant(group, shape).margins)
        read = ParamState.from_torch(own, self._rule, group, local, name, shape)
        domain = self.domain_of(local)
        if domain is not None:
            complete_parts(domain, local, read)
        return read

    def put(self, param: torch.nn.Parameter, read: ParamState, has_state: bool) -> None:
        """Loads one checked state. With ``has_state`` False the param is as before its first step."""
        local = self._locals.of(param)
        self.consolidated = None
        domain = self.domain_of(local)
        if domain is not None:
            with torch.no_grad():
                put_state(domain, local, read, has_state)
        elif has_state:
            self.waiting[local] = read.copy()
        else:
            self.waiting.pop(local, None)

    def replace(self, loaded: Mapping[torch.nn.Parameter, ParamState]) -> None:
        """Loads checked states by param, and drops those of all other params.

        Raises:
            OffloadError: the store cannot keep the states; nothing changed.
        """
        states = {self._locals.of(param): state for param, state in loaded.items()}
        # Copied: the caller may train on with the tensors that it saved.
        waiting = {local: state.copy() for local, state in states.items() if self.domain_of(local) is None}
        with torch.no_grad():
            for domain in self.domains:
                load_states(domain, states)
        self.waiting = waiting
        self.consolidated = None

    # -- the param group of a param --------------------------------------------------------------------------------

    def group_of(self, groups: Sequence[Group], param: torch.nn.Parameter) -> Group | None:
        """Returns the group of a param without a search through all groups; None if no group has it."""
        found = self._look(groups, param)
        if found is None:  # the index is out of date
            self._places = {
                each: (number, index)
                for number, group in enumerate(groups)
                for index, each in enumerate(group["params"])
            }
            found = self._look(groups, param)
        return found

    def _look(self, groups: Sequence[Group], param: torch.nn.Parameter) -> Group | None:
        number, index = self._places.get(param, (0, -1))
        if index < 0 or number >= len(groups) or index >= len(groups[number]["params"]):
            return None
        return groups[number] if groups[number]["params"][index] is param else None
