"""Domain: params become views of buckets, masters and states are allocated, and stay where they were put.

Frameworks move, cast, load and wrap a model after the optimizer was made, so nothing is taken over before the first
step. Params that appear later (``add_param_group``, unfreezing) are bound then, into buckets of their own: what is
bound never changes its place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from .agreement import View, agree
from .bucket_plan import PlannedBucket, plan_buckets
from .config import Options
from .entry import Candidate, Entry, Group, named_params
from .epoch import Epoch, Moment
from .errors import OffloadError
from .exhibit import Exhibit
from .kept import NOTHING
from .loaded_state import begin_states, expect_weights, write_tensors
from .offload.landing import HostLanding
from .offload.store import Home, Store
from .param_names import matching, name_of
from .part import Part
from .partition.bucket import Bucket
from .partition.collectives import Ranks
from .partition.gather import Gatherer
from .partition.layout import BucketLayout, split_into_buckets
from .partition.mesh import Mesh
from .partition.placement import Placement, Placements
from .partition.reduced import KeptBucket, PassingBucket, ReducedBucket
from .partition.reducer import Reducer
from .partition.released import is_sharded
from .partition.resting import RestingBucket
from .partition.transport import Transport
from .rules import Rule
from .shard import Shard
from .sharded_params import ShardedParams
from .states import ParamState, check_part
from .tiers import in_memory, make_landing, make_store, params_rest
from .timings import Clock, Timings


class Wires(NamedTuple):
    """The two directions of the mesh."""

    shards: Transport
    replicas: Transport


class Domain:
    """The table from params to entries, and the shards."""

    def __init__(self, rule: Rule, options: Options, mesh: Mesh, loaded: dict[torch.nn.Parameter, ParamState]):
        self.rule = rule
        self.options = options
        self.mesh = mesh
        self._store: Store | None = None  # opened at the first binding: until then nothing rests anywhere
        self.shards: list[Shard] = []
        self.entries: dict[torch.nn.Parameter, Entry] = {}  # by identity: that is how tensors hash
        self.fresh: set[torch.Tensor] = set()  # params and buffers that were on the meta device and have no values yet
        self.loaded = loaded  # states of params that are not bound yet
        self.on_adopt: Callable[[], None] = lambda: None  # what else takes hold of params that were just bound
        self.wires: Wires | None = None  # chosen at the first binding, by all ranks together
        self.reducer: Reducer | None = None  # where the module was handed over
        self.landing: HostLanding | None = None  # where sums of gradients rest, if not where they are reduced
        self.sharded: ShardedParams | None = None  # at stage 3
        self.exhibit: Exhibit | None = None  # for ranks that read states alone
        self.epoch = Epoch()  # which states these are
        self.clock = Clock()
        self.rounds = 0  # steps that all ranks agreed on
        self.counted_elsewhere: set[torch.nn.Parameter] = set()  # copies whose elements another rank's norm counts
        self.slice_numbers: dict[torch.nn.Parameter, int] = {}  # of the slice of a DTensor in a local param
        self.broken: str | None = None  # why params and states of the ranks may belong to different steps
        self.is_half_loaded = False  # that is because of a load, which another one can make good

    # -- binding ---------------------------------------------------------------------------------------------------

    def unbound(self, groups: Sequence[Group]) -> list[Candidate]:
        """Params that a step needs and that are not bound: trainable, or with a gradient all the same."""
        entries = self.entries
        if all(param in entries or not _is_needed(param) for group in groups for param in group["params"]):
            return []  # as in nearly every step: no names are made for it
        return [
            (name, param, group)
            for name, param, group in named_params(groups)
            if param not in entries and _is_needed(param)
        ]

    def plan(self, candidates: Sequence[Candidate]) -> list[PlannedBucket]:
        """Layouts for these params, in backward order: integers only. Checks what was loaded for them.

        Raises:
            StateError: a loaded part does not hold what this rank will need.
        """
        size, whole = self.mesh.shard.size, self._kept_whole()
        plan = plan_buckets(candidates, self.rule, self.options, size, self._bucket_bytes, whole)
        for planned in plan:
            self._check_loaded(planned)
        return plan

    def _bucket_bytes(self, device: torch.device) -> int:
        return self.options.tuning.bucket_bytes_of(device, self.options.module is not None)

    def _kept_whole(self) -> frozenset[torch.Tensor]:
        """Params that would be sharded at stage 3, but for ``Tuning.keep``."""
        if Placements.of_stage(self.options.stage).param is Placement.REPLICATE:
            return frozenset()
        return matching(self.options.module, self.options.tuning.keep)

    def name_of(self, param: torch.Tensor) -> str | None:
        """What the user calls a param, where the module was handed over."""
        return name_of(self.options.module, param)

    def _check_loaded(self, planned: PlannedBucket) -> None:
        pieces = {piece.param: piece for piece in planned.layout.pieces(self.mesh.shard.rank)}
        for index, (name, param, _) in enumerate(planned.members):
            piece = pieces.get(index)
            for state, tensor in self.loaded.get(param, ParamState()).tensors.items():
                if piece is not None and isinstance(tensor, Part):
                    check_part(tensor, piece.start, piece.numel, f"{state} of {name}")

    def make_shard(self, planned: PlannedBucket) -> Shard:
        """Moves the params into a bucket, allocates masters and states, takes what was loaded. On this rank alone."""
        params = [param for _, param, _ in planned.members]
        bucket = Bucket(params, planned.layout, self.fresh, planned.is_released)
        shard: Shard | None = None
        try:
            rests = planned.is_released and self._params_rest(bucket.device)
            store = self._store_for(bucket.device)
            shard = Shard(bucket, self.mesh.shard.rank, planned.states, store, planned.kept, rests)
            for index, (_, param, group) in enumerate(planned.members):
                if param in self.loaded:
                    write_tensors(shard, index, self.loaded[param])
                else:
                    begin_states(shard, index, self.rule.initial_values(group))
        except BaseException:
            if shard is not None:
                shard.home.release()
            bucket.release()
            raise
        return shard

    def adopt(self, plan: Sequence[PlannedBucket], shards: Sequence[Shard]) -> None:
        """Collective: what was planned and made on every rank becomes part of the table."""
        wires = self._choose_wires(shards[0].bucket.device)
        for planned, shard in zip(plan, shards, strict=True):
            if not planned.is_released:
                shard.window = wires.shards.open(shard.bucket.flat, planned.layout.shard_numel)
            if self.reducer is not None:
                if self.options.release_gradients:
                    numels, dtype = planned.layout.numels, self.options.reduce_dtype or shard.bucket.dtype
                    passing = PassingBucket(numels, shard.numel, dtype, shard.device, self.mesh)
                    shard.pass_on(passing, self.reducer.add(passing))
                else:
                    reduced = self._make_reduced(planned, shard)
                    shard.reduce_into(reduced, self.reducer.add(reduced))
        for planned, shard in zip(plan, shards, strict=True):
            self.shards.append(shard)
            for index, (name, param, group) in enumerate(planned.members):
                initial = self.rule.initial_values(group)
                entry = Entry(param, name, shard, index, None, has_state=bool(initial), initial=initial)
                self.entries[param] = entry
                if param in self.loaded:
                    state = self.loaded.pop(param)
                    entry.take_counters(state)
                    expect_weights(entry, state)
        for planned, shard in zip(plan, shards, strict=True):
            if planned.is_released and self.sharded is not None:
                self.sharded.take(shard)
        self.on_adopt()

    def _make_reduced(self, planned: PlannedBucket, shard: Shard) -> KeptBucket:
        dtype, kept = self.options.reduce_dtype or shard.bucket.dtype, planned.kept.gradient.dtype
        numels = planned.layout.numels
        if self.landing is None:
            return ReducedBucket(numels, shard.numel, dtype, kept, shard.device, self.mesh)
        return RestingBucket(numels, shard.numel, dtype, kept, shard.device, self.mesh, self.landing)

    def frozen(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Params of the module that are sharded though nothing trains them, and are not yet."""
        if Placements.of_stage(self.options.stage).param is Placement.REPLICATE:
            return []
        kept_whole = self._kept_whole()
        return [
            param
            for param in module.parameters()
            if not param.requires_grad
            and param.is_floating_point()
            and param.numel() >= self.options.tuning.keep_below
            and not is_sharded(param)
            and param not in self.entries
            and param not in kept_whole
        ]

    def adopt_frozen(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Collective: shards them."""
        shapes = [[list(param.shape), str(param.dtype)] for param in params]
        view = View({"frozen": shapes}, lambda: {"frozen params of the module": shapes})
        agree(view, self.mesh.world, params[0].device)
        self._choose_wires(params[0].device)
        assert self.sharded is not None
        layouts = []
        for _, same_dtype in groupby(sorted(params, key=lambda param: str(param.dtype)), key=lambda param: param.dtype):
            kind = list(same_dtype)
            sizes = [param.numel() * param.element_size() for param in kind]
            for indices in split_into_buckets(sizes, self._bucket_bytes(kind[0].device)):
                members = [kind[index] for index in indices]
                layouts.append((members, BucketLayout(tuple(param.numel() for param in members), self.mesh.shard.size)))
        for shard in self._make_frozen(layouts):
            self.sharded.frozen.append(shard)
            self.sharded.take(shard)
        self.on_adopt()

    def _make_frozen(self, layouts: Sequence[tuple[list[torch.nn.Parameter], BucketLayout]]) -> list[Shard]:
        """Collective: on all ranks or on none."""
        shards: list[Shard] = []
        problem: Exception | None = None
        try:
            device = layouts[0][0][0].device
            rests = self._params_rest(device)
            store = self._store_for(device) if rests else in_memory("device")
            for members, layout in layouts:
                bucket = Bucket(members, layout, self.fresh, is_released=True)
                try:
                    shards.append(Shard(bucket, self.mesh.shard.rank, (), store, NOTHING, rests))
                except BaseException:
                    bucket.release()
                    raise
        except Exception as error:
            problem = error
        try:
            agree(View("frozen", dict, problem), self.mesh.world, layouts[0][0][0].device)
        except BaseException:
            for shard in reversed(shards):
                shard.home.release()
                shard.bucket.release()
            raise
        return shards

    def _choose_wires(self, device: torch.device) -> "Wires":
        if self.wires is None:
            tuning = self.options.tuning
            shards, replicas = (
                Transport.of(ranks, device, tuning.neighbours, tuning.debug)
                for ranks in (self.mesh.shard, self.mesh.replicate)
            )
            self.wires = Wires(shards, replicas)
            if self.options.module is not None:
                self.reducer = Reducer(self.mesh, shards, replicas)
                self.landing = make_landing(self.options.rests, device)
            if Placements.of_stage(self.options.stage).param is Placement.SHARD:
                # What rests elsewhere is in no memory that others could read.
                rest = self._params_rest(device)
                wires = Transport(self.mesh.shard, device, debug=tuning.debug) if rest else shards
                gatherer = Gatherer(wires, tuning.live_bytes)
                self.sharded = ShardedParams(gatherer, self.gather, self.fetcher, self.name_of)
            if self.mesh.shard.size > 1:
                self.exhibit = Exhibit(self)
        return self.wires

    def _params_rest(self, device: torch.device) -> bool:
        """Whether slices of sharded params rest where masters and states do."""
        return params_rest(self.options.rests, device)

    @property
    def resting(self) -> list[Shard]:
        """The shards whose homes are the store's."""
        frozen = self.sharded.frozen if self.sharded is not None and self._params_rest(self.device) else ()
        return [*self.shards, *frozen]

    @property
    def gatherer(self) -> Gatherer:
        assert self.sharded is not None
        return self.sharded.gatherer

    @property
    def is_averaged(self) -> bool:
        """Whether params show the average of the weights at this moment."""
        return any(shard.aside is not None for shard in self.shards)

    @property
    def device(self) -> torch.device:
        """Of all bound params; the CPU before there are any."""
        return self.shards[0].device if self.shards else torch.device("cpu")

    @property
    def store(self) -> Store:
        """Where masters and states rest.

        Raises:
            OffloadError: it was not opened yet, and cannot be.
        """
        return self._store_for(self.device)

    def _store_for(self, device: torch.device) -> Store:
        if self._store is None:
            self._store = make_store(self.options.rests, self.options.tuning, device)
        return self._store

    def rest_in(self, store: Store, homes: Sequence[Home]) -> tuple[Store, list[Home]]:
        """From now on masters and states of the shards lie in these homes. Returns what they lay in before."""
        before, self._store = self.store, store
        left = [shard.home for shard in self.resting]
        for shard, home in zip(self.resting, homes, strict=True):
            shard.home = home
        return before, left

    def release(self) -> None:
        """Gives every param storage of its own and forgets the states."""
        if self.exhibit is not None:
            self.exhibit.close()
            self.exhibit = None
        if self.sharded is not None:
            self.sharded.give_back()
        for shard in self.shards:
            shard.bucket.release()
        if self._store is not None:
            self._store.close()
        if self.landing is not None:
            self.landing.close()
        self._store = self.landing = None
        self.shards, self.entries, self.reducer, self.sharded = [], {}, None, None

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is written to the store inside holds if all of it could be written."""
        try:
            self.store.begin()
            yield
            self.store.flush()
        except BaseException:
            self.store.roll_back()
            raise
        self.store.commit()

    def timings(self) -> Timings:
        return self.clock.read(None if self._store is None else self._store.note)

    def settle(self) -> None:
        """This rank has come to the end of a step."""
        self.clock.end_step()
        if self.exhibit is not None:
            self.exhibit.settle()
        self.epoch.end_step()

    def retire(self) -> None:
        """The optimizer is gone; other ranks may still read."""
        if self.exhibit is not None:
            self.exhibit.retire()
            self.exhibit = None  # which refers to this

    # -- what other ranks hold -------------------------------------------------------------------------------------

    def fetcher(
        self, shard: Shard, index: int, name: str, moment: Moment | None = None
    ) -> Callable[[], torch.Tensor] | None:
        """See :meth:`Exhibit.fetcher`; by default as it is now. None where nothing can be asked for."""
        if self.mesh.shard.size == 1:
            return partial(_own, shard, index, name)
        if self.exhibit is None:
            return None
        return self.exhibit.fetcher(shard, index, name, self.epoch.now(name) if moment is None else moment)

    def gather(self, shard: Shard, name: str) -> torch.Tensor:
        """Collective: state ``name`` (or "master") of every rank's shard, 1D, as long as the bucket.

        Raises:
            OffloadError: a rank could not read its own; on all of them.
        """
        return self.gather_slices(shard, self.read_together(shard, name, self.mesh.shard), name)

    def read_together(self, shard: Shard, name: str, ranks: Ranks) -> torch.Tensor:
        """Collective: the whole of a state of this rank's shard, if each of the ranks could read its own."""
        own, problem = torch.empty(0), None
        try:
            own = shard.whole(name)
        except OffloadError as error:
            problem = error
        if not self.store.is_final:
            agree(View("read", dict, problem), ranks, self.device)
        return own

    def gather_slices(self, shard: Shard, own: torch.Tensor, name: str) -> torch.Tensor:
        """Collective: what every rank holds as ``own`` for its slice of one bucket, 1D, as long as the bucket."""
        layout, device = shard.bucket.layout, shard.device
        flat = torch.empty(layout.numel, dtype=own.dtype, device=device)
        flat[layout.shard_slice(self.mesh.shard.rank)] = own
        transport = self._choose_wires(device).shards
        gather = transport.gather(f"gathering {name}")
        gather.start(transport.open(flat, layout.shard_numel))
        gather.finish()
        transport.traffic.states += gather.received
        return flat


def _own(shard: Shard, index: int, name: str) -> torch.Tensor:
    """A state (or "param") of which this rank holds all, in host memory."""
    where = shard.slice_of(index).local
    values = shard.read_chunk(name, where.start, where.stop).cpu().clone()
    return values.as_strided(shard.bucket.params[index].size(), shard.strides(index))


def _is_needed(param: torch.nn.Parameter) -> bool:
    return param.requires_grad or param.grad is not None
