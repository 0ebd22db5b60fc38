"""What a checkpoint will hold and which ranges of it this rank writes: decided first, then followed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..domain.domain import Domain
from ..domain.domains import ExpertGroup
from ..domain.masters import keep_low_bits
from ..domain.param import without_process_group
from ..domain.param_state import ParamState
from ..domain.shard import Shard, scales_name
from ..errors import CheckpointError
from ..kernels.formats import FP32, BlockFormat
from ..partition.comm.group import Ranks
from ..partition.layout import BLOCK
from ..partition.mesh import Mesh
from ..tensors.part import Part
from . import gradients, rng, values
from .elements import Elements, Flat, InShard, KeptElements, chunks_of, flat_of, strides_of
from .model import Model, ModelParam, plain_name
from .records import NAME_OF_DTYPE, Key, Tensor, Tensors, tensors_from_json, tensors_to_json


@dataclass(frozen=True)
class Piece:
    """One range that this rank writes: elements ``[start, stop)`` of a tensor, found from ``offset`` on."""

    key: Key
    tensor: Tensor  # without ranges
    start: int
    stop: int
    elements: Elements
    offset: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.dtype.itemsize

    @property
    def label(self) -> str:
        """Its name in the rank's file."""
        return f"{self.key.section}/{self.key.name}/{self.key.kind}[{self.start}:{self.stop}]"

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Some of its elements, counted from its own start, 1D."""
        return self.elements.read(self.offset + start, self.offset + stop)

    def chunks(self) -> Iterator[torch.Tensor]:
        return chunks_of(self.read, self.numel, self.tensor.dtype)


@dataclass(frozen=True)
class SavePlan:
    """One rank's part in a checkpoint.

    Attributes:
        pieces: what this rank writes; the widest dtypes first, so that all are aligned in the file.
        tensors: all that all ranks write, without ranges; those of this rank alone (random numbers) left out.
        shared: JSON that must be the same on all ranks: params, optimizers, step.
        own: JSON of rank 0 alone: what the user gave.
        must_be_finite: no Inf or NaN in params, masters and states is accepted.
    """

    pieces: tuple[Piece, ...]
    tensors: Tensors
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    must_be_finite: bool = True
    step_is_counted: bool = True  # and not given

    @property
    def step(self) -> int:
        return int(self.shared["step"])

    def of_this_rank(self) -> dict[str, Any]:
        """What other ranks do not know: params of groups with a process_group of their own. JSON-able."""
        params = {name: about for name, about in self.shared["params"].items() if "turn" in about}
        tensors = {key: each for key, each in self.tensors.items() if key.section == "params" and key.name in params}
        return {"params": params, "tensors": tensors_to_json(tensors)}

    def joined(self, told: Sequence[Mapping[str, Any]]) -> "SavePlan":
        """With what all ranks told, the same on all of them."""
        params = {name: about for name, about in self.shared["params"].items() if "turn" not in about}
        tensors = {key: each for key, each in self.tensors.items() if key.section != "params" or key.name in params}
        for theirs in told:
            params.update({name: about for name, about in theirs["params"].items() if name not in params})
            tensors.update(tensors_from_json(theirs["tensors"]))
        optimizers = [
            {**each, "groups": [_with_all_turns(group, params) for group in each["groups"]]}
            for each in self.shared["optimizers"]
        ]
        step = max([self.step, *(about["step"] for about in params.values())]) if self.step_is_counted else self.step
        shared = {"step": step, "params": params, "optimizers": optimizers}
        return replace(self, tensors=tensors, shared=shared)

    def skeleton(self) -> dict[str, Any]:
        """What ranks compare before anything is written."""
        described = {
            str(key): [list(tensor.shape), list(tensor.strides), NAME_OF_DTYPE[tensor.dtype]]
            for key, tensor in self.tensors.items()
            if key.section != "extra"
        }
        return {**self.shared, "tensors": described}


def plan_save(model: Model, extra: Mapping[str, Any], step: int | None, widens: bool = False) -> SavePlan:
    """The plan for the values of this moment. Local; reads no element.

    Args:
        widens: save masters and states in fp32, whatever they are kept in.

    Raises:
        CheckpointError: something cannot be saved; nothing was written.
    """
    model.check_savable()
    for engine in model.engines:
        for domain in engine.domains:
            if not widens:
                _check_halves(domain)
            keep_low_bits(domain)  # their halves are saved as they are kept
    return _Planner(model, widens).plan(extra, step)


def _check_halves(domain: Domain) -> None:
    """Half of a master is of no use beside other weights than its own."""
    for shard in domain.shards:
        for index in shard.unmatched_masters:
            if not shard.fits_master(index):
                raise CheckpointError(
                    "load the model's weights before this save: master weights were loaded, of which "
                    f"master={domain.options.master!r} keeps the low bits, and beside other weights these would be "
                    "lost. If these weights are meant, call refresh_masters(). The first is a param of shape "
                    f"{tuple(shard.bucket.params[index].shape)}."
                )


class _Planner:
    def __init__(self, model: Model, widens: bool):
        self.model, self.world, self.widens = model, model.world, widens
        self.pieces: list[Piece] = []
        self.tensors: Tensors = {}

    def plan(self, extra: Mapping[str, Any], step: int | None) -> SavePlan:
        model = self.model
        group_of = {
            param: group for engine in model.engines for group in engine.local_groups() for param in group["params"]
        }
        params = {name: self._param(home, group_of.get(home.param, {})) for name, home in model.params.items()}
        for name, buffer in model.buffers.items():
            # Ranks may hold others (running statistics): DDP too lets those of rank 0 count.
            self._whole(Key("buffers", name, "value"), buffer, on_rank_0=True)
        optimizers = [self._optimizer(number) for number in range(len(model.engines))]
        reduced = {name: about for name, home in model.params.items() if (about := self._gradient(home)) is not None}
        is_counted = step is None
        if step is None:
            step = max((each["step"] for each in params.values()), default=0)
        own = {
            "gradients": reduced,
            "extra": values.encode(dict(extra), self._keep, "extra"),
            "module_extra": values.encode(dict(_extra_states(model.module)), self._keep, "get_extra_state()"),
        }
        for kind, state in rng.states(model.device).items():
            key = Key("rng", str(self.world.rank), kind)
            self._add(key, _described(key, state), 0, state.numel(), Flat(state), 0)
        ordered = sorted(self.pieces, key=lambda piece: -piece.tensor.dtype.itemsize)
        shared = {"step": step, "params": params, "optimizers": optimizers}
        return SavePlan(tuple(ordered), self.tensors, shared, own, step_is_counted=is_counted)

    def _optimizer(self, number: int) -> dict[str, Any]:
        engine = self.model.engines[number]
        groups = []
        names = self.model.names_in(engine)
        for index, (group, its_names) in enumerate(zip(engine.groups, names, strict=True)):
            kept = without_process_group(group)
            given = {key: value for key, value in kept.items() if key not in ("params", "param_names")}
            where = f"group {index} of optimizer {number}"
            groups.append({"params": its_names, "values": values.encode(given, self._keep, where)})
        return {"rule": engine.rule.name, "counts_steps": engine.rule.counts_steps, "groups": groups}

    # -- params ----------------------------------------------------------------------------------------------------

    def _param(self, home: ModelParam, group: Mapping[str, Any]) -> dict[str, Any]:
        if home.param.is_meta:
            raise CheckpointError(
                f"{home.name!r} is on the meta device and has no values: there is nothing to save. Call bind() first."
            )
        state = ParamState()
        has_state = False
        if home.entry is not None and home.shard is not None:
            state = ParamState(home.entry.step, home.entry.carried)
            has_state = home.entry.has_state
        elif home.optimizer is not None:
            loaded = self.model.engines[home.optimizer].states.waiting.get(home.param)
            if loaded is not None:
                state, has_state = loaded, True
        if home.shard is None:
            self._whole(Key("params", home.name, "param"), home.param, home.world)
        else:
            self._sharded(home, "param", home.param.dtype)
            if home.entry is not None and home.optimizer is not None:
                names = self.model.engines[home.optimizer].rule.variant(group).states if has_state else ()
                for kind in (*home.shard.masters, *(name for name in names if name in home.shard.states)):
                    self._kept(home, home.shard, kind)
        for kind, tensor in state.tensors.items():
            if isinstance(tensor, Part):
                raise CheckpointError(
                    f"{kind} of {home.name!r} was loaded as a part and is not bound yet: the rest of it is not here. "
                    "Take a step first, or save before loading."
                )
            self._whole(Key("params", home.name, kind), tensor, home.world)
        return {
            **({} if home.place is None else {"place": str(home.place)}),
            **({} if home.expert_group is None else {"turn": list(home.expert_group)}),
            "aliases": list(home.aliases),
            "optimizer": home.optimizer,
            "step": state.step,
            "carried": {name: float(value).hex() for name, value in state.carried.items()},
            "has_state": has_state,
        }

    def _gradient(self, home: ModelParam) -> dict[str, Any] | None:
        """What was accumulated since the last step, where shardopt reduces; what all ranks know of it."""
        slot, grad, about = home.entry.gradient_slice if home.entry is not None else None, home.param.grad, None
        if slot is None or grad is None or home.shard is None:
            return None
        own: torch.Tensor | None = grad
        if slot.shows_in(grad):
            own = slot.pending
            if not slot.is_used:
                about = gradients.describe(slot)
                tensor = Tensor(tuple(home.param.shape), home.shard.strides(home.index), slot.total.dtype, ())
                key, where = Key("gradients", home.name, "reduced"), home.shard.slice_of(home.index)
                assert home.domain is not None
                first, last = _own_cut(slot.total.numel(), home.domain.mesh)
                self._add(key, tensor, where.start + first, where.start + last, Flat(slot.summed()[0]), first)
        if own is not None:  # accumulated under no_sync()
            key = Key("gradients", home.name, str(self.world.rank))
            self._add(key, _described(key, own), 0, own.numel(), Flat(flat_of(own)), 0)
        return about

    def _sharded(self, home: ModelParam, kind: str, dtype: torch.dtype) -> None:
        shard, domain = home.shard, home.domain
        assert shard is not None and domain is not None
        key = Key("params", home.name, kind)
        tensor = Tensor(tuple(home.param.shape), shard.strides(home.index), dtype, ())
        where = shard.slice_of(home.index)
        numel = where.local.stop - where.local.start
        first, last = _own_cut(numel, domain.mesh)
        self._add(key, tensor, where.start + first, where.start + last, InShard(shard, kind, where.local.start), first)

    def _kept(self, home: ModelParam, shard: Shard, kind: str) -> None:
        """A master or state as it is kept, with the scales of its blocks, or in fp32."""
        format = shard.format_of(kind)
        if format is FP32 or self.widens:
            self._sharded(home, kind, torch.float32)
            return
        assert home.domain is not None
        key, where = Key("params", home.name, kind), shard.slice_of(home.index)
        first, last = _own_cut(where.local.stop - where.local.start, home.domain.mesh)
        tensor = Tensor(tuple(home.param.shape), shard.strides(home.index), format.dtype, (), format.name)
        elements = KeptElements(shard, kind, where.local.start)
        self._add(key, tensor, where.start + first, where.start + last, elements, first)
        if isinstance(format, BlockFormat):
            blocks = Tensor((-(-home.param.numel() // BLOCK),), (1,), torch.float32, ())
            start, begin = where.start // BLOCK, first // BLOCK
            end = -(-last // BLOCK) if first < last else begin  # a copy that writes nothing: its cut is in mid-block
            scales = KeptElements(shard, scales_name(kind), where.local.start, BLOCK)
            self._add(key.scales, blocks, start + begin, start + end, scales, begin)

    def _whole(self, key: Key, tensor: torch.Tensor, ranks: Ranks | None = None, on_rank_0: bool = False) -> None:
        """A tensor that all of these ranks have: each writes a part of it, or rank 0 writes it."""
        described = _described(key, tensor)
        ranks = ranks or self.world
        first, last = cut(tensor.numel(), ranks.size, ranks.rank)
        if on_rank_0:
            first, last = (0, tensor.numel()) if self.world.rank == 0 else (0, 0)
        self._add(key, described, first, last, Flat(flat_of(tensor)), first)

    def _add(self, key: Key, tensor: Tensor, start: int, stop: int, elements: Elements, offset: int) -> None:
        if not key.is_of_one_rank:
            self.tensors[key] = tensor
        if start < stop or key.is_of_one_rank:  # without elements too: nothing but the piece tells that it is there
            self.pieces.append(Piece(key, tensor, start, stop, elements, offset))

    def _keep(self, tensor: torch.Tensor) -> str:
        name = str(sum(key.section == "extra" for key in self.tensors))
        self._whole(Key("extra", name, "value"), tensor.detach().clone(), on_rank_0=True)
        return name


def _with_all_turns(group: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """A param group that also names what other ranks hold in the place of a param of this rank."""
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
    """Where the part of ``index`` begins and ends when elements are shared out evenly, in whole blocks."""
    blocks = (numel + BLOCK - 1) // BLOCK
    step = (blocks + parts - 1) // parts * BLOCK
    return min(index * step, numel), min((index + 1) * step, numel)


def _own_cut(numel: int, mesh: Mesh) -> tuple[int, int]:
    """Ranks that hold copies of one slice write a part of it each."""
    return cut(numel, mesh.replicate.size, mesh.replicate.rank)


def _described(key: Key, tensor: torch.Tensor) -> Tensor:
    if tensor.dtype not in NAME_OF_DTYPE or tensor.layout is not torch.strided or isinstance(tensor, Part):
        raise CheckpointError(
            f"{key} is a {type(tensor).__name__} of {tensor.dtype} and layout {tensor.layout}, which the file format "
            "cannot hold: nothing was saved. Convert it to a dense tensor of a common dtype first."
        )
    return Tensor(tuple(tensor.shape), strides_of(tensor), tensor.dtype, ())


def _extra_states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield plain_name(name), each.get_extra_state()
