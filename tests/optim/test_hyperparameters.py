"""Hyper-parameters that no update can use: refused when they are given, and by every rank's step, before a bit changes.

What is a number is taken as one, whoever made it: Python, NumPy or a tensor.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

import shardopt
from shardopt import (
    ShardedAdamW,
    ShardedLion,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    Tuning,
)
from tests.optim.test_public import TORCH_CLASSES
from tests.support.ranks import Pool
from tests.support.training import Net, digest, loss_of, raises

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ShardedAdamW, {"lr": NAN}),
        (ShardedAdamW, {"lr": INF}),
        (ShardedAdamW, {"lr": 1e39}),
        (ShardedAdamW, {"lr": -1}),
        (ShardedAdamW, {"lr": 10**400}),
        (ShardedAdamW, {"eps": INF}),
        (ShardedAdamW, {"weight_decay": INF}),
        (ShardedAdamW, {"betas": (0.9, NAN)}),
        (ShardedAdamW, {"betas": (2, 2)}),
        (ShardedSGD, {"momentum": NAN}),
        (ShardedSGD, {"momentum": INF}),
        (ShardedSGD, {"dampening": NAN}),
        (ShardedLion, {"lr": INF}),
        (ShardedLion, {"lr": torch.ones(2)}),
        (ShardedLion, {"betas": (0.9, NAN)}),
        (ShardedLion, {"betas": (1.0, 0.99)}),
        (ShardedLion, {"betas": (0.9, 1.0)}),
        (shardopt.ShardedLAMB, {"betas": (0.9, 1.0)}),
        (shardopt.ShardedASGD, {"lambd": NAN}),
        (shardopt.ShardedRprop, {"step_sizes": (1e-6, NAN)}),
    ],
    ids=str,
)
def test_what_is_not_finite_is_refused_at_once(kind: Any, arguments: dict[str, Any]) -> None:
    """As an argument, and as a param group's own value; no NumPy warning of a cast comes in its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"Invalid|finite|must be a number|must be 1-element"):
            kind([torch.zeros(3)], **arguments)
        with pytest.raises(ValueError, match=r"Invalid|finite|must be a number|must be 1-element"):
            kind([{"params": [torch.zeros(3)], **arguments}])
        opt = kind([torch.zeros(3)])
        with pytest.raises(ValueError, match=r"Invalid|finite|must be a number|must be 1-element"):
            opt.add_param_group({"params": [torch.zeros(3)], **arguments})
        assert len(opt.param_groups) == 1


@pytest.mark.parametrize("value", [None, "1e-3", True, [1e-3], print], ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    for given in ({"lr": value}, {"betas": (value, 0.9)}, {"betas": value}, {"amsgrad": "no"}, {"fused": "no"}):
        name = next(iter(given))
        with pytest.raises(TypeError, match=rf"^{name}.* found"):
            ShardedAdamW([torch.zeros(3)], **given)
        with pytest.raises(TypeError, match=rf"^{name}.* found"):
            ShardedAdamW([{"params": [torch.zeros(3)], **given}])


def test_numbers_of_others_are_numbers() -> None:
    """Of NumPy they become Python's, which files hold; a tensor stays where torch takes one."""
    rate = torch.tensor(1e-3)
    opt = ShardedAdamW([Parameter(torch.ones(3))], lr=rate, eps=np.float64(1e-7), weight_decay=torch.tensor(0.5))
    (group,) = opt.param_groups
    assert group["lr"] is rate and group["eps"] == 1e-7 and type(group["eps"]) is float
    assert group["weight_decay"] == 0.5 and type(group["weight_decay"]) is float
    opt = ShardedAdamW([Parameter(torch.ones(3))], lr=np.float32(0.25), betas=[np.float64(0.5), 0.75], amsgrad=np.True_)
    (group,) = opt.param_groups
    assert (group["lr"], group["betas"], group["amsgrad"]) == (0.25, (0.5, 0.75), True)
    assert [type(each) for each in (group["lr"], group["betas"][0], group["amsgrad"])] == [float, float, bool]


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_refusals_have_torchs_words(name: str) -> None:
    torch_class, ours = getattr(torch.optim, name), getattr(shardopt, f"Sharded{name}")
    for arguments in ({"lr": -1.0}, {"lr": NAN}, {"weight_decay": -1.0}):
        with pytest.raises((ValueError, TypeError)) as theirs:
            torch_class([torch.zeros(3)], **arguments)
            raise TypeError("torch's SGD takes NaN")
        if isinstance(theirs.value, TypeError):  # or there is no such argument
            continue
        for given in (
            {**arguments, "params": [torch.zeros(3)]},
            {"params": [{"params": [torch.zeros(3)], **arguments}]},
        ):
            with pytest.raises(ValueError) as found:
                ours(**given)
            assert str(found.value) == str(theirs.value)


def test_a_rule_of_ones_own() -> None:
    """Its scalars count, and not its hyper-parameters, of which some may be set later."""
    rule = ShardedAdamW([torch.zeros(3)]).rule
    values = dict(ShardedAdamW([torch.zeros(3)]).defaults)
    with pytest.raises(ValueError, match=r"finite.*decay=-inf"):
        ShardedOptimizer([torch.zeros(3)], {**values, "lr": INF}, rule=rule)
    param = Parameter(torch.ones(3))
    opt = ShardedOptimizer([param], {**values, "lr": None, "note": INF}, rule=rule)
    param.grad = torch.ones(3)
    with pytest.raises(ShardoptError, match=r"finite.*cannot be computed"):
        opt.step()
    opt.param_groups[0]["lr"] = 1e-3
    opt.step()
    assert bool(param.isfinite().all()) and bool((param < 1).all())


def a_rate_of_nan(stage: int | None, releases: bool) -> None:
    """Of one rank, then of all: nothing has changed on any, and the training goes on with a rate that is a number."""
    model = Net()
    if stage is None:
        opt = ShardedAdamW(model.parameters())
    else:
        tuning = Tuning(keep_below=0)  # or stage 3 keeps these small params whole, as stage 2 does
        opt = ShardedAdamW(model, stage=stage, release_gradients=releases, tuning=tuning)

    def train() -> None:
        opt.zero_grad()
        loss_of(model, 0).backward()
        if stage is None:
            for param in model.parameters():
                dist.all_reduce(param.grad)
        opt.step()

    train()
    assert bool(opt.units) == (stage == 3)
    for key, value in (("lr", NAN), ("weight_decay", INF), ("eps", 1e39), ("betas", (2, 2)), ("lr", None)):
        for everywhere in (True,) if releases else (True, False):  # there it is an error in one rank's backward
            before = digest(opt)
            (group,) = opt.param_groups
            kept = group[key]
            if everywhere or dist.get_rank() == 0:
                group[key] = value
            words = ("finite hyper-parameters", "nothing changed")
            if not (everywhere or dist.get_rank() == 0):
                words = ("rank 0 cannot take this step, so no rank does", *words)
            with raises(ShardoptError, *words):
                train()
            group[key] = kept
            if releases and dist.is_initialized():
                dist.barrier()  # a backward was given up: ranks begin again together
            assert digest(opt) == before and opt.updates == 1, (key, value)
    train()
    assert opt.updates == 2 and digest(opt) != before
    with opt.unsharded():
        assert all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_a_rate_of_nan_is_refused_on_all_ranks(world: int, ranks: Pool) -> None:
    ranks.run(a_rate_of_nan, None, False, world=world)
    ranks.run(a_rate_of_nan, 2, False, world=world)
    ranks.run(a_rate_of_nan, 3, False, world=world)
    ranks.run(a_rate_of_nan, 1, True, world=world)
