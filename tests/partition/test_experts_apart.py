"""Ranks that use other experts of a block in every step, at stage 3: none waits for a gradient that never comes.

A rank that waits for the sum of a block's gradients must not keep one that lacks some of them from the next gather."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import ShardedSGD
from tests.partition.test_ranks_apart import CONNECTIONS, connected
from tests.support.comparing import snapshot
from tests.support.modules import RATES, Owner, W, data, poisoned, small
from tests.support.ranks import Pool

BLOCKS, EXPERTS, STEPS = 6, 3, 4
Trained = tuple[list[bytes], list[int]]  # the bits of params, and the bytes of gradients that each step received


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


def owned(stage: int, kind: str, releases: bool = False, batches: Sequence[int] = (STEPS, STEPS)) -> Trained:
    torch.manual_seed(0)
    model, received = Owner(), [0]
    tuning = small(neighbours=kind == "memory", live_bytes=None, timeout=60)
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=tuning, release_gradients=releases)
    with nullcontext() if releases else opt.join():
        for step in range(batches[dist.get_rank()]):
            opt.zero_grad()
            model(data(step, 4, W)).square().mean().backward()
            opt.step()
            received.append(opt.engine.traffic()["gradients"])
    return snapshot(model, opt), [after - before for before, after in pairwise(received)]


def owns_params() -> None:
    apart = (STEPS, 1)
    (expected, _), (_, once), (joined, _) = owned(1, "memory"), owned(3, "memory"), owned(1, "memory", batches=apart)
    for kind in CONNECTIONS:
        with connected(kind), poisoned():
            for releases in (False, True):
                assert owned(3, kind, releases) == (expected, once), (kind, releases)
            assert owned(3, kind, batches=apart)[0] == joined, kind


def test_modules_that_own_params_and_call_others(ranks: Pool) -> None:
    """Their gradients come last, and no bucket is reduced without them."""
    ranks.run(owns_params, world=2)
