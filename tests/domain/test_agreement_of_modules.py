"""Ranks that disagree about a module that was handed over: named on every rank, nothing changed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardopt import DisagreementError, ShardedOptimizer
from tests.support.comparing import snapshot
from tests.support.modules import W, made, plain, train_step
from tests.support.ranks import Pool
from tests.support.training import raises

Act = Callable[[Any, ShardedOptimizer], None]


def model_of_all_sizes() -> nn.Module:
    """Weights that are sharded at stage 3, and norms and biases that stay whole."""
    return nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W), nn.Linear(W, 10), nn.Linear(10, W))


def written_alone(model: Any, opt: ShardedOptimizer) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[2].bias.add_(1)  # 10 elements: whole at every stage


def frozen_alone(model: Any, opt: ShardedOptimizer) -> None:
    model[0].weight.requires_grad_(dist.get_rank() == 0)


def disagree(act: Act, words: tuple[str, ...]) -> None:
    for stage in (1, 2, 3):
        model, opt = made(stage, model_of_all_sizes)
        train_step(model, opt, 0)
        act(model, opt)
        before = snapshot(model, opt)
        opt.zero_grad()
        plain(model, 1)
        with raises(DisagreementError, *words):
            opt.step()
        assert snapshot(model, opt) == before


def test_disagreements(ranks: Pool) -> None:
    ranks.run(disagree, written_alone, ("weights (sum of bits)", "(10,)"), world=2)
    ranks.run(disagree, frozen_alone, ("requires_grad", "(24, 24)", "True on rank 0, False on rank 1"), world=2)


def frozen_together() -> None:
    """On all ranks, in the middle of training: no disagreement."""
    results = []
    for stage in (1, 2, 3):
        model, opt = made(stage, model_of_all_sizes)
        for step in range(4):
            model[0].weight.requires_grad_(step != 2)
            train_step(model, opt, step)
        results.append(snapshot(model, opt))
    assert results[0] == results[1] == results[2]


def test_frozen_together(ranks: Pool) -> None:
    ranks.run(frozen_together, world=2)
