"""Plans a save: what the checkpoint will hold, and which ranges of it this rank writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..domain.domain import Domain
from ..domain.domains import ExpertGroup
from ..domain.masters import keep_low_bits
from ..domain.param_state import ParamState
from ..domain.shard import Shard, scales_name
from ..errors import CheckpointError
from ..kernels.formats import FP32, BlockFormat
from ..partition.comm.group import Ranks
from ..partition.layout import BLOCK
from ..partition.mesh import Mesh
from ..tensors.part import Part
from . import gradients, rng, values
from .elements import (
    Read,
    chunks_of,
    flat_of,
    reader_of,
    shard_reader,
    stream_reader,
    strides_of,
)
from .model import Model, ModelParam, plain_name
from .records import (
    NAME_OF_DTYPE,
    Key,
    Tensor,
    Tensors,
    tensors_from_json,
    tensors_to_json,
)


class Request(NamedTuple):
    """The arguments of a save, in Python's own types."""

    root: Path
    extra: dict[str, Any]
    step: int | None
    keep: int | None
    asynchronous: bool
    allow_nonfinite: bool
    full_precision: bool


@dataclass(frozen=True)
class Piece:
    """One range that this rank writes: elements ``[start, stop)`` of a tensor. ``read`` counts from ``start``."""

    key: Key
    tensor: Tensor  # without ranges
    start: int
    stop: int
    read: Read

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.dtype.itemsize

    @property
    def label(self) -> str:
        """Name of the range in the rank's file."""
        return f"{self.key.section}/{self.key.name}/{self.key.kind}[{self.start}:{self.stop}]"

    def chunks(self) -> Iterator[torch.Tensor]:
        return chunks_of(self.read, self.numel, self.tensor.dtype)


class SavePlan:
    """One rank's part in a checkpoint.

    Attributes:
        world: all ranks that make the checkpoint.
        pieces: what this rank writes.
        tensors: all that all ranks write, without ranges; but for those of one rank alone (random numbers).
        shared: JSON that must be the same on all ranks: params, optimizers, step.
        own: JSON of rank 0 alone: what the user gave.
        must_be_finite: an Inf or NaN in a param, master or state is an error.
        step_is_counted: the step is the largest of any param, and was not given.
    """

    def __init__(self, world: Ranks, must_be_finite: bool = True, step_is_counted: bool = True):
        self.world, self.must_be_finite, self.step_is_counted = world, must_be_finite, step_is_counted
        self.pieces: list[Piece] = []
        self.tensors: Tensors = {}
        self.shared: dict[str, Any] = {}
        self.own: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return int(self.shared["step"])

    def add(self, key: Key, tensor: Tensor, start: int, stop: int, read: Read) -> None:
        """Plans elements ``[start, stop)`` of a tensor."""
        if not key.is_of_one_rank:
            self.tensors[key] = tensor
        if start < stop or key.is_of_one_rank:  # without elements too: only the piece tells that there is such a tensor
            self.pieces.append(Piece(key, tensor, start, stop, read))

    def add_whole(self, key: Key, tensor: torch.Tensor, ranks: Ranks | None = None, on_rank_0: bool = False) -> None:
        """Plans a tensor that all of these ranks have: each writes a part of it, or rank 0 writes it."""
        ranks = ranks or self.world
        parts = (1 if ranks.rank == 0 else 0) if on_rank_0 else ranks.size
        first, last = cut(tensor.numel(), parts, ranks.rank) if parts else (0, 0)
        self.add(key, _described(key, tensor), first, last, reader_of(flat_of(tensor)[first:last]))

    def add_own(self, section: str, name: str, kind: str, tensor: torch.Tensor) -> None:
        """Plans a tensor of this rank alone."""
        key = Key(section, name, kind)
        self.add(key, _described(key, tensor), 0, tensor.numel(), reader_of(flat_of(tensor)))

    def keep(self, tensor: torch.Tensor) -> str:
        """Plans a tensor that the user gave. Returns the name under which it will be found."""
        name = str(sum(key.section == "extra" for key in self.tensors))
        self.add_whole(Key("extra", name, "value"), tensor.detach().clone(), on_rank_0=True)
        return name

    def of_this_rank(self) -> dict[str, Any]:
        """Returns what other ranks do not know: params of groups with a process_group of their own. JSON-able."""
        params = {name: about for name, about in self.shared["params"].items() if "turn" in about}
        tensors = {key: each for key, each in self.tensors.items() if key.section == "params" and key.name in params}
        return {"params": params, "tensors": tensors_to_json(tensors)}

    def join(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Takes what all ranks told: the plan then says the same on all of them."""
        params = {name: about for name, about in self.shared["params"].items() if "turn" not in about}
        self.tensors = {
            key: each for key, each in self.tensors.items() if key.section != "params" or key.name in params
        }
        for theirs in told:
            params.update({name: about for name, about in theirs["params"].items() if name not in params})
            self.tensors.update(tensors_from_json(theirs["tensors"]))
        for each in self.shared["optimizers"]:
            each["groups"] = [_with_all_turns(group, params) for group in each["groups"]]
        self.shared["params"] = params
        if self.step_is_counted:
            self.shared["step"] = max([self.step, *(about["step"] for about in params.values())])

    def skeleton(self) -> dict[str, Any]:
        """Returns what ranks compare before anything is written."""
        tensors = tensors_to_json({key: tensor for key, tensor in self.tensors.items() if key.section != "extra"})
        return {**self.shared, "tensors": tensors}


def plan_save(model: Model, request: Request) -> SavePlan:
    """Returns the plan for the values of this moment. Local; reads no element.

    Raises:
        CheckpointError: something cannot be saved; nothing was written.
    """
    model.check_savable()
    for engine in model.engines:
        for domain in engine.domains:
            if not request.full_precision:
                _check_halves(domain)
            keep_low_bits(domain)  # their halves are saved as they are kept
    plan = SavePlan(model.world, not request.allow_nonfinite, request.step is None)
    group_of = {
        param: group for engine in model.engines for group in engine.local_groups() for param in group["params"]
    }
    params = {
        name: _plan_param(plan, model, member, group_of.get(member.param, {}), request.full_precision)
        for name, member in model.params.items()
    }
    for name, buffer in model.buffers.items():
        # Ranks may hold other running statistics; as in DDP, those of rank 0 count.
        plan.add_whole(Key("buffers", name, "value"), buffer, on_rank_0=True)
    optimizers = [_plan_optimizer(plan, model, number) for number in range(len(model.engines))]
    reduced = {
        name: about for name, member in model.params.items() if (about := _plan_gradient(plan, member)) is not None
    }
    step = request.step
    if step is None:
        step = max((each["step"] for each in params.values()), default=0)
    plan.shared = {"step": step, "params": params, "optimizers": optimizers}
    plan.own = {
        "gradients": reduced,
        "extra": values.encode(request.extra, plan.keep, "extra"),
        "module_extra": values.encode(dict(_extra_states(model.module)), plan.keep, "get_extra_state()"),
    }
    for kind, state in rng.states(model.device).items():
        plan.add_own("rng", str(plan.world.rank), kind, state)
    return plan


def _check_halves(domain: Domain) -> None:
    """Raises CheckpointError for a loaded master whose low bits do not belong to the present weights."""
    for shard in domain.shards:
        for index in shard.unmatched_masters:
            if not shard.fits_master(index):
                raise CheckpointError(
                    "load the model's weights before this save, or call refresh_masters(): the low bits of loaded "
                    f"master weights (master={domain.options.master!r}) do not belong to these weights and would be "
                    f"lost. The first is a param of shape {tuple(shard.bucket.params[index].shape)}."
                )


def _plan_optimizer(plan: SavePlan, model: Model, number: int) -> dict[str, Any]:
    engine = model.engines[number]
    groups = []
    for index, (group, its_names) in enumerate(zip(engine.groups, model.names_in(engine), strict=True)):
        given = {key: group[key] for key in group if key not in ("params", "param_names", "process_group")}
        where = f"group {index} of optimizer {number}"
        groups.append({"params": its_names, "values": values.encode(given, plan.keep, where)})
    return {"rule": engine.rule.name, "counts_steps": engine.rule.counts_steps, "groups": groups}


# -- params ------------------------------------------------------------------------------------------------------------


def _plan_param(
    plan: SavePlan, model: Model, member: ModelParam, group: Mapping[str, Any], widens: bool
) -> dict[str, Any]:
    """Plans a param with its master and states. Returns what the manifest says of it. ``widens``: in fp32."""
    if member.param.is_meta:
        raise CheckpointError(f"call bind() first: {member.name!r} is on the meta device and has no values to save.")
    state = ParamState()
    has_state = False
    if member.entry is not None and member.shard is not None:
        state = ParamState(member.entry.step, member.entry.carried)
        has_state = member.entry.has_state
    elif member.optimizer is not None:
        loaded = model.engines[member.optimizer].states.waiting.get(member.param)
        if loaded is not None:
            state, has_state = loaded, True
    if member.shard is None:
        plan.add_whole(Key("params", member.name, "param"), member.param, member.world)
    else:
        _plan_slice(plan, member, member.shard, "param", widens)
        if member.entry is not None and member.optimizer is not None:
            names = model.engines[member.optimizer].rule.variant(group).states if has_state else ()
            for kind in (*member.shard.masters, *(name for name in names if name in member.shard.states)):
                _plan_slice(plan, member, member.shard, kind, widens)
    for kind, tensor in state.tensors.items():
        if isinstance(tensor, Part):
            raise CheckpointError(
                f"take a step first, or save before loading: {kind} of {member.name!r} was loaded as a part and is "
                "not bound yet, so the rest of it is not here."
            )
        plan.add_whole(Key("params", member.name, kind), tensor, member.world)
    return {
        **({} if member.place is None else {"place": str(member.place)}),
        **({} if member.expert_group is None else {"turn": list(member.expert_group)}),
        "aliases": list(member.aliases),
        "optimizer": member.optimizer,
        "step": state.step,
        "carried": {name: float(value).hex() for name, value in state.carried.items()},
        "has_state": has_state,
    }


def _plan_gradient(plan: SavePlan, member: ModelParam) -> dict[str, Any] | None:
    """Plans the gradient that was accumulated since the last step. Returns what all ranks know of its sum."""
    slot, grad, about = member.entry.gradient_slice if member.entry is not None else None, member.param.grad, None
    if slot is None or grad is None or member.shard is None:
        return None
    own: torch.Tensor | None = grad
    if slot.shows_in(grad):
        own = slot.pending
        if not slot.is_used:
            about = gradients.describe(slot)
            tensor = Tensor(tuple(member.param.shape), member.shard.strides(member.index), slot.total.dtype, ())
            key, where = Key("gradients", member.name, "reduced"), member.shard.slice_of(member.index)
            assert member.domain is not None
            first, last = _own_cut(slot.total.numel(), member.domain.mesh)
            read = reader_of(slot.summed()[0][first:last])
            plan.add(key, tensor, where.start + first, where.start + last, read)
    if own is not None:  # accumulated under no_sync()
        plan.add_own("gradients", member.name, str(plan.world.rank), own)
    return about


def _plan_slice(plan: SavePlan, member: ModelParam, shard: Shard, kind: str, widens: bool) -> None:
    """Plans a param in its dtype; a master or state in its format, with the scales of its blocks, or in fp32."""
    assert member.domain is not None
    key, where = Key("params", member.name, kind), shard.slice_of(member.index)
    first, last = _own_cut(where.local.stop - where.local.start, member.domain.mesh)
    format = None if kind == "param" or widens else shard.format_of(kind)
    dtype = member.param.dtype if kind == "param" else torch.float32
    tensor = Tensor(tuple(member.param.shape), shard.strides(member.index), dtype, ())
    read = shard_reader(shard, kind, where.local.start + first)
    if format not in (None, FP32):
        tensor = replace(tensor, dtype=format.dtype, encoding=format.name)
        read = stream_reader(shard, kind, where.local.start + first)
    plan.add(key, tensor, where.start + first, where.start + last, read)
    if isinstance(format, BlockFormat):
        blocks = Tensor((-(-member.param.numel() // BLOCK),), (1,), torch.float32, ())
        start, begin = where.start // BLOCK, first // BLOCK
        end = (
            -(-last // BLOCK) if first < last else begin
        )  # a replica that writes nothing has its cut inside of a block
        read = stream_reader(shard, scales_name(kind), where.local.start + begin * BLOCK, BLOCK)
        plan.add(key.scales, blocks, start + begin, start + end, read)


def _with_all_turns(group: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a param group that also names the params which other ranks hold in place of this rank's."""
    names: list[str] = []
    for name in group["params"]:
        if "turn" not in params[name]:
            names.append(name)
            continue
        number, total = params[name]["turn"]
        base = name.removesuffix(f"@{ExpertGroup(number, total)}")
        siblings = [f"{base}@{ExpertGroup(each, total)}" for each in range(total)]
        names += [each for each in siblings if each in params]
    return {**group, "params": names}


def cut(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the first and the last element of part ``index``, when elements are divided evenly, in whole blocks."""
    blocks = (numel + BLOCK - 1) // BLOCK
    step = (blocks + parts - 1) // parts * BLOCK
    return min(index * step, numel), min((index + 1) * step, numel)


def _own_cut(numel: int, mesh: Mesh) -> tuple[int, int]:
    """Returns the part of a slice that this rank writes: each of the ranks that hold copies of it writes one."""
    return cut(numel, mesh.replicate.size, mesh.replicate.rank)


def _described(key: Key, tensor: torch.Tensor) -> Tensor:
    if tensor.dtype not in NAME_OF_DTYPE or tensor.layout is not torch.strided or isinstance(tensor, Part):
        raise CheckpointError(
            f"convert {key} to a dense tensor of a common dtype first: it is a {type(tensor).__name__} of "
            f"{tensor.dtype} and layout {tensor.layout}, which the file format cannot hold. Nothing was saved."
        )
    return Tensor(tuple(tensor.shape), strides_of(tensor), tensor.dtype, ())


def _extra_states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield plain_name(name), each.get_extra_state()
