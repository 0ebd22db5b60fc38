"""The record of one bound param, and the list of params before they are bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch

from ..errors import BindingError
from ..rules.rule import EMA
from ..tensors.part import Part
from .dtensors import local_gradient, placed_gradient, shown_as
from .history import History
from .hyperparameters import Group as Group

if TYPE_CHECKING:
    from ..tensors.gradient_slice import GradientSlice
    from .param_state import ParamState
    from .shard import Shard

Candidate = tuple[str, torch.nn.Parameter, Group]  # name for messages, param, its group


class MasterState(Enum):
    """The relation of a bound param's master weights to the param.

    A state dict and the weights of a model may be loaded in either order, so a loaded master and its param may differ
    until the next step. Params without a master have these states as well. A master "in halves" (``master="split"``)
    is kept as the low bits that complete its param. A whole one is compared whenever it is loaded from the store, in
    each of these states. The state after each event:

    =================================================  =========  =========  =========  =========
    event                                              FOLLOWS    LOADED     UNMATCHED  STALE
    =================================================  =========  =========  =========  =========
    a step updates the param                           FOLLOWS    FOLLOWS    FOLLOWS    FOLLOWS
    a state is loaded, whose master is whole or fits   LOADED     LOADED     LOADED     LOADED
    a state is loaded, with the halves of others       UNMATCHED  UNMATCHED  UNMATCHED  UNMATCHED
    a state is loaded, without a master, in halves     STALE      STALE      STALE      STALE
    refresh_masters()                                  FOLLOWS    LOADED     LOADED     STALE
    all states are forgotten                           FOLLOWS    LOADED     LOADED     STALE
    =================================================  =========  =========  =========  =========
    """

    FOLLOWS = "the master is that of the param at ``ParamRecord.version``; a later version was written by others"
    LOADED = "the param was bound or its master was loaded: the next step keeps halves"
    UNMATCHED = "a master in halves was loaded and does not round to the param: the shard keeps all of it meanwhile"
    STALE = "the low bits belong to other weights: the next step makes the master what the param is"


@dataclass(eq=False)
class ParamRecord:
    """All that is known of one bound param. The domain keeps it in a table: the user's tensor gets no attribute.

    Attributes:
        name: for messages.
        index: in the shard's bucket.
        outer: the param as the model has it: a DTensor whose local tensor is ``param``, else ``param`` itself.
        initial: what states hold before the first step, by name; empty if the rule makes its states in a step.
        rule: the name of the rule whose states the shard was made for.
        version: of the param's data when the master last followed it; None in every state but FOLLOWS.
        history: the updates so far, shared with params that took the same.
        margins: states with a value for each row or column, whole on every rank, fp32 in host memory; never written to,
            as a state dict or a save may hold them.
        begins_average: True if the average of the weights starts with the weights that the next step finds.
        gradient_slice: this rank's slice of the reduced gradient, if the module was handed over.
        drawn: the step in which noise was last drawn for this param, and the number of the draw in it.
        shape: of the whole param, of which a DTensor's ``param`` is a slice.
    """

    param: torch.nn.Parameter
    name: str
    shard: Shard
    index: int
    outer: torch.nn.Parameter
    initial: Mapping[str, float] = field(default_factory=dict)
    rule: str = ""
    version: int | None = None
    master_state: MasterState = MasterState.LOADED
    history: History = field(default_factory=History)
    margins: dict[str, torch.Tensor] = field(default_factory=dict)
    has_state: bool = False
    begins_average: bool = False
    gradient_slice: GradientSlice | None = None
    drawn: tuple[int, int] = (0, -1)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.has_state, self.shape = bool(self.initial), tuple(self.outer.shape)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.history.step

    @property
    def carried(self) -> dict[str, float]:
        """Scalars that the rule passes to the next step."""
        return self.history.carried

    # -- the gradient ----------------------------------------------------------------------------------------------

    @property
    def grad(self) -> torch.Tensor | None:
        """The tensor in ``outer.grad``; of a DTensor its local tensor."""
        return self.outer.grad if self.outer is self.param else local_gradient(self.outer)

    def place_gradient(self) -> None:
        """Gives the gradient of a DTensor the placements of the param. Collective over its mesh if they differ.

        Sequence parallelism brings sums still to be made (``Partial``), at each backward.
        """
        self.outer.grad = placed_gradient(self.outer)

    def show_gradient(self, grad: torch.Tensor | None) -> None:
        """Sets ``outer.grad``; for a DTensor to one with this local tensor."""
        self.outer.grad = grad if grad is None or self.outer is self.param else shown_as(self.outer, grad)

    # -- the master and the average --------------------------------------------------------------------------------

    def follow_param(self) -> None:
        """Records that the master is that of the present param. Called at the end of a step."""
        self.version, self.master_state = self.param._version, MasterState.FOLLOWS

    def note_replaced(self) -> None:
        """Records that the param or its master was replaced: the next step compares the two."""
        self.version, self.master_state, self.begins_average = None, MasterState.LOADED, False
        self.shard.unmatched_masters.pop(self.index, None)
        if self.shard.has_whole_masters:
            self.shard.loaded_masters[self.index] = True

    def note_loaded(self, state: ParamState) -> None:
        """Records that ``state`` was loaded, and keeps its master if the weights that it rounds to are not loaded yet.

        The weights of the model may be loaded after its states, so the next step compares the two.
        """
        shard, master = self.shard, state.tensors.get("master")
        self.note_replaced()
        self.begins_average = _lacks_average(shard, state)
        if shard.has_whole_masters and master is not None:
            shard.note_loaded_master(self.index, self._own_values(master))
        if not shard.masters or shard.has_whole_masters:
            return
        if master is None:
            self.master_state = MasterState.STALE
            return
        own, kept = self._own_values(master), shard.read("master", self.index)
        if not torch.equal(kept, own.to(kept.device)):
            self.master_state = MasterState.UNMATCHED
            shard.unmatched_masters[self.index] = own.clone()

    def drop_unmatched_master(self) -> None:
        """Drops a loaded master: the shard holds the bits of it that fit the param, or no step will need it."""
        if self.shard.unmatched_masters.pop(self.index, None) is not None:
            self.master_state = MasterState.LOADED

    # -- states ----------------------------------------------------------------------------------------------------

    def write_state(self, state: ParamState) -> None:
        """Writes this rank's slices of a checked state to the shard."""
        shard, index = self.shard, self.index
        shard.ensure_states(name for name in state.tensors if name != "master")
        for name, tensor in state.tensors.items():
            if name != "master" or shard.masters:
                shard.write(name, index, shard.slice_of(index).start, self._own_values(tensor))
        if _lacks_average(shard, state):
            shard.begin_average(index)

    def write_initial(self) -> None:
        """Fills the states, which are zeros, with what they hold before the first step."""
        where = self.shard.slice_of(self.index)
        for name, value in self.initial.items():
            if value:
                # One number of no stride: the shard encodes it a piece at a time.
                values = torch.tensor(value).expand(where.local.stop - where.local.start)
                self.shard.write(name, self.index, where.start, values)

    def load_counters(self, state: ParamState) -> None:
        """Takes the step count, the carried scalars and the margins of a state that was loaded."""
        self.history, self.has_state = History(state.step, state.carried), True
        self.margins = {name: _on_host(tensor) for name, tensor in state.margins.items()}

    def note_update(self, margins: dict[str, torch.Tensor]) -> None:
        """Records an update, which the history counts."""
        self.margins, self.has_state, self.begins_average = margins, True, False
        self.shard.loaded_masters.pop(self.index, None)

    def forget(self) -> None:
        """Returns to before the param's first step. The caller zeroes the states and calls :meth:`write_initial`."""
        self.history, self.margins, self.has_state = History(), {}, bool(self.initial)
        self.begins_average = False
        self.drop_unmatched_master()

    def _own_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor of the param's state, 1D, in storage order."""
        where = self.shard.slice_of(self.index)
        if isinstance(tensor, Part):
            first, flat = where.start - tensor.start, tensor.local
        else:
            first, flat = where.start, self.shard.in_order(self.index, tensor.detach())
        return flat[first : first + where.local.stop - where.local.start]

    @property
    def is_source(self) -> bool:
        """True if a tensor was assigned to ``param.data`` that the bucket takes once all ranks have agreed to it."""
        return self.shard.takes_sources and self.shard.bucket.is_source(self.index)

    def check(self) -> None:
        """Raises BindingError if the param neither lies in its bucket nor is a source, which the next step takes."""
        bucket = self.shard.bucket
        if not bucket.holds(self.index) and not self.is_source:
            param = self.param
            if bucket.is_source(self.index):
                raise BindingError(
                    f"call param.copy_(tensor) in place of param.data = tensor for {self.name}: with release_gradients "
                    "a bucket is updated in the middle of backward, before the tensor could be taken into it."
                )
            raise BindingError(
                f"{self.name} was moved, recast or given other storage after the first step (now "
                f"{_describe(param)}, bound on {bucket.device} as {bucket.dtype}): an update would go to memory that "
                "the model no longer reads. Move and cast the model before the first step; to do it later keep "
                "optimizer.state_dict() (consolidated, at several ranks), call close(), and construct it anew."
            )


def named_params(groups: Sequence[Group]) -> Iterator[Candidate]:
    """Yields every param with a name for messages and its group, in the order of the groups."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            where = f"param {index} of group {number} (shape {tuple(param.shape)})"
            yield (f"{where} {names[index]!r}" if names else where), param, group


def without_process_group(group: Group) -> Group:
    """Returns what of a group can be saved: its process group is this run's."""
    return {key: value for key, value in group.items() if key != "process_group"}


def _lacks_average(shard: Shard, state: ParamState) -> bool:
    """True if an average of the weights is kept, and a state from after the first step holds none."""
    return bool(state.step) and EMA in shard.formats.states and EMA not in state.tensors


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory, contiguous and fp32."""
    return torch.empty(tensor.shape, dtype=torch.float32).copy_(tensor.detach())


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
