"""A model whose gradients are whole numbers: its training has the same bits at every number of ranks and stage."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from shardopt import ShardedAdamW, ShardedOptimizer, ShardedSGD, Tuning
from tests.support.training import raw

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (257,), (24, 24), (7, 300), (3, 256)]


class Cell(nn.Module):
    """Uses its own param, whose gradient is whole numbers that depend on the step alone."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = Parameter(weight)

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.weight.numel())
        factors = torch.randint(-8, 9, self.weight.shape, generator=generator)
        return (self.weight.float() * factors).sum()


class Whole(nn.Module):
    """0-d, empty, prime, transposed, bf16, tied and frozen params, and buffers of several kinds."""

    def __init__(self, seed: int = 0, transposed: bool = True):
        super().__init__()
        torch.manual_seed(seed)
        self.cells = nn.ModuleList(Cell(torch.randn(shape)) for shape in SHAPES)
        other = torch.randn(40, 30)
        self.cells.append(Cell(other.t() if transposed else other.t().contiguous()))
        self.low = nn.ModuleList(Cell(torch.randn(shape).bfloat16()) for shape in [(300,), (20, 30)])
        self.tied = Cell(torch.zeros(1))
        self.tied.weight = self.cells[4].weight
        self.frozen = Cell(torch.randn(40, 20))
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("counts", torch.arange(5) + seed)
        self.register_buffer("phases", torch.randn(3, 4).to(torch.complex64))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, step: int) -> Tensor:
        cells = [*self.cells, *self.low, self.tied, self.frozen]
        return torch.stack([cell(step) for cell in cells]).sum()


def build(
    stage: int,
    seed: int = 0,
    kind: str = "AdamW",
    bucket_bytes: int = 3000,
    live_bytes: int = 0,
    group: Any = None,
    offload: str | None = None,
    transposed: bool = True,
    **formats: str,
) -> Any:
    """The model, and an optimizer with two groups."""
    model = Whole(seed, transposed)
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:4], "lr": 0.01}, {"params": params[4:], "weight_decay": 0.1}]
    tuning = Tuning(bucket_bytes=bucket_bytes, keep_below=200, live_bytes=live_bytes)
    common: dict[str, Any] = {
        "module": model,
        "stage": stage,
        "tuning": tuning,
        "process_group": group,
        "offload": offload,
        **formats,
    }
    if kind == "AdamW":
        return model, ShardedAdamW(groups, lr=0.003, amsgrad=True, **common)
    return model, ShardedSGD(groups, lr=0.003, momentum=0.9, **common)


def train(model: nn.Module, optimizer: ShardedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        model.counts.add_(1)


def facts(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, str]:
    """Digests of all values, by name; complete on rank 0."""
    optimizer.consolidate_state_dict()
    found = {}
    with optimizer.unsharded():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name != "scratch":
                found[name] = hashlib.sha256(raw(tensor)).hexdigest()
    if not dist.is_initialized() or dist.get_rank() == 0:
        states = optimizer.state_dict()
        for index, state in states["state"].items():
            for name, value in state.items():
                found[f"{index}.{name}"] = hashlib.sha256(raw(value)).hexdigest()
        found["groups"] = repr([{**group, "params": len(group["params"])} for group in states["param_groups"]])
    return found


def draws() -> list[float]:
    """The next random numbers of every generator."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def save(directory: Path, model: nn.Module, optimizer: Any, **keywords: Any) -> Path:
    return shardopt.save_checkpoint(directory, model, optimizer, **keywords).wait()
