"""``get_state_dict`` and ``set_state_dict`` of torch, with the module handed over: at any moment, through a checkpoint.

Where torch finds no state it assigns gradients of zeros and takes a step at a learning rate of zero.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardopt
from shardopt import DisagreementError, ShardoptError, Tuning
from tests.support.ranks import Pool
from tests.support.training import raises, raw

MAKE = {
    "AdamW": (shardopt.ShardedAdamW, {"lr": 0.01, "weight_decay": 0.5}),
    "SGD": (shardopt.ShardedSGD, {"lr": 0.1, "weight_decay": 0.5}),
    "momentum": (shardopt.ShardedSGD, {"lr": 0.1, "momentum": 0.9}),
    "NAdam": (shardopt.ShardedNAdam, {"lr": 0.01}),
}


def made(name: str, stage: int, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 3))
    kind, keywords = MAKE[name]
    return model, kind(model, stage=stage, tuning=Tuning(keep_below=100, bucket_bytes=2000), **keywords)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 20), 0.1 * (step + dist.get_rank()))).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module, optimizer: Any) -> list[bytes]:
    with optimizer.unsharded():
        return [raw(param) for param in model.parameters()]


def goes_and_comes(folder: str, stage: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    for name in MAKE:
        for steps, prepared in ((0, False), (0, True), (2, False)):
            if prepared and name == "NAdam":
                continue  # refused: only a step can begin its product of momenta
            model, optimizer = made(name, stage, 0)
            train(model, optimizer, steps)
            if prepared:
                shardopt.prepare_states(optimizer)
            before = weights(model, optimizer)
            of_model, of_optimizer = get_state_dict(model, optimizer)
            assert weights(model, optimizer) == before, (name, steps)
            path = f"{folder}/{stage}-{name}-{steps}-{prepared}"
            dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
            other, fresh = made(name, stage, 1)
            into_model, into_optimizer = get_state_dict(other, fresh)
            dcp.load({"model": into_model, "optim": into_optimizer}, checkpoint_id=path)
            set_state_dict(other, fresh, model_state_dict=into_model, optim_state_dict=into_optimizer)
            for each, its in ((model, optimizer), (other, fresh)):
                assert all(param.grad is None for param in each.parameters()), (name, steps)
                assert its.param_groups[0]["lr"] == MAKE[name][1]["lr"]
                train(each, its, 1)
            assert weights(model, optimizer) == weights(other, fresh), (name, steps, prepared)
            optimizer.close()
            fresh.close()


def test_goes_and_comes(ranks: Pool, tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        ranks.run(goes_and_comes, str(tmp_path), stage, world=2)


def zeros_are_the_mean_on_all_ranks_only() -> None:
    model, optimizer = made("AdamW", 2, 0)
    train(model, optimizer, 1)
    before, rank = weights(model, optimizer), dist.get_rank()

    def assign(value: float) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, value)

    assign(float(rank))  # zeros on rank 0, a gradient of its own on rank 1
    with raises(ShardoptError, "assigned by hand"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 20)).sum().backward()
    if rank == 0:
        assign(0.0)
    with raises(DisagreementError, "in place of gradients", "rank 0"):
        optimizer.step()
    assert weights(model, optimizer) == before
    assign(0.0)
    optimizer.step()  # decays, as a mean of zeros does
    assert weights(model, optimizer) != before
    optimizer.close()


def test_zeros_are_the_mean_on_all_ranks_only(ranks: Pool) -> None:
    ranks.run(zeros_are_the_mean_on_all_ranks_only, world=2)
