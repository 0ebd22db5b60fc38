"""Ranks that use other experts of a block in every step, at stage 3: none waits for a gradient that never comes.

A rank that waits for the sum of a block's gradients must not keep one that lacks some of them from the next gather."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardopt import ShardedSGD
from tests.partition.test_ranks_apart import CONNECTIONS, connected
from tests.support.comparing import snapshot
from tests.support.modules import RATES, W, data, poisoned, small
from tests.support.ranks import Pool

BLOCKS, EXPERTS, STEPS = 6, 3, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(W, W) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        return x + sum(torch.tanh(self.experts[number](x)) for number in chosen)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(W, W), nn.ModuleList(Experts() for _ in range(BLOCKS))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, chosen)
        return x


def trained(stage: int, kind: str) -> list[bytes]:
    torch.manual_seed(0)
    model = Model()
    tuning = small(neighbours=kind == "memory", timeout=60)
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=tuning)
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        chosen = range(EXPERTS) if rank == step % 2 else [step % EXPERTS]
        opt.zero_grad()
        model(data(step, 4, W), chosen).square().mean().backward()
        opt.step()
    return snapshot(model, opt)


def uses_other_experts() -> None:
    for kind in CONNECTIONS:
        expected = trained(1, kind)
        with connected(kind), poisoned():
            assert trained(3, kind) == expected, kind


def test_ranks_with_other_experts(ranks: Pool) -> None:
    ranks.run(uses_other_experts, world=2)
