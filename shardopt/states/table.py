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
from ..errors import StateError
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
        unplaced: states that were assigned to params of no group: surgery on a model may do so before the new param is
            in its group. As they were given.
        unfit: params whose record was assigned a tensor of another shape -> what was found. Surgery does so before it
            forgets the record; else the next step raises it.
    """

    def __init__(self, rule: Rule, locals_: DTensorLocals):
        self.domains_of_model: Domains | None = None
        self.waiting: States = {}
        self.consolidated: States | None = None
        self.own: dict[Any, Any] = {}
        self.unplaced: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self.unfit: dict[torch.nn.Parameter, str] = {}
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
        self.drop_unplaced(param)
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
        self.unplaced, self.unfit = {}, {}

    # -- surgery: params are replaced by others, with their states ---------------------------------------------------

    def settle(self, groups: Sequence[Group]) -> None:
        """Loads the states of params that have come into a group since they were assigned.

        Raises:
            StateError: one does not fit its param.
        """
        for param in [param for param in self.unplaced if self.group_of(groups, param) is not None]:
            name, group = next((name, group) for name, each, group in named_params(groups) if each is param)
            state = self.unplaced[param]
            self.put(param, self.read(state, group, param, name), bool(state))

    def check_fit(self, groups: Sequence[Group]) -> None:
        """Raises StateError if the state of a param in a group was assigned a tensor of another shape."""
        for name, param, _ in named_params(groups) if self.unfit else ():
            if param in self.unfit:
                raise StateError(
                    "forget the state (`del optimizer.state[param]`) and assign it to the new param, or assign one of "
                    f"the param's shape: {self.unfit[param]} was assigned to the state of {name}, and an update with "
                    "it would be one of other elements."
                )

    def drop_unplaced(self, param: torch.nn.Parameter) -> None:
        """Drops what was assigned to a param and no record has."""
        self.unplaced.pop(param, None)
        self.unfit.pop(param, None)

    def end_step(self, groups: Sequence[Group]) -> None:
        """Drops what no step keeps: consolidated states, and what was assigned to params that are in no group."""
        self.consolidated = None  # also after a skipped step, in which masters follow written weights
        self.unplaced, self.unfit = {}, {}
        if self.waiting:
            listed = {self._locals.of(param) for group in groups for param in group["params"]}
            self.waiting = {local: state for local, state in self.waiting.items() if local in listed}

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

    def group_left(self, groups: Sequence[Group], param: torch.nn.Parameter) -> Group | None:
        """Returns a group with the states of a param that has left its own; None if the param has no state."""
        local = self._locals.of(param)
        domain, waiting = self.domain_of(local), self.waiting.get(local)
        if domain is not None:
            rule = domain.entries[local].rule
            return next((group for group in groups if self._rule.of(group).name == rule), None)
        names = None if waiting is None else {*waiting.tensors, *waiting.margins}

        def has_them(group: Group) -> bool:
            variant = self._rule.variant(group, tuple(param.shape))
            return names is not None and names <= {*variant.states, *variant.margins, "master"}

        return next(filter(has_them, groups), None)

    def _look(self, groups: Sequence[Group], param: torch.nn.Parameter) -> Group | None:
        number, index = self._places.get(param, (0, -1))
        if index < 0 or number >= len(groups) or index >= len(groups[number]["params"]):
            return None
        return groups[number] if groups[number]["params"][index] is param else None
