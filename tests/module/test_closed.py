"""Optimizers that were closed leave nothing behind in the module that they had."""

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import BindingError, ShardedOptimizer, ShardedSGD
from shardopt.module.ddp import RetiredReducer
from tests.support.modules import RATES, W, plain, small, train_step
from tests.support.ranks import Pool
from tests.support.training import raises


def halves(module: nn.Module, inner: Any, stage: int) -> list[ShardedOptimizer]:
    return [
        ShardedSGD(half.parameters(), **RATES, module=module, stage=stage, tuning=small())
        for half in (inner[0], inner[1])
    ]


def covers_no_more() -> None:
    """Closed, and alive: its params are in no optimizer."""
    for stage in (1, 3):
        model = nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))
        first, second = halves(model, model, stage)
        plain(model, 0)
        first.step()
        second.step()
        second.close()
        plain(model, 1)
        with raises(BindingError, "1.weight is trainable but in no param group"):
            first.step()
        first.close()
        again, _ = halves(model, model, stage)
        _.close()
        with raises(BindingError, "1.weight is trainable but in no param group"):
            plain(model, 2)
        model[1].requires_grad_(False)
        train_step(model, again, 2)
        del first, second, again  # all of them live until here


def brings_no_reducer_back() -> None:
    """DDP's own is there again when the last optimizer was closed, and only then."""
    inner = nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))
    model = DistributedDataParallel(inner)
    first, second = halves(model, inner, 2)
    plain(model, 0)
    first.step()
    second.step()
    first.close()
    assert isinstance(model.reducer, RetiredReducer)
    third = ShardedSGD(inner[0].parameters(), **RATES, module=model, stage=2, tuning=small())
    for step in (1, 2):
        third.zero_grad()
        second.zero_grad()
        plain(model, step)
        if step == 1:
            del first  # its finalizer must not close a second time
            gc.collect()
        assert isinstance(model.reducer, RetiredReducer)
        third.step()
        second.step()
    second.close()
    third.close()
    assert not isinstance(model.reducer, RetiredReducer)
    third.close()
    inner.zero_grad()
    plain(model, 3)
    assert torch.distributed.get_world_size() == 2 and inner[0].weight.grad is not None
    means = [torch.empty(W, W) for _ in range(2)]
    torch.distributed.all_gather(means, inner[0].weight.grad)
    assert torch.equal(*means)  # DDP reduces


def keeps_no_sums() -> None:
    """Closed, and alive: what gradients were reduced in is freed, and their sums."""
    cases: list[tuple[int, torch.dtype | None]] = [(1, None), (2, None), (3, None), (3, torch.bfloat16)]
    for stage, dtype in cases:
        model = nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))
        optimizer = ShardedSGD(model, **RATES, stage=stage, compute_dtype=dtype, tuning=small())
        train_step(model, optimizer, 0)
        domain = optimizer.engine.domain
        assert domain is not None
        kept = [weakref.ref(each) for each in (domain.reducer, *(shard.gradient_sum for shard in domain.shards))]
        del domain
        optimizer.close()
        gc.collect()
        assert not any(each() for each in kept), (stage, dtype)


def test_closed(ranks: Pool) -> None:
    ranks.run(keeps_no_sums, world=2)
    ranks.run(covers_no_more, world=2)
    ranks.run(brings_no_reducer_back, world=2)
