"""Plans a save: what the checkpoint will hold, and which ranges of it this rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..domain.masters import keep_low_bits, take_sources
from ..domain.param_state import ParamState
from ..domain.residual import residual_of
from ..domain.shard import scales_name
from ..errors import CheckpointError
from ..kernels.formats import FP32, BlockFormat
from ..partition.layout import BLOCK
from ..tensors.part import Part
from ..tensors.safetensors_format import NAME_OF_DTYPE
from . import gradients, rng, values
from .elements import even_part, flat_of, host_chunks, own_part, reader_of, shard_reader, stream_reader, strides_of
from .mesh_ranks import numbers_of
from .records import GradientInfo, GroupInfo, OptimizerInfo, ParamInfo, TensorInfo, TensorKey

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.hyperparameters import Group
    from ..domain.shard import Shard
    from ..partition.comm.group import Ranks
    from .arguments import SaveArguments
    from .collectives import AnyRanks
    from .elements import Read
    from .model import Model
    from .model_param import ModelParam
    from .typed_json import Json


@dataclass(frozen=True)
class WriteItem:
    """Elements ``[start, stop)`` of a tensor, which this rank writes. ``read`` counts from ``start``."""

    key: TensorKey
    tensor: TensorInfo  # without ranges
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
        """The name of the range in this rank's file."""
        return f"{self.key.section}/{self.key.name}/{self.key.kind}[{self.start}:{self.stop}]"

    def chunks(self) -> Iterator[torch.Tensor]:
        return host_chunks(self.read, self.numel, self.tensor.dtype)


class SavePlan:
    """What one rank writes of a checkpoint, and what the manifest will say.

    Attributes:
        world: all ranks that make the checkpoint.
        items: what this rank writes.
        tensors: what all ranks write, without ranges; tensors of one rank alone (random numbers) are not listed.
        step, params, optimizers: of the manifest; the same on all ranks.
        gradients, extra, module_extra: of the manifest's info; those of rank 0 count.
        imported: from where, in words; None: the training saves itself.
        must_be_finite: an Inf or NaN in a param, master or state is an error.
        codes: names of params that may hold the bits of one.
        step_is_counted: True if the step is the largest of any param; False if the user gave it.
    """

    def __init__(self, world: AnyRanks, must_be_finite: bool = True, step_is_counted: bool = True):
        self.world, self.must_be_finite, self.step_is_counted = world, must_be_finite, step_is_counted
        self.items: list[WriteItem] = []
        self.codes: set[str] = set()
        self.tensors: dict[TensorKey, TensorInfo] = {}
        self.step = 0
        self.params: dict[str, ParamInfo] = {}
        self.optimizers: tuple[OptimizerInfo, ...] = ()
        self.gradients: dict[str, GradientInfo] | None = None
        self.extra: Mapping[str, Json] = {}
        self.module_extra: Mapping[str, Json] = {}
        self.imported: str | None = None

    def add(self, key: TensorKey, tensor: TensorInfo, start: int, stop: int, read: Read) -> None:
        """Plans elements ``[start, stop)`` of a tensor."""
        if not key.is_of_one_rank:
            self.tensors[key] = tensor
        if start < stop or key.is_of_one_rank:  # even without elements: only the item says that there is such a tensor
            self.items.append(WriteItem(key, tensor, start, stop, read))

    def add_shared(self, key: TensorKey, tensor: torch.Tensor, ranks: Ranks) -> None:
        """Plans a tensor that all of these ranks hold: each rank writes a part of it."""
        self._add(key, tensor, *even_part(tensor.numel(), ranks.size, ranks.rank))

    def add_of_one(self, key: TensorKey, tensor: torch.Tensor, is_this: bool) -> None:
        """Plans a tensor that one rank writes; ``is_this``: it is this rank."""
        self._add(key, tensor, 0, tensor.numel() if is_this else 0)

    def _add(self, key: TensorKey, tensor: torch.Tensor, first: int, last: int) -> None:
        self.add(key, _described(key, tensor), first, last, reader_of(flat_of(tensor)[first:last]))

    def keep(self, tensor: torch.Tensor, is_own: bool = False) -> str:
        """Plans a tensor among encoded values. Returns its name in the checkpoint.

        Args:
            is_own: True if this rank writes it (a module's extra state), False if rank 0 does.
        """
        rank = self.world.rank
        number = sum(key.section == "extra" for key in self.tensors)
        name = f"{rank}.{number}" if is_own and rank else f"{number}"
        self.add_of_one(TensorKey("extra", name, "value"), tensor.detach().clone(), is_own or rank == 0)
        return name


def plan_save(model: Model, world: AnyRanks, arguments: SaveArguments, with_gradients: bool) -> SavePlan:
    """Returns the plan for the present values, which covers what this rank holds. Local; reads no element.

    Args:
        with_gradients: False if those of some rank are of a part of a backward only.

    Raises:
        CheckpointError: something cannot be saved; nothing was written.
    """
    model.check_savable()
    for domain in model.domains:
        take_sources(domain)
        if not arguments.full_precision:
            _check_halves(domain)
        keep_low_bits(domain)  # split masters are saved as they are kept
    plan = SavePlan(world, not arguments.allow_nonfinite, arguments.step is None)
    group_of = model.groups_by_param()
    plan.params = {
        name: _plan_param(plan, model, member, group_of.get(member.param, {}), arguments.full_precision)
        for name, member in model.params.items()
    }
    is_first, home = model.data_ranks.rank == 0, numbers_of(model.data_ranks)
    for name, buffer in model.buffers.items():
        # Running statistics may differ between ranks; as in DDP, those of the first rank count.
        if model.buffer_claims.is_planned(name, home):
            plan.add_of_one(TensorKey("buffers", name, "value"), buffer, is_first)
    plan.optimizers = tuple(_plan_optimizer(plan, model, number) for number in range(len(model.engines)))
    plan.gradients = {
        member.box_name: about
        for member in (model.params.values() if with_gradients else ())
        if (about := _plan_gradient(plan, member)) is not None
    }
    for member in model.params.values():
        _plan_residual(plan, member)
    counted = max((about.step for about in plan.params.values()), default=0)
    plan.step = counted if arguments.step is None else arguments.step
    plan.extra = values.encode_dict(arguments.extra, plan.keep, "extra")
    states = dict(_extra_states(model)) if is_first else {}
    plan.module_extra = values.encode_dict(states, partial(plan.keep, is_own=True), "get_extra_state()")
    for kind, state in rng.states(model.device).items():
        plan.add_of_one(TensorKey("rng", str(world.rank), kind), state, True)
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


def _plan_optimizer(plan: SavePlan, model: Model, number: int) -> OptimizerInfo:
    engine = model.engines[number]
    groups = []
    for index, (group, its_names) in enumerate(zip(engine.groups, model.names_in(engine), strict=True)):
        given = {key: group[key] for key in group if key not in ("params", "param_names", "process_group")}
        where = f"group {index} of optimizer {number}"
        groups.append(GroupInfo(params=tuple(its_names), values=values.encode_dict(given, plan.keep, where)))
    counts = any(engine.rule.of(group).counts_steps for group in engine.groups)
    return OptimizerInfo(rule=engine.rule.name, counts_steps=counts, groups=tuple(groups))


# -- params ------------------------------------------------------------------------------------------------------------


def _plan_param(plan: SavePlan, model: Model, member: ModelParam, group: Group, widens: bool) -> ParamInfo:
    """Plans a param with its master and states. Returns its record in the manifest. ``widens``: writes them in fp32."""
    if member.param.is_meta:
        raise CheckpointError(f"call bind() first: {member.name!r} is on the meta device and has no values to save.")
    state, has_state = _state_of(model, member)
    if member.are_codes:
        plan.codes.add(member.box_name)
    if not member.is_planned:
        pass  # other ranks that hold the same box write it
    elif member.shard is None:
        plan.add_shared(TensorKey("params", member.box_name, "param"), member.param, member.holders)
    else:
        _plan_slice(plan, member, member.shard, "param", widens)
        if member.entry is not None and member.optimizer is not None:
            names = model.engines[member.optimizer].rule.variant(group, member.box.shape).states if has_state else ()
            masters = member.shard.masters if member.shard.exact == "param" else ()  # else they are the param
            for kind in (*masters, *(name for name in names if name in member.shard.states)):
                _plan_slice(plan, member, member.shard, kind, widens)
    for kind, tensor in (*state.tensors.items(), *state.margins.items()):
        if isinstance(tensor, Part):
            raise CheckpointError(
                f"take a step first, or save before loading: {kind} of {member.name!r} was loaded as a part and is "
                "not bound yet, so this rank lacks the rest of it."
            )
        if kind in state.margins:
            if _plans_margins(model, member):
                plan.add_shared(TensorKey("params", member.name, kind), tensor, member.holders)
        elif member.is_planned:
            plan.add_shared(TensorKey("params", member.box_name, kind), tensor, member.holders)
    return ParamInfo(
        turn=member.expert_index,
        aliases=member.aliases,
        optimizer=member.optimizer,
        step=state.step,
        carried={name: float(value) for name, value in state.carried.items()},
        has_state=has_state,
    )


def _state_of(model: Model, member: ModelParam) -> tuple[ParamState, bool]:
    """Returns counters and margins of a bound param, or the state that waits to be bound; and True if it has one."""
    if member.entry is not None and member.shard is not None:
        state = ParamState(member.entry.step, member.entry.carried, margins=member.entry.margins)
        return state, member.entry.has_state
    waiting = None
    if member.optimizer is not None:
        waiting = model.engines[member.optimizer].states.waiting.get(member.param)
    return waiting or ParamState(), waiting is not None


def _plans_margins(model: Model, member: ModelParam) -> bool:
    """True if the holders of this box write the margins, which all ranks hold: holders of the first box do."""
    boxes = model.claims.boxes.get(member.name)
    if boxes is None:
        return member.is_planned
    return member.box == boxes[0] and model.claims.writers[member.box_name] == tuple(numbers_of(member.holders))


def _plan_gradient(plan: SavePlan, member: ModelParam) -> GradientInfo | None:
    """Plans the gradient that was accumulated since the last step. Returns what is known of its sum."""
    slot, grad = (None, None) if member.entry is None else (member.entry.gradient_slice, member.entry.grad)
    about = None
    if grad is None or member.shard is None:
        return None
    own: torch.Tensor | None = grad
    if slot is None:
        if not gradients.accumulates_alone(member.domain) or isinstance(grad, Part):
            return None
    elif slot.shows_in(grad):
        own = slot.pending
        if not slot.is_used:
            about = gradients.describe(slot)
            tensor = TensorInfo(tuple(member.param.shape), member.shard.strides(member.index), slot.total.dtype)
            key, where = TensorKey("gradients", member.box_name, "reduced"), member.shard.slice_of(member.index)
            assert member.domain is not None
            first, last = own_part(slot.total.numel(), member.domain.mesh)
            read = reader_of(slot.summed()[0][first:last])
            if member.is_planned:
                plan.add(key, tensor, where.start + first, where.start + last, read)
    if own is not None:  # accumulated under no_sync()
        plan.add_of_one(TensorKey("gradients", member.box_name, str(plan.world.rank)), own, True)
    return about


def _plan_residual(plan: SavePlan, member: ModelParam) -> None:
    """Plans this rank's part of what quantized gradients owe, which :func:`.residual.settle` has summed over ranks."""
    found = residual_of(member.domain, member.entry)
    if found is not None and member.is_planned:
        assert member.shard is not None
        start, values = found
        tensor = TensorInfo(tuple(member.param.shape), member.shard.strides(member.index), torch.float32)
        key = TensorKey("gradients", member.box_name, "residual")
        plan.add(key, tensor, start, start + values.numel(), lambda first, last: values[first:last].float())


def _plan_slice(plan: SavePlan, member: ModelParam, shard: Shard, kind: str, widens: bool) -> None:
    """Plans this rank's slice: a param in its dtype, a master or state in its format with its scales, or in fp32."""
    assert member.domain is not None
    key, where = TensorKey("params", member.box_name, kind), shard.slice_of(member.index)
    first, last = own_part(where.local.stop - where.local.start, member.domain.mesh)
    format = None if kind == "param" or widens else shard.format_of(kind)
    dtype = member.dtype if kind == "param" else torch.float32
    tensor = TensorInfo(tuple(member.param.shape), shard.strides(member.index), dtype)
    read = shard_reader(shard, shard.exact if kind == "param" else kind, where.local.start + first)
    if format not in (None, FP32):
        tensor = replace(tensor, dtype=format.dtype, encoding=format.name)
        read = stream_reader(shard, kind, where.local.start + first)
    plan.add(key, tensor, where.start + first, where.start + last, read)
    if isinstance(format, BlockFormat):
        blocks = TensorInfo((-(-member.param.numel() // BLOCK),), (1,), torch.float32)
        start, begin = where.start // BLOCK, first // BLOCK
        end = -(-last // BLOCK) if first < last else begin  # a replica that writes nothing may be cut inside of a block
        read = stream_reader(shard, scales_name(kind), where.local.start + begin * BLOCK, BLOCK)
        plan.add(key.scales, blocks, start + begin, start + end, read)


def _described(key: TensorKey, tensor: torch.Tensor) -> TensorInfo:
    if tensor.dtype not in NAME_OF_DTYPE or tensor.layout is not torch.strided or isinstance(tensor, Part):
        raise CheckpointError(
            f"convert {key} to a dense tensor of a common dtype first: it is a {type(tensor).__name__} of "
            f"{tensor.dtype} and layout {tensor.layout}, which the file format cannot hold. Nothing was saved."
        )
    return TensorInfo(tuple(tensor.shape), strides_of(tensor), tensor.dtype)


def _extra_states(model: Model) -> Iterator[tuple[str, object]]:
    for name, each in model.module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield model.name_of(name), each.get_extra_state()
