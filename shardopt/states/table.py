"""The states of an optimizer's params, wherever they are: waiting to be bound, in shards, or consolidated."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..domain.domain import Domain
from ..domain.domains import Composition
from ..domain.dtensors import LocalParams
from ..domain.group_index import Places
from ..domain.param import Group, named_params
from ..domain.param_state import ParamState
from ..rules import Rule
from .shard_io import check_parts, load_states, names_of, put_state, read_state

States = dict[torch.nn.Parameter, ParamState]


class StateTable:
    """By local param: a DTensor's state is that of the plain tensor that it comes down to."""

    def __init__(self, rule: Rule, locals_: LocalParams):
        self.composition: Composition | None = None  # from the first step on
        self.waiting: States = {}  # those that were loaded, until their params are bound
        self.consolidated: States | None = None  # of all params, until the next step
        self.own: dict[Any, Any] = {}  # what the user keeps beside them, by keys that are no tensors
        self.places = Places()
        self._rule, self._locals = rule, locals_

    @property
    def domains(self) -> list[Domain]:
        return [] if self.composition is None else self.composition.domains

    def domain_of(self, local: torch.nn.Parameter) -> Domain | None:
        return None if self.composition is None else self.composition.domain_of(local)

    def find(self, param: torch.nn.Parameter, group: Group) -> ParamState | None:
        """None before the param's first step, but for a rule that fills states before."""
        local = self._locals.of(param)
        if self.consolidated is not None:
            return self.consolidated.get(local) or self._begun(local, group)
        domain = self.domain_of(local)
        if domain is not None:
            entry = domain.entries[local]
            return read_state(domain, entry, group) if entry.has_state else None
        return self.waiting.get(local) or self._begun(local, group)

    def _begun(self, local: torch.nn.Parameter, group: Group) -> ParamState | None:
        """The state of a param that is not bound and was not loaded; whole on every rank."""
        values = self._rule.initial_values(group)
        with torch._C.DisableTorchFunctionSubclass():  # a released param has a shape
            tensors = {name: torch.full_like(local, value, dtype=torch.float32) for name, value in values.items()}
        return ParamState(tensors=tensors) if values else None

    def has(self, param: torch.nn.Parameter, group: Group, counts_steps: bool) -> bool:
        """Whether the param's state shows anything in torch's form (plain SGD's does not); reads none of it.

        Args:
            counts_steps: whether a state shows its count of steps.
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
        """Of the params that have one."""
        found = {param: self.find(param, group) for _, param, group in named_params(groups)}
        return {param: state for param, state in found.items() if state is not None}

    def read(self, state: Mapping[str, Any], group: Group, param: torch.nn.Parameter, name: str) -> ParamState:
        """Of a state in torch's form, checked; nothing is changed.

        Raises:
            StateError: tensors are missing, unknown or of other shapes, or parts of others.
        """
        local = self._locals.of(param)
        read = ParamState.from_torch(LocalParams.inside(param, state, name), self._rule, group, local, name)
        domain = self.domain_of(local)
        if domain is not None:
            check_parts(domain, local, read)
        return read

    def put(self, param: torch.nn.Parameter, read: ParamState, has_state: bool) -> None:
        """Takes one checked state; without one the param goes back to before its first step."""
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
        """Takes checked states by param; those of all other params are forgotten.

        Raises:
            OffloadError: they cannot be kept; nothing changed.
        """
        states = {self._locals.of(param): state for param, state in loaded.items()}
        # Copied: the caller may go on training with the tensors that it saved.
        waiting = {local: state.copy() for local, state in states.items() if self.domain_of(local) is None}
        with torch.no_grad():
            for domain in self.domains:
                load_states(domain, states)
        self.wait(waiting)
        self.consolidated = None

    def wait(self, states: States) -> None:
        """These, and no others, wait until their params are bound."""
        self.waiting = states

    def forget_waiting(self, locals_: Iterable[torch.nn.Parameter]) -> None:
        """These params were bound, with the states that waited for them."""
        for local in locals_:
            self.waiting.pop(local, None)
