"""Binding: params become views of buckets, masters and states are allocated, and stay where they were put.

Frameworks move, cast, load and wrap a model after the optimizer was made, so nothing is taken over before the first
step. Params that appear later (``add_param_group``, unfreezing) are bound then, into buckets of their own: what is
bound never changes its place.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .agreement import View, agree
from .bucket_plan import Candidate, Group, PlannedBucket, plan_buckets
from .config import Options
from .errors import BindingError, StateError
from .kernels.formats import format_of
from .part import Part
from .partition.bucket import Bucket, dense_strides
from .partition.gather import Gatherer
from .partition.layout import BucketLayout, split_into_buckets
from .partition.mesh import Mesh
from .partition.placement import Placement, Placements
from .partition.reducer import ReducedBucket, Reducer
from .partition.released import is_sharded
from .partition.serve import Showing
from .partition.transport import Transport
from .rules import Rule
from .shard import Shard
from .sharded_params import ShardedParams
from .slot import Slot
from .states import ParamState, check_part


@dataclass(eq=False)
class Entry:
    """What is known of one bound param. Kept in a table: nothing is hung on the user's tensor."""

    param: torch.nn.Parameter
    name: str
    shard: Shard
    index: int  # in the shard's bucket
    version: int | None  # of the param's data at the end of the last step; None: its master must follow the param
    step: int = 0  # updates so far; an int: a float counter stops counting (bf16 at 256, fp32 at 2**24)
    carried: dict[str, float] = field(default_factory=dict)
    has_state: bool = False
    slot: Slot | None = None  # of its reduced gradient, where the module was handed over

    def take_counters(self, state: ParamState) -> None:
        self.step, self.carried, self.has_state = state.step, dict(state.carried), True

    def forget(self) -> None:
        """Back to before the param's first step, as torch does with params that a loaded dict has no state for."""
        self.step, self.carried, self.has_state = 0, {}, False
        for name in self.shard.states:
            self.shard.read(name, self.index).zero_()

    def check(self) -> None:
        """Raises BindingError if the param is not where it was put."""
        if not self.shard.bucket.holds(self.index):
            param, bucket = self.param, self.shard.bucket
            raise BindingError(
                f"{self.name} was moved, recast or given other storage after the first step (now "
                f"{_describe(param)}, bound on {bucket.device} as {bucket.dtype}): an update would go to memory that "
                "the model no longer reads. Move and cast the model before the first step; to do it later keep "
                "optimizer.state_dict() (consolidated, at several ranks), call close(), and construct it anew."
            )


class Wires(NamedTuple):
    """The two directions of the mesh."""

    shards: Transport
    replicas: Transport


@dataclass(frozen=True)
class Fetch:
    """Makes one whole state (or "param") of one param, as it is behind ``step``. Equal ones make the same tensor."""

    binding: "Binding"
    shard: Shard
    index: int
    name: str
    step: int

    def __call__(self) -> torch.Tensor:
        return self.binding.fetch(self.shard, self.index, self.name, self.step)


class Binding:
    """The table from params to entries, and the shards."""

    def __init__(self, rule: Rule, options: Options, mesh: Mesh, loaded: dict[torch.nn.Parameter, ParamState]):
        self.rule = rule
        self.options = options
        self.mesh = mesh
        self.shards: list[Shard] = []
        self.entries: dict[torch.nn.Parameter, Entry] = {}  # by identity: that is how tensors hash
        self.fresh: set[torch.Tensor] = set()  # params and buffers that were on the meta device and have no values yet
        self.loaded = loaded  # states of params that are not bound yet
        self.on_adopt: Callable[[], None] = lambda: None  # what else takes hold of params that were just bound
        self.wires: Wires | None = None  # chosen at the first binding, by all ranks together
        self.reducer: Reducer | None = None  # where the module was handed over
        self.sharded: ShardedParams | None = None  # at stage 3
        self.showing: Showing | None = None  # to ranks that read states alone
        self.rounds = 0  # steps that all ranks agreed on
        self.settled = 0  # of these, the ones that this rank has come to the end of
        self.written: torch.cuda.Event | None = None  # behind the last of them
        self.broken: str | None = None  # why params and states of the ranks may belong to different steps

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

    def check_bindable(self, candidates: Sequence[Candidate], groups: Sequence[Group]) -> None:
        """Raises BindingError for params that no bucket can hold. Changes nothing."""
        device = self.device if self.shards else candidates[0][1].device
        seen: dict[torch.nn.Parameter, str] = {}
        for name, param, _ in candidates:
            if param in seen:
                raise BindingError(
                    f"{seen[param]} and {name} are the same param: it would be updated once here and twice by torch, "
                    "and its step count would lie. Remove the duplicate; model.parameters() lists tied params once."
                )
            seen[param] = name
            _check_param(name, param, device)
        _check_apart([(name, param) for name, param, _ in named_params(groups)])

    def plan(self, candidates: Sequence[Candidate]) -> list[PlannedBucket]:
        """Layouts for these params, in backward order: integers only. Checks what was loaded for them.

        Raises:
            StateError: a loaded part does not hold what this rank will need.
        """
        plan = plan_buckets(candidates, self.rule, self.options, self.mesh.shard.size, self._bucket_bytes)
        for planned in plan:
            self._check_loaded(planned)
        return plan

    def _bucket_bytes(self, device: torch.device) -> int:
        return self.options.tuning.bucket_bytes_of(device, self.options.module is not None)

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
        shard = Shard(bucket, self.mesh.shard.rank, planned.states)
        for index, param in enumerate(params):
            if param in self.loaded:
                self._write_tensors(shard, index, self.loaded[param])
        return shard

    def adopt(self, plan: Sequence[PlannedBucket], shards: Sequence[Shard]) -> None:
        """Collective: what was planned and made on every rank becomes part of the table."""
        wires = self._choose_wires(shards[0].bucket.device)
        for planned, shard in zip(plan, shards, strict=True):
            if not planned.is_released:
                shard.window = wires.shards.open(shard.bucket.flat, planned.layout.shard_numel)
            if self.reducer is not None:
                numels, dtype = planned.layout.numels, self.options.reduce_dtype or shard.bucket.dtype
                reduced = ReducedBucket(numels, shard.param.numel(), dtype, shard.param.device, self.mesh)
                shard.reduce_into(reduced, self.reducer.add(reduced))
        for planned, shard in zip(plan, shards, strict=True):
            self.shards.append(shard)
            for index, (name, param, _) in enumerate(planned.members):
                entry = Entry(param, name, shard, index, None)
                self.entries[param] = entry
                if param in self.loaded:
                    entry.take_counters(self.loaded.pop(param))
        for planned, shard in zip(plan, shards, strict=True):
            if planned.is_released and self.sharded is not None:
                self.sharded.take(shard)
        self.on_adopt()

    def frozen(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Params of the module that are sharded though nothing trains them, and are not yet."""
        if Placements.of_stage(self.options.stage).param is Placement.REPLICATE:
            return []
        return [
            param
            for param in module.parameters()
            if not param.requires_grad
            and param.is_floating_point()
            and param.numel() >= self.options.tuning.keep_below
            and not is_sharded(param)
            and param not in self.entries
        ]

    def adopt_frozen(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Collective: shards them."""
        shapes = [[list(param.shape), str(param.dtype)] for param in params]
        view = View({"frozen": shapes}, lambda: {"frozen params of the module": shapes})
        agree(view, self.mesh.world, params[0].device)
        self._choose_wires(params[0].device)
        assert self.sharded is not None
        for _, same_dtype in groupby(sorted(params, key=lambda param: str(param.dtype)), key=lambda param: param.dtype):
            kind = list(same_dtype)
            sizes = [param.numel() * param.element_size() for param in kind]
            for indices in split_into_buckets(sizes, self._bucket_bytes(kind[0].device)):
                members = [kind[index] for index in indices]
                layout = BucketLayout(tuple(param.numel() for param in members), self.mesh.shard.size)
                bucket = Bucket(members, layout, self.fresh, is_released=True)
                shard = Shard(bucket, self.mesh.shard.rank, (), trains=False)
                self.sharded.frozen.append(shard)
                self.sharded.take(shard)
        self.on_adopt()

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
            if Placements.of_stage(self.options.stage).param is Placement.SHARD:
                self.sharded = ShardedParams(
                    Gatherer(shards, self.options.tuning.live_bytes), self.gather_slices, self.fetcher
                )
            if self.mesh.shard.size > 1:
                self.showing = Showing.begin(self.mesh.shard, self)
        return self.wires

    @property
    def gatherer(self) -> Gatherer:
        assert self.sharded is not None
        return self.sharded.gatherer

    @property
    def device(self) -> torch.device:
        """Of all bound params; the CPU before there are any."""
        return self.shards[0].param.device if self.shards else torch.device("cpu")

    def release(self) -> None:
        """Gives every param storage of its own and forgets the states."""
        if self.showing is not None:
            self.showing.close()
        if self.sharded is not None:
            self.sharded.give_back()
        for shard in self.shards:
            shard.bucket.release()
        self.shards, self.entries, self.reducer, self.sharded = [], {}, None, None

    # -- weights written by others ---------------------------------------------------------------------------------

    def follow_written_params(self) -> None:
        """Masters follow params whose version moved: weights were loaded, clamped or averaged in place."""
        for entry in self.entries.values():
            if entry.param._version != entry.version:
                entry.shard.refresh_master(entry.index)

    def refresh_masters(self) -> None:
        for entry in self.entries.values():
            entry.shard.refresh_master(entry.index)

    # -- states outside of shards ----------------------------------------------------------------------------------

    def read(self, entry: Entry, group: Group) -> ParamState:
        """The state of one param: views of the shard where one rank holds everything, else parts."""
        shard = entry.shard
        names = [name for name in self.rule.variant(group).states if name in shard.states]
        tensors = {name: self._read_tensor(entry, name) for name in (*names, *shard.masters)}
        return ParamState(entry.step, dict(entry.carried), tensors)

    def _read_tensor(self, entry: Entry, name: str) -> torch.Tensor:
        shard, index = entry.shard, entry.index
        if self.mesh.shard.size == 1:
            return shard.as_param(shard.whole(name), index)

        def gather(_: torch.Tensor) -> torch.Tensor:
            return shard.as_param(self._gather(shard, name), index).clone()

        where, fetch = shard.slice_of(index), self.fetcher(shard, index, name)
        return Part(shard.read(name, index), where.start, entry.param, gather, fetch=fetch)

    def _gather(self, shard: Shard, name: str) -> torch.Tensor:
        """Collective: state ``name`` (or "master") of every rank's shard, 1D, as long as the bucket."""
        return self.gather_slices(shard, shard.whole(name), name)

    def gather_slices(self, shard: Shard, own: torch.Tensor, name: str) -> torch.Tensor:
        """Collective: what every rank holds as ``own`` for its slice of one bucket, 1D, as long as the bucket."""
        layout, device = shard.bucket.layout, shard.param.device
        flat = torch.empty(layout.numel, dtype=own.dtype, device=device)
        flat[layout.shard_slice(self.mesh.shard.rank)] = own
        transport = self._choose_wires(device).shards
        gather = transport.gather(f"gathering {name}")
        gather.start(transport.open(flat, layout.shard_numel))
        gather.finish()
        transport.traffic.states += gather.received
        return flat

    # -- one rank alone --------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """The optimizer is gone. What the other ranks may still read stays for as long as they may."""
        if self.showing is not None:
            self.showing.retire()

    def fetcher(self, shard: Shard, index: int, name: str) -> Callable[[], torch.Tensor] | None:
        """What makes the whole state ``name`` (or "param") of a param as it is now, without the other ranks' help."""
        return None if self.showing is None else Fetch(self, shard, index, name, self.settled)

    def fetch(self, shard: Shard, index: int, name: str, step: int) -> torch.Tensor:
        if self.showing is None or self.settled != step:
            raise StateError(
                f"{name} of a param of shape {tuple(shard.bucket.params[index].shape)} was looked at behind step "
                f"{step} and is read behind step {self.settled}: it lies in shards, which have moved on. Take "
                "state_dict() again, and save it before the next step."
            )
        layout, number = shard.bucket.layout, self._shown.index(shard)
        own = self._slice(shard, name)
        flat = torch.empty(layout.numels[index], dtype=own.dtype)
        for rank in range(self.mesh.shard.size):
            for piece in layout.pieces(rank):
                if piece.param == index:
                    target = flat[piece.start : piece.start + piece.numel]
                    if rank == self.mesh.shard.rank:
                        target.copy_(own[piece.shard_start : piece.shard_end])
                    else:
                        self.showing.read(rank, step, number, name, piece.shard_start, target)
        return flat.as_strided(shard.bucket.params[index].size(), shard.strides(index))

    def slice_at(self, step: int, shard: int, name: str) -> torch.Tensor:
        """For another rank, in a thread of its own; see :class:`shardopt.partition.serve.Readable`."""
        end = time.monotonic() + self.mesh.world.seconds
        while self.settled < step and self.broken is None:
            if time.monotonic() > end:
                raise StateError(f"this rank has not come to the end of step {step}.")
            time.sleep(0.001)
        if self.broken is not None or self.settled > step:
            raise StateError(f"this rank is behind step {self.settled} ({self.broken or 'without error'}), not {step}.")
        own = self._slice(self._shown[shard], name)
        if own.device.type == "cpu":
            return own
        # On a stream of its own behind the step's kernels. It allocates nothing on the device, where a collective may
        # be waiting for the rank that asks.
        with torch.cuda.stream(torch.cuda.Stream(own.device)):
            if self.written is not None:
                self.written.wait()
            return own.cpu()

    @property
    def _shown(self) -> list[Shard]:
        """What ranks may ask each other for; in the same order on all of them."""
        return [*self.shards, *(self.sharded.frozen if self.sharded is not None else ())]

    @staticmethod
    def _slice(shard: Shard, name: str) -> torch.Tensor:
        return shard.param if name == "param" else shard.whole(name)

    def settle(self) -> None:
        """This rank has come to the end of a step."""
        if self.device.type == "cuda":
            self.written = torch.cuda.Event()
            self.written.record()
        self.settled = self.rounds

    def consolidate(self, to: int, groups: Sequence[Group]) -> dict[torch.nn.Parameter, ParamState] | None:
        """Collective: every bound param's state as whole tensors in host memory, on the rank ``to``; None elsewhere."""
        states = {
            param: self.read(self.entries[param], group)
            for _, param, group in named_params(groups)
            if param in self.entries
        }
        members: dict[Shard, list[Entry]] = defaultdict(list)
        for param in states:
            members[self.entries[param].shard].append(self.entries[param])
        names = [list(dict.fromkeys((*shard.states, *shard.masters))) for shard in self.shards]
        key = {"rank to gather on": to, "states of buckets": names}
        agree(View(key, lambda: key), self.mesh.world, self.device)
        (coordinate,) = self.mesh.world.exchange([self.mesh.shard.rank], self.device, "finding a rank")[to]
        # One state of one bucket at a time, so that the other ranks' slices never lie here all at once.
        for shard, its_names in zip(self.shards, names, strict=True):
            for name in its_names:
                parts = self.mesh.shard.collect(shard.whole(name), coordinate, f"consolidating {name}")
                whole = None if parts is None else torch.cat([part.cpu() for part in parts])
                for entry in members[shard]:
                    if whole is not None and name in states[entry.param].tensors:
                        # Cloned: a view would bring the whole bucket along into a file.
                        states[entry.param].tensors[name] = shard.as_param(whole, entry.index).clone()
        if self.mesh.world.rank != to:
            return None
        return {param: state for param, state in states.items() if self.entries[param].has_state}

    def check_parts(self, param: torch.nn.Parameter, state: ParamState) -> None:
        """Raises StateError if a part does not hold what this rank needs of a bound param. Changes nothing."""
        entry = self.entries.get(param)
        if entry is None:
            return  # where its slice will lie is known at binding; plan() checks then
        where = entry.shard.slice_of(entry.index)
        for name, tensor in state.tensors.items():
            if isinstance(tensor, Part):
                check_part(tensor, where.start, where.local.stop - where.local.start, f"{name} of {entry.name}")

    def put(self, param: torch.nn.Parameter, state: ParamState, has_state: bool) -> None:
        """Takes this rank's slice of one param's checked state; without one it goes back to before its first step."""
        entry = self.entries[param]
        if has_state and self._shows(entry, state):  # it was only looked at, by a loop that moves tensors to a device
            return
        entry.shard.renew()
        entry.forget()
        if has_state:
            self._write_tensors(entry.shard, entry.index, state)
            entry.take_counters(state)
        entry.version = None

    @staticmethod
    def _shows(entry: Entry, state: ParamState) -> bool:
        """Whether this is what the shard holds, in the shard's own memory."""
        if (state.step, state.carried) != (entry.step, entry.carried) or not entry.has_state:
            return False
        shard = entry.shard
        mine = ((shard.read(name, entry.index), tensor) for name, tensor in state.tensors.items())
        locals_ = ((own, tensor.local if isinstance(tensor, Part) else tensor) for own, tensor in mine)
        return all(own.data_ptr() == tensor.data_ptr() for own, tensor in locals_)

    def load(self, loaded: Mapping[torch.nn.Parameter, ParamState]) -> None:
        """Takes this rank's slices of checked states; params that have none go back to before their first step."""
        for shard in self.shards:
            shard.renew()
        for param, entry in self.entries.items():
            entry.forget()
            if param in loaded:
                self._write_tensors(entry.shard, entry.index, loaded[param])
                entry.take_counters(loaded[param])
                # At the next step: the model's weights, which the master must round to, may be loaded after its states.
                entry.version = None

    @staticmethod
    def _write_tensors(shard: Shard, index: int, state: ParamState) -> None:
        shard.ensure_states(name for name in state.tensors if name != "master")
        for name, tensor in state.tensors.items():
            if name == "master" and shard.master is None:
                continue
            if isinstance(tensor, Part):
                shard.write(name, index, tensor.start, tensor.local)
            else:
                shard.write_whole(name, index, tensor.detach())


def _is_needed(param: torch.nn.Parameter) -> bool:
    return param.requires_grad or param.grad is not None


def _check_param(name: str, param: torch.nn.Parameter, device: torch.device) -> None:
    if param.is_meta:
        raise BindingError(f"{name} is on the meta device: it has no values to train. Materialise the model first.")
    values: Any = param.data
    if is_traceable_wrapper_subclass(values):
        raise BindingError(
            f"{name} is a {type(values).__name__}, whose values lie in other tensors: a bucket cannot hold it. "
            "Give it to a torch.optim optimizer of its own."
        )
    if param.layout is not torch.strided:
        raise BindingError(f"{name} has layout {param.layout}: it has no flat storage. Use a dense param.")
    if param.device != device:
        raise BindingError(
            f"{name} is on {param.device}, other params are on {device}: one step is one launch on one device. Move "
            "the model to one device, or give each device's params an optimizer of their own."
        )
    if values.device.type == "cpu" and values.is_shared():
        raise BindingError(
            f"{name} lies in memory shared with other processes (share_memory()): they would stop seeing updates, "
            "which go to the bucket that the param moves into. Use a torch.optim optimizer for Hogwild training."
        )
    format_of(param.dtype, name)
    dense_strides(param)


def _check_apart(params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises BindingError if two params share memory."""
    memory = []
    for name, param in params:
        has_values = param.layout is torch.strided and not param.is_meta and param.untyped_storage().nbytes()
        if param.numel() and has_values:
            span = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
            memory.append((param.data_ptr(), param.data_ptr() + span * param.element_size(), name, id(param)))
    memory.sort()
    for (_, end, name, one), (start, _, other, another) in pairwise(memory):
        if start < end and one != another:
            raise BindingError(
                f"{name} and {other} share memory but are two params: bound apart they would drift apart. Tie them by "
                "using one nn.Parameter object for both."
            )


def named_params(groups: Sequence[Group]) -> Iterator[Candidate]:
    """Every param with a name for messages and its group, in the order of the groups."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            where = f"param {index} of group {number} (shape {tuple(param.shape)})"
            yield (f"{where} {names[index]!r}" if names else where), param, group


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
