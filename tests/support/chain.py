"""A model whose gradients are whole numbers, so that sums have the same bits on every device and over every backend."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from tests.support.comparing import raw


class Link(nn.Module):
    """Adds the sum of its weight times integers, which are its gradient: the same on every device."""

    def __init__(self, numel: int):
        super().__init__()
        self.weight = Parameter(torch.linspace(-1, 1, numel))

    def forward(self, x: Tensor, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(salt)
        factors = torch.randint(-8, 9, self.weight.shape, generator=generator)
        return x + (self.weight * factors.to(self.weight)).sum()


class Chain(nn.Module):
    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.links = nn.ModuleList(map(Link, numels))

    def forward(self, x: Tensor, salt: int) -> Tensor:
        for number, link in enumerate(self.links):
            x = link(x, 100 * salt + number)
        return x


NUMELS = (300, 1, 2000, 257, 70_000)


def bind_chain(
    stage: int,
    device: str,
    offload: Any = None,
    numels: Sequence[int] = NUMELS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Module, shardopt.ShardedOptimizer]:
    model = Chain(numels).to(device, dtype)
    tuning = shardopt.Tuning(bucket_bytes=4000, keep_below=500, live_bytes=0)
    keywords = {"lr": 0.01, "max_grad_norm": 100.0, "tuning": tuning, "offload": offload, **options}
    return model, shardopt.ShardedAdamW(model, stage=stage, **keywords)


def step_chain(model: nn.Module, optimizer: shardopt.ShardedOptimizer, steps: Iterable[int]) -> None:
    """One or two backwards each."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = next(model.parameters()).device
    for step in steps:
        optimizer.zero_grad()
        for turn in range(1 + step % 2):
            model(torch.zeros((), device=device), 10 * step + 3 * rank + turn).backward()
        optimizer.step()


def bits_of(model: nn.Module, optimizer: shardopt.ShardedOptimizer) -> list[bytes]:
    """All params, whole: collective."""
    with optimizer.unsharded():
        return [raw(param.detach().cpu()) for param in model.parameters()]


def train_chain(stage: int, device: str, offload: Any = None, *numels: Any, **options: Any) -> list[bytes]:
    """Eight steps of AdamW; the params that they leave. Arguments are those of :func:`bind_chain`."""
    model, optimizer = bind_chain(stage, device, offload, *numels, **options)
    step_chain(model, optimizer, range(8))  # after six of them it is known which step is faster
    assert optimizer.grad_norm is not None and optimizer.grad_norm > 100.0  # it was clipped
    return bits_of(model, optimizer)
