"""Stage 3: the sharded params, those that train and those that are frozen.

A frozen param (the base of a LoRA model) is sharded like any other, and has no master, no state and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import OffloadError
from ..tensors.inner_tensors import is_wrapper, named_inside, with_inside
from ..tensors.part import Part
from ..tensors.unsharded_guard import mark_sharded, mark_whole, refused_alone
from ..units.unit import Unit
from .dtensors import is_dtensor, local_tensor, placed_as, shown_as
from .full_state_dict import part_of_param
from .shard import Shard

if TYPE_CHECKING:
    from ..partition.bucket import Bucket
    from ..partition.comm.all_gather import Window
    from ..partition.comm.holders import Holders
    from ..partition.comm.transport import Transport
    from ..partition.layout import Piece
    from ..partition.readable import Readable
    from ..units.gatherer import Gatherer
    from ..units.secondary import SecondaryShard
    from ..units.unit import GatheredBucket, ParamShard
    from .model_units import UnitPlan

Gather = Callable[[Shard, str], torch.Tensor]
GatherSlices = Callable[[Shard, torch.Tensor, str], torch.Tensor]
Namer = Callable[[torch.Tensor], str | None]
Fetcher = Callable[[Shard, int, str], Callable[[], torch.Tensor] | None]


class ShardedParams:
    """The table from sharded params to their buckets.

    Attributes:
        gatherer: of the module; experts share it with the main domain, which leads.
        is_dropped: the optimizer was dropped without ``close()``.
    """

    is_dropped = False

    def __init__(
        self,
        gatherer: Gatherer,
        transport: Transport,
        gather: Gather,
        gather_slices: GatherSlices,
        fetcher: Fetcher,
        name_of: Namer,
        leads: bool = True,
        holders: Holders | None = None,
    ):
        """
        Args:
            transport: by which the params are gathered.
            holders: the ranks that keep parts of what was gathered; None: no rank does.
            name_of: the user's name of a param.
            leads: this domain compares the orders of units.
        """
        self.gatherer, self.transport, self.leads = gatherer, transport, leads
        self._holders = holders
        gatherer.here.connect(transport, holders is not None)
        self.where: dict[torch.nn.Parameter, GatheredBucket] = {}  # of params as the model has them
        self._places: dict[torch.nn.Parameter, tuple[Shard, int]] = {}
        self.frozen: list[Shard] = []  # of params that do not train
        self._inside: dict[Any, list[Any]] = {}  # a quantized param -> its inner tensors
        self._gather, self._gather_slices = gather, gather_slices
        self._fetcher, self.name_of = fetcher, name_of
        self.asleep: Sequence[Any] = []  # see :mod:`.sleep`
        self.sleeps_in = ""  # the tier of what is asleep
        self.beds: dict[Shard, torch.Tensor] = {}  # host memory for slices that sleep

    @property
    def units(self) -> list[Unit]:
        return [unit for unit in self.gatherer.units.values() if unit.transport is self.transport]

    def message_of(self, window: int, nbytes: int) -> torch.Tensor | None:
        """Returns this rank's slice in the window of this number, as it travels in messages of so many bytes.

        None if no unit has the window. The slice is final while another rank gathers the unit.
        """
        buckets = (each for unit in self.units for each in unit.buckets if each.window.number == window)
        return next((each.message(nbytes) for each in buckets), None)

    def place_of(self, param: torch.Tensor) -> tuple[Shard, int] | None:
        """Returns the shard that holds a param, and its number in it; None if this rank has it whole."""
        is_whole = self.gatherer.here.unsharded_contexts > 0
        return None if is_whole else self._places.get(param)  # type: ignore[call-overload]

    @property
    def is_asleep(self) -> bool:
        """True while slices lie elsewhere, and no unit can be gathered."""
        return bool(self.asleep)

    @property
    def gathers_by_messages(self) -> bool:
        """True if no rank reads another's slices by their address."""
        return self.transport.ranks.size == 1 or self.transport.overlaps

    def window(self, bucket: Bucket, own: ParamShard) -> Window:
        """Collective: opens a window on a bucket; ``own`` holds this rank's slice."""
        if own.memory is None:
            return self.transport.open(bucket.flat, bucket.layout.shard_numel)
        return self.transport.open_detached(bucket.flat, own.memory)

    def secondary(self, window: Window) -> SecondaryShard | None:
        """Collective: allocates this rank's part of what a window gathers, if ranks keep parts."""
        if self._holders is None:
            return None
        from ..units.secondary import SecondaryShard  # here, as nearly no training has holders

        return SecondaryShard(self.transport, self._holders, window)

    def shard_params(
        self,
        shard: Shard,
        own: ParamShard,
        window: Window,
        secondary: SecondaryShard | None,
        unit: tuple[int, UnitPlan],
        is_frozen: bool,
        owner_of: Callable[[torch.Tensor], torch.nn.Parameter],
    ) -> None:
        """Keeps this rank's slice of the shard's params in ``own``, and frees the rest.

        Args:
            owner_of: returns the param whose inner tensor this is; a plain param itself.
        """
        number, plan = unit
        kind = plan.is_spread, plan.is_around
        new = Unit(plan.name, number, self.transport, *kind, called=plan.called, holders=self._holders)
        gathered = shard.release_params(self.gatherer, own, window, new)
        gathered.secondary = secondary
        if is_frozen:
            self.frozen.append(shard)
        for index, param in enumerate(shard.bucket.outers):
            for each in (param, *shard.bucket.beside[index]):
                self.where[each] = gathered
                mark_sharded(each, self)
                if not is_wrapper(each) or is_dtensor(each):
                    self._places[each] = shard, index
            owner = owner_of(param)
            if is_frozen and owner is not param:
                self._inside.setdefault(owner, [] if is_wrapper(owner) else [owner]).append(param)

    def readables_of(self, params: Iterable[torch.nn.Parameter]) -> tuple[Readable, ...]:
        """Returns these sharded params as what some code reads, by bucket."""
        indices: dict[Shard, list[int]] = {}
        for param in (inner for each in params for inner in self._inside.get(each, (each,))):
            shard, index = self._places[param]
            indices.setdefault(shard, []).append(index)
        return tuple(shard.bucket.readable(tuple(each)) for shard, each in indices.items())

    # -- as a SliceKeeper: of one released param -------------------------------------------------------------------

    def gather_for(self, param: torch.nn.Parameter, is_read: bool) -> bool:
        """Gathers a resharded param for an operation in the model's own code, else returns False."""
        caller = self.gatherer.passes.caller()
        return caller is not None and caller.read(param, is_read)

    def computes(self) -> bool:
        """True in the model's own code."""
        caller = self.gatherer.passes.caller()
        return caller is not None and caller.computes()

    def read(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Returns this rank's slice as a part; of a DTensor a DTensor with the part of its local tensor inside."""
        if param not in self._places:
            return with_inside(param, self.read)  # type: ignore[arg-type]
        shard, index = self._places[param]
        fetch, write = self._fetcher(shard, index, "param"), partial(self.write, param)
        gathers, is_alone = (self._gather, self._gather_slices), self.transport.ranks.size == 1
        return shown_as(param, part_of_param(shard, index, "param", *gathers, fetch, write, is_alone))

    def write(self, param: torch.nn.Parameter, whole: torch.Tensor) -> None:
        """Collective: writes this rank's slice of a whole tensor, or of a part of the same cut."""
        if self.gatherer.is_alone:
            raise refused_alone(self.name_of(param))
        if param not in self._places:
            for (_, own), (_, given) in zip(named_inside(param), named_inside(whole), strict=True):
                self.write(own, given)  # type: ignore[arg-type]
            return
        shard, index = self._places[param]
        own, where = shard.bucket.params[index], shard.slice_of(index)
        local = local_tensor(placed_as(param, whole.detach()))
        if isinstance(local, Part) and _is_cut_alike(local, own, where):
            start, values = where.start, local.local.to(shard.device)
        else:
            start, values = 0, shard.in_order(index, local.to(shard.device).expand(own.size()))
        self.gatherer.write_slice(self.where[param].unit, lambda: shard.write_param(index, start, values))
        torch.autograd.graph.increment_version([own])

    # -- of all ---------------------------------------------------------------------------------------------------

    def remove_params(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Collective: gives frozen params that will train whole values of their own.

        After an error each param either has whole values, or is sharded as before.
        """
        for param in params:
            gathered = self.where.get(param)
            if gathered is not None:
                self.gatherer.need(gathered.unit)
                try:
                    gathered.bucket.remove_param(param)
                    del self.where[param], self._places[param]
                    mark_whole(param)
                finally:
                    self.gatherer.done(gathered.unit, reshard=True)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """A context with whole params. All of them are written back: a write through ``.data`` leaves no trace."""
        gatherer, units = self.gatherer, self.units
        gatherer.need_all(units)
        before = [_holders(each) for each in units]
        gatherer.here.unsharded_contexts += 1
        try:
            yield
        finally:
            gatherer.here.unsharded_contexts -= 1
            problem = self._write_back(units)
            for each, holders in zip(units, before, strict=True):
                if not each.users:  # a step inside failed, and the unit was not gathered again
                    continue
                if _holders(each) > holders:  # a state_dict(), say, which holds the whole params until it is saved
                    gatherer.done_but_viewed(each)
                else:
                    gatherer.done(each, reshard=True)
            self._end_writes(units, problem)

    def _write_back(self, units: Sequence[Unit]) -> OffloadError | None:
        """Collective: writes this rank's slices of whole params. Returns why it could not, for :meth:`_end_writes`."""
        problem: OffloadError | None = None
        for each in units:
            if each.users:
                try:
                    self.gatherer.write_back(each)
                except OffloadError as error:
                    problem = error
        return problem

    def _end_writes(self, units: Sequence[Unit], problem: OffloadError | None) -> None:
        """Collective: waits until every rank has written its slices; raises on all ranks if one could not."""
        writes = self.gatherer.writes
        writes.after_writes()
        if any(each.param_shard.memory is None for unit in units for each in unit.buckets):
            writes.confirm(problem)

    @contextmanager
    def resharded(self) -> Iterator[None]:
        """A context for a step inside ``unsharded()``: params are written back before it, and gathered after it."""
        gatherer, units = self.gatherer, self.units
        self._end_writes(units, self._write_back(units))
        users = [each.users for each in units]
        for each in units:
            each.users = 0
            gatherer.reshard(each)
        try:
            yield
        finally:
            gatherer.need_all(units)
            for each, count in zip(units, users, strict=True):
                each.users = count

    def give_back(self) -> None:
        """Collective: makes every param whole. Afterwards no other rank reads this rank's slices."""
        self.gatherer.drop_all()
        for each in self.units:
            self.gatherer.need(each)
        for param in self.where:
            mark_whole(param)
        self.gatherer.writes.barrier()
        self.gatherer.give_up(self.units)
        for shard in self.frozen:
            shard.bucket.release(self._gather(shard, "param") if shard.is_rounded else None)


def _is_cut_alike(part: Part, param: torch.Tensor, where: Piece) -> bool:
    """True if a part holds what this rank holds of a param, in the same order."""
    is_same = part.size() == param.size() and part.stride() == param.stride()
    return is_same and part.start == where.start and part.local.numel() == where.numel


def _holders(unit: Unit) -> int:
    """The number of tensors that use the memory of a unit."""
    return sum(each.bucket.holders for each in unit.buckets)
