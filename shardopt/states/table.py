"""The states of an optimizer's params: waiting to be bound, in shards, or consolidated.

``optimizer.state`` is a view of this table (``optim/state_view.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.dtensors import DTensorLocals
from ..domain.full_state_dict import take_parts_along
from ..domain.param import named_params
from ..domain.param_state import ParamState, count_dtype
from ..errors import StateError
from ..tensors.held import HeldTensor
from ..tensors.held_part import HeldPart
from ..tensors.part import Part
from .held_record import HeldCount, HeldElements, HeldMargin, HeldRecord, HeldSlices
from .shard_io import complete_parts, load_states, names_of, put_state, read_state

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.domains import Domains
    from ..domain.param import Group
    from ..rules import Rule

States = dict[torch.nn.Parameter, ParamState]
_Held = dict[tuple[str, bool], HeldRecord]  # by name, and whether it is of a state dict
_HOST, _NO_DIMS = torch.device("cpu"), torch.Size()


class StateTable:
    """The states by local param: a DTensor has the state of its local tensor.

    Attributes:
        domains_of_model: None before the first step.
        waiting: states that were loaded, until their params are bound.
        consolidated: the states of all params, from ``consolidate_state_dict()`` to the next step.
        own: the user's own entries, by keys that are not tensors.
        notes: a script's own entries of params, beside their states.
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
        self.notes: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self.unplaced: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self.unfit: dict[torch.nn.Parameter, str] = {}
        self._places: dict[torch.nn.Parameter, tuple[int, int]] = {}  # group, index in it
        self._initials: States = {}  # of params that are not bound, as they were shown: a write makes them wait
        self._held: dict[torch.nn.Parameter, _Held] = {}  # what scripts hold, to be ended with the record
        self._rule, self._locals = rule, locals_

    @property
    def is_unsettled(self) -> bool:
        """True if something was assigned to a param that no record has, or of another shape."""
        return bool(self.unplaced or self.unfit)

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

    # -- what scripts hold -----------------------------------------------------------------------------------------

    def held(self, param: torch.nn.Parameter, group: Group, counts_steps: bool, in_dict: bool) -> dict[str, Any] | None:
        """Returns a param's state in torch's form, of held tensors; empty if it has none.

        None where it cannot be held: of a DTensor, and in a state dict of several ranks, which is of one moment.

        Args:
            in_dict: for a state dict, whose tensors are the script's own after a load, as torch's are.
        """
        local = self._locals.of(param)
        domain = self.domain_of(local)
        if local is not param or (in_dict and domain is not None and domain.mesh.shard.size > 1):
            return None
        if domain is None:
            return self._held_waiting(local, group, counts_steps, in_dict)
        entry = domain.entries[local]
        if not entry.has_state:
            return {}
        if not entry.shard.bucket.keeps_dims(entry.index):
            entry.check()
        shard, index, is_alone = entry.shard, entry.index, domain.mesh.shard.size == 1
        if not is_alone:
            take_parts_along()
        found: dict[str, Any] = {}
        for name in ("step", *entry.carried) if counts_steps else entry.carried:
            dtype = count_dtype(entry.step) if name == "step" else torch.float64
            found[name] = self._shown(local, name, in_dict, HeldCount, _NO_DIMS, (), dtype, _HOST)
        device = entry.param.device
        for name, margin in entry.margins.items():
            place = margin.size(), margin.stride(), margin.dtype, device
            found[name] = self._shown(local, name, in_dict, HeldMargin, *place)
        kind = HeldElements if is_alone else HeldSlices
        size, stride = shard.bucket.params[index].size(), shard.strides(index)
        device = shard.device if shard.home.tier == "device" else _HOST
        for name in names_of(domain, entry, group):
            found[name] = self._shown(local, name, in_dict, kind, size, stride, torch.float32, device)
        return found

    def _held_waiting(
        self, local: torch.nn.Parameter, group: Group, counts_steps: bool, in_dict: bool
    ) -> dict[str, Any]:
        state = self.waiting_of(local)
        if state is None:
            state = self._initial(local, group)
            if state is None:
                return {}
            self._initials[local] = state
        found: dict[str, Any] = {}
        for name, tensor in state.to_torch(counts_steps).items():
            kind = HeldElements if name in state.tensors else HeldMargin if name in state.margins else HeldCount
            place = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
            is_part = isinstance(tensor, Part)  # loaded at several ranks: this rank's slice
            found[name] = tensor if is_part else self._shown(local, name, in_dict, kind, *place)
        return found

    def _shown(
        self,
        local: torch.nn.Parameter,
        name: str,
        in_dict: bool,
        kind: type[HeldRecord],
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Returns the tensor that shows a state; the same one while a script holds it."""
        sources = self._held.get(local)
        if sources is None:
            sources = self._held[local] = {}
        source = sources.get((name, in_dict))
        if source is None or not source.is_live or (source.device != device and source.held is None):
            source = sources[name, in_dict] = kind(self, local, name, device)
        held = source.held
        if held is None or held.dtype is not dtype or (kind is HeldElements and not isinstance(held, HeldTensor)):
            held = source.show(size, stride, dtype)
        return held

    def waits_in_parts(self, local: torch.nn.Parameter) -> bool:
        """True if this rank alone cannot tell the whole state of a param that is not bound."""
        state = self.waiting.get(local)
        return state is not None and any(
            isinstance(each, Part) for each in (*state.tensors.values(), *state.margins.values())
        )

    def waiting_of(self, local: torch.nn.Parameter) -> ParamState | None:
        """Returns the state of a param that is not bound yet; None if it has none, or its initial one was not shown."""
        return self.waiting.get(local) or self._initials.get(local)

    def written(self, local: torch.nn.Parameter) -> ParamState | None:
        """Notes a write to the state of a param; returns its state if it is not bound yet."""
        self.consolidated = None
        if self.domain_of(local) is not None:
            return None
        if local not in self.waiting and local in self._initials:
            self.waiting[local] = self._initials[local]
        return self.waiting.get(local)

    def _ending(self, local: torch.nn.Parameter, what: str | None, same: Collection[str] = ()) -> Callable[[], None]:
        """Returns what ends the tensors that a script holds of a param's state, once that was replaced.

        Args:
            what: replaces it, in words; None: it is forgotten, and what was read is the script's own.
            same: names of what stays.
        """
        known = self._held.get(local, {})
        sources = {key: each for key, each in known.items() if key[0] not in same and each.held is not None}
        kept = [each for (_, in_dict), each in sources.items() if what is None or in_dict]
        values = [each.kept() for each in kept]

        def end() -> None:
            for source, value in zip(kept, values, strict=True):
                source.keep(value)
            for source in sources.values():
                source.end(str(what))
            for key in [key for key in known if key[0] not in same]:
                del known[key]
            if not known:
                self._held.pop(local, None)

        return end

    def keep(self, locals_: Iterable[torch.nn.Parameter]) -> None:
        """Makes what scripts hold of these params' states their own: the records are freed."""
        for local in locals_:
            self._ending(local, None)()

    def end_all(self, what: str) -> None:
        """Ends what scripts hold."""
        for local in list(self._held):
            self._ending(local, what)()

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
        if param in self.notes:
            return True
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
        given, own = own, {key: _settled(value) for key, value in own.items()}
        read = ParamState.from_torch(own, self._rule, group, local, name, shape)
        read.same = frozenset(key for key, value in given.items() if self._is_shown(local, key, value))
        domain = self.domain_of(local)
        if domain is not None:
            complete_parts(domain, local, read)
        return read

    def _is_shown(self, local: torch.nn.Parameter, name: str, value: Any) -> bool:
        """True if a script gave back what it holds of this very state."""
        if not isinstance(value, HeldTensor | HeldPart) or value.is_view:
            return False
        source = value.source
        return isinstance(source, HeldRecord) and source.is_of(self, local, name)

    def put(self, param: torch.nn.Parameter, read: ParamState, has_state: bool) -> None:
        """Loads one checked state. With ``has_state`` False the param is as before its first step."""
        local = self._locals.of(param)
        self.consolidated = None
        self.drop_unplaced(param)
        domain = self.domain_of(local)
        end = self._ending(local, "its param's state was assigned" if has_state else None, read.same)
        if domain is not None:
            with torch.no_grad():
                put_state(domain, local, read, has_state)
        elif has_state:
            self.waiting[local] = read.copy()
        else:
            self.waiting.pop(local, None)
        self._initials.pop(local, None)
        end()
        self.set_notes(param, read.notes)

    def set_notes(self, param: torch.nn.Parameter, notes: dict[str, Any]) -> None:
        """Replaces what a script noted of a param."""
        if notes:
            self.notes[param] = notes
        else:
            self.notes.pop(param, None)

    def replace(self, loaded: Mapping[torch.nn.Parameter, ParamState]) -> None:
        """Loads checked states by param, and drops those of all other params.

        Raises:
            OffloadError: the store cannot keep the states; nothing changed.
        """
        states = {self._locals.of(param): state for param, state in loaded.items() if not state.is_empty}
        # Copied: the caller may train on with the tensors that it saved.
        waiting = {local: state.copy() for local, state in states.items() if self.domain_of(local) is None}
        ends = [self._ending(local, "states were loaded" if local in states else None) for local in self._held]
        with torch.no_grad():
            for domain in self.domains:
                load_states(domain, states)
        for end in ends:
            end()
        self.waiting, self._initials = waiting, {}
        self.notes = {param: dict(state.notes) for param, state in loaded.items() if state.notes}
        self.consolidated = None
        self.unplaced, self.unfit = {}, {}

    def start_anew(self, waiting: States) -> None:
        """Forgets the domains; these states wait until their params are bound."""
        self.domains_of_model, self.waiting, self.consolidated = None, waiting, None
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
            read = self.read(state, group, param, name)
            self.put(param, read, len(state) > len(read.notes))

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
        if self.notes:
            grouped = {param for group in groups for param in group["params"]}
            self.notes = {param: notes for param, notes in self.notes.items() if param in grouped}
        if self._initials:
            self._initials = {local: state for local, state in self._initials.items() if self.domain_of(local) is None}
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


def _settled(value: Any) -> Any:
    """Returns the values of now of a held tensor, which shows others once the state is replaced; else the value."""
    return value.plain() if isinstance(value, HeldTensor | HeldPart) else value
