"""One model cut by tensor, pipeline, expert and data parallelism, whose every element is known before it is trained.

Its gradients are made of the elements' places, and AdamW works on each element by itself: params and states have the
same bits in every cut, and no forward is needed.
"""

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardopt
from shardopt import Part, ShardedOptimizer, Tuning
from shardopt.checkpoint import assemble, background, elements, reader, records, safetensors_file

LAYERS, EXPERTS = 2, 4
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
STATES = ("exp_avg", "exp_avg_sq")


Factors = Callable[[nn.Module], Sequence[Tensor]]


class Product(nn.Module):
    """A module whose forward gives its params the gradients that it is called with."""

    def forward(self, factors: Factors) -> Tensor:
        pairs = zip(self.parameters(recurse=False), factors(self), strict=True)
        own = [local((param * factor).sum()) for param, factor in pairs]
        return torch.stack([*own, *(child(factors) for child in self._below()), torch.zeros(())]).sum()

    def _below(self) -> Iterator[nn.Module]:
        for child in self.children():
            yield from child.children() if isinstance(child, nn.ModuleDict | nn.ModuleList) else [child]


def local(total: Any) -> Tensor:
    """Of a DTensor all of it."""
    found: Tensor = total.full_tensor() if isinstance(total, DTensor) else total
    return found


class Linear(Product, nn.Linear):
    pass


class Embedding(Product, nn.Embedding):
    pass


class Scale(Product):
    """Has a state beside its params."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Layer(Product):
    def __init__(self, experts: range) -> None:
        super().__init__()
        self.norm = Scale()
        self.up = Linear(6, 13)
        self.down = Linear(13, 6)
        self.experts = nn.ModuleDict({str(index): Linear(5, 3, bias=False) for index in experts})
        self.stacked = nn.Parameter(torch.empty(EXPERTS, 3, 5))
        self.register_buffer("seen", torch.zeros(3))


class Model(Product):
    """A pipeline stage of it has some of the layers; the others keep their names."""

    def __init__(self, layers: range = range(LAYERS), experts: range = range(EXPERTS)) -> None:
        super().__init__()
        if 0 in layers:
            self.embed = Embedding(11, 6)
        self.layers = nn.ModuleDict({str(index): Layer(experts) for index in layers})
        if LAYERS - 1 in layers:
            self.head = Linear(6, 11, bias=False)
            self.head.weight.requires_grad_(False)


def content(name: str, shape: torch.Size, turn: int) -> Tensor:
    """The elements of a tensor of the whole model, by its name and a number."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + turn)
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Cut:
    """How many ranks of each kind there are; what they multiply to is the number of ranks of the model.

    Attributes:
        alone: each rank is a model of its own, with everything.
        renumbered: modules have other names on each rank than in the whole model.
        module: it is handed over, and gradients are those of a backward.
    """

    pp: int = 1
    ep: int = 1
    dp: int = 1
    tp: int = 1
    stage: int = 1
    alone: bool = False
    renumbered: bool = False
    module: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.ep * self.dp * self.tp

    def __str__(self) -> str:
        kinds = (f"{kind}{getattr(self, kind)}" for kind in ("pp", "ep", "dp", "tp") if getattr(self, kind) > 1)
        return "-".join([*kinds, f"stage{self.stage}"])


class Meshes:
    """Those of one job: making groups of ranks costs more than all else here."""

    _jobs = itertools.count()

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], DeviceMesh] = {}
        # Torch keeps what it found of DTensors by the equality of meshes, for all jobs of a process.
        self._job = next(self._jobs)

    def dims(self, *kinds: str) -> tuple[str, ...]:
        return tuple(f"{kind}{self._job}" for kind in kinds)

    def of(self, sizes: tuple[int, ...]) -> DeviceMesh:
        if sizes not in self._made:
            self._made[sizes] = init_device_mesh(
                "cpu", sizes, mesh_dim_names=self.dims("apart", "pp", "ep", "dp", "tp")
            )
        return self._made[sizes]


class Cell:
    """This rank's part of the model in one cut, and its optimizer."""

    def __init__(self, cut: Cut, meshes: Meshes, turn: int = 0, **options: Any) -> None:
        """``turn``: of the values that params begin with."""
        self.cut = cut
        shape = (1, 1, 1, 1) if cut.alone else (cut.pp, cut.ep, cut.dp, cut.tp)
        sizes = (dist.get_world_size(), *shape) if cut.alone else (1, *shape)
        self._whole, self._meshes = meshes.of(sizes), meshes
        stage, expert = self.mesh("pp").get_local_rank(), self.mesh("ep").get_local_rank()
        per_stage, per_rank = LAYERS // cut.pp, EXPERTS // cut.ep
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        experts = range(expert * per_rank, (expert + 1) * per_rank)
        self.model = Model(layers, experts)
        self.names: dict[nn.Module, str] = {}
        if cut.renumbered:
            self._renumber(layers)
        self._global = {param: self._global_name(name) for name, param in self.model.named_parameters()}
        self._fill(turn)
        self._parallelize()
        self.optimizer = self._optimizer(**options)

    def mesh(self, *kinds: str) -> DeviceMesh:
        """The ranks along these dimensions, this one among them."""
        return self._whole[self._meshes.dims(*kinds)]

    def _renumber(self, layers: range) -> None:
        """Layers and experts are numbered from 0 on each rank."""
        self.model.layers = nn.ModuleList(self.model.layers.values())
        for index, layer in zip(layers, self.model.layers, strict=True):
            self.names[layer] = f"layers.{index}"
            numbers, layer.experts = list(layer.experts), nn.ModuleList(layer.experts.values())
            self.names |= {each: f"layers.{index}.experts.{n}" for n, each in zip(numbers, layer.experts, strict=True)}

    def _global_name(self, name: str) -> str:
        paths = {path: self.names[each] for path, each in self.model.named_modules() if each in self.names}
        inner = max((path for path in paths if name.startswith(f"{path}.")), key=len, default=None)
        return name if inner is None else paths[inner] + name.removeprefix(inner)

    def _fill(self, turn: int) -> None:
        with torch.no_grad():
            for param, name in self._global.items():
                param.copy_(content(name, param.shape, turn))
            for index, layer in enumerate(self.model.layers.children()):
                layer.seen.fill_(turn + index + self.mesh("pp").get_local_rank() * len(self.model.layers))
                layer.norm.calls = turn

    def _parallelize(self) -> None:
        """Params of tensor parallelism, and the stacked experts, become DTensors."""
        tensor, experts = self.mesh("tp"), self.mesh("ep")
        for module in list(self.model.modules()):
            if isinstance(module, Layer):
                if self.cut.tp > 1:
                    self._place(module.up, tensor, Shard(0))
                    self._place(module.down, tensor, Shard(1), bias=Replicate())
                    if self.cut.ep > 1:
                        self._place(module, self.mesh("ep", "tp"), Shard(0), Shard(2))
                    else:
                        self._place(module, tensor, Shard(2))
                elif self.cut.ep > 1:
                    self._place(module, experts, Shard(0))
                for number, expert in enumerate(module.experts.children() if self.cut.tp > 1 < self.cut.ep else ()):
                    self._place(expert, tensor, Replicate() if number else Shard(1))
            elif isinstance(module, nn.Embedding) and self.cut.tp > 1:
                self._place(module, tensor, Shard(0))

    def _place(self, module: nn.Module, mesh: DeviceMesh, *placements: Any, **others: Any) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            values = distribute_tensor(param.detach(), mesh, [others[name]] if name in others else placements)
            placed = nn.Parameter(values, requires_grad=param.requires_grad)
            setattr(module, name, placed)
            self._global[placed] = self._global.pop(param)

    def _optimizer(self, **options: Any) -> ShardedOptimizer:
        model_ranks = self.mesh("dp").get_group()
        rest: list[Any] = []
        experts: list[Any] = []
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                (experts if is_of_experts(name) else rest).append(param)
        groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.1}, {"params": experts, "lr": 0.02}]
        given: dict[str, Any] = {"process_group": model_ranks}
        if self.cut.ep > 1:
            groups[1]["process_group"] = model_ranks
            given["process_group"] = self.mesh("ep", "dp")._flatten().get_group() if self.cut.dp > 1 else None
            given["process_group"] = given["process_group"] or self.mesh("ep").get_group()
        if self.cut.pp > 1 or (self.cut.ep > 1 and self.cut.tp > 1):
            given["norm_group"] = dist.group.WORLD
        if self.cut.module:
            given["module"] = self.model
        given |= {"tuning": Tuning(bucket_bytes=300, live_bytes=0), **options}
        return shardopt.ShardedAdamW(groups, **OPTIONS, stage=self.cut.stage, **given)

    # -- a training ------------------------------------------------------------------------------------------------

    def step(self, turn: int) -> None:
        """Each rank has the mean of all batches behind it."""
        if self.cut.module:
            self.optimizer.zero_grad()
            self.model(lambda each: self._factors(each, turn)).backward()
            self.optimizer.step()
            return
        for param, name in self._global.items():
            if param.requires_grad:
                values: Any = param
                whole_grad = content(f"{name} grad", values.shape, turn)
                is_cut = isinstance(values, DTensor)
                param.grad = (
                    distribute_tensor(whole_grad, values.device_mesh, values.placements) if is_cut else whole_grad
                )
        self.optimizer.step()

    def _factors(self, module: nn.Module, turn: int) -> list[Tensor]:
        """Each batch sends tokens to all experts: a rank multiplies its own by those of all ranks that have others."""
        found: list[Tensor] = []
        for param in module.parameters(recurse=False):
            name, values = self._global[param], cast(Any, param)
            factor = content(f"{name} grad", values.shape, turn) * (self.cut.ep if is_of_experts(name) else 1)
            if isinstance(values, DTensor):
                factor = distribute_tensor(factor, values.device_mesh, values.placements)
            found.append(factor)
        return found

    def facts(self) -> dict[str, str]:
        """Digests of what this rank has a part of, by global name. Collective."""
        with self.optimizer.unsharded() if self.cut.module else nullcontext():
            return self._facts()

    def _facts(self) -> dict[str, str]:
        found: dict[str, Any] = {}
        for param, name in sorted(self._global.items(), key=lambda each: each[1]):
            found[name] = digest(param)
            if param.requires_grad:
                state = self.optimizer.state[param]
                found |= {f"{name}.{kind}": digest(state[kind]) for kind in STATES}
                found[f"{name}.step"] = str(int(state["step"]))
        for name, layer in self.model.named_modules():
            if isinstance(layer, Layer):
                full = self._global_name(f"{name}.x")[:-2]
                found[f"{full}.seen"], found[f"{full}.calls"] = digest(layer.seen), str(layer.norm.calls)
        return found

    def states(self) -> dict[str, Tensor]:
        """Whole, by global name. Collective."""
        trained = {name: param for param, name in self._global.items() if param.requires_grad}
        return {
            f"{name}.{kind}": whole(self.optimizer.state[trained[name]][kind])
            for name, kind in itertools.product(sorted(trained), STATES)
        }

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """The places, in the whole tensor, of the elements that this rank keeps: by name and kind."""
        for param, name in self._global.items():
            values: Any = param
            places = torch.arange(values.numel()).view(values.shape)
            if isinstance(values, DTensor):
                places = distribute_tensor(
                    places, values.device_mesh, values.placements, src_data_rank=None
                )._local_tensor
            places = places.reshape(-1)
            yield name, "param", places
            if param.requires_grad:
                for kind in STATES:
                    state: Any = self.optimizer.state[param][kind]
                    part = state._local_tensor if isinstance(state, DTensor) else state
                    own = places[part.start : part.start + part.local.numel()] if isinstance(part, Part) else places
                    yield name, kind, own


def is_of_experts(name: str) -> bool:
    return "expert" in name or "stacked" in name


def whole(tensor: Any) -> Tensor:
    """Collective where it is a DTensor or a part."""
    if isinstance(tensor, DTensor):
        values = tensor._local_tensor
        if isinstance(values, Part):
            tensor = DTensor.from_local(
                values.full_tensor(), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
            )
        tensor = tensor.full_tensor()
    elif isinstance(tensor, Part):
        tensor = tensor.full_tensor()
    found: Tensor = tensor.detach()
    return found


def digest(tensor: Any) -> str:
    """Collective where it is a DTensor or a part."""
    return hashlib.sha256(whole(tensor).contiguous().numpy().tobytes()).hexdigest()


@contextmanager
def small_chunks(nbytes: int = 64) -> Iterator[None]:
    """Chunks of a few elements, so that small tensors have many."""
    with ExitStack() as patches:
        for module in (records, safetensors_file, reader, elements):
            patches.enter_context(patch.object(module, "CHUNK_BYTES", nbytes))
        for module in (assemble, elements, background):
            patches.enter_context(patch.object(module, "READ_BYTES", 4 * nbytes))
        yield


def needed(checkpoint: Any, held: Mapping[tuple[str, str], Tensor], nbytes: int) -> set[tuple[str, int]]:
    """Where the chunks begin, file and byte, that hold some of these elements; found element by element."""
    found = set()
    for name, boxes in checkpoint.manifest.boxes.items():
        for each, box in boxes.items():
            places = torch.arange(max(1, torch.Size(box.shape).numel())).view(box.shape)
            for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                places = places.narrow(dim, first, size)
            flat = places.reshape(-1)
            for kind, tensor in checkpoint.manifest.tensors.items():
                if kind.section != "params" or kind.name != each or (name, kind.kind) not in held:
                    continue
                step = nbytes // tensor.dtype.itemsize
                own = held[name, kind.kind]
                for span in tensor.ranges:
                    for index, first in enumerate(range(span.start, span.stop, step)):
                        if torch.isin(flat[first : min(first + step, span.stop)], own).any():
                            found.add((span.file, span.offset + index * nbytes))
    return found
