"""``shardopt.verify``: agrees where all is well, and names the first tensor that differs where a rule is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardopt
from shardopt import ShardedOptimizer, rule, verify
from tests.support.ranks import Pool
from tests.support.training import Net, batch


@rule(states=("momentum",), scalars=lambda group, step, carried: {"lr": group["lr"], "beta": group["momentum"]})
def wrong(param, grad, state, s):  # type: ignore[no-untyped-def]
    """SGD's momentum, damped where it should not be."""
    state.momentum = s.beta * state.momentum + (1 - s.beta) * grad
    return param - s.lr * state.momentum


SMALL = shardopt.Tuning(keep_below=0)  # or stage 3 keeps the params of Net whole, as stage 2 does


def make_wrong(module: nn.Module, stage: int, tuning: shardopt.Tuning, **arguments: Any) -> ShardedOptimizer:
    opt = ShardedOptimizer(module, arguments, rule=wrong, stage=stage, tuning=tuning)
    opt.bind()
    assert bool(opt.units) == (stage == 3)
    return opt


def loss(module: nn.Module, sample: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(module(sample[0]).flatten(0, 1), sample[1].flatten())


def verdicts() -> None:
    batches = [batch(step) for step in range(5)]
    ways = [{"tuning": SMALL}]
    verdict = verify(Net, batches, steps=12, loss=loss, ways=ways, lr=0.01, weight_decay=0.1)
    assert verdict.agrees and [each.stage for each in verdict.differences] == [0, 1, 2, 3], str(verdict)
    assert all(each.largest < 1e-3 for each in verdict.differences) and "agrees" in str(verdict)
    verdict = verify(Net, batches, 12, loss=loss, optimizer=shardopt.ShardedSGD, lr=0.1, momentum=0.9, stages=(2,))
    assert verdict.agrees and len(verdict.differences) == 1
    given: dict[str, Any] = {"optimizer": make_wrong, "reference": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    found = verify(Net, batches, 4, loss=loss, ways=ways, **given)
    assert not found.agrees and [each.stage for each in found.differences] == [0, 1, 2, 3]
    for each in found.differences:
        assert (each.step, each.name) == (1, "embed.weight") and each.found == pytest.approx(0.9, rel=0.01)
    assert "DIFFERS from step 1 on, first in embed.weight" in str(found)
    assert dist.is_initialized()


def verdicts_of_ways(directory: str) -> None:
    batches = [batch(step) for step in range(5)]
    tuning = shardopt.Tuning(compress_from=256, keep_below=0)
    ways = [{"offload": directory, "tuning": SMALL}, {"state_format": "int8", "tuning": tuning}]
    verdict = verify(Net, batches, 8, loss=loss, stages=(1, 3), ways=ways, lr=0.01)
    moved, coarse = verdict.differences[:2], verdict.differences[2:]
    assert verdict.agrees and all(each.step is None and not each.is_expected for each in moved), str(verdict)
    assert f"stage 1, offload={directory!r}, tuning={SMALL!r}: agrees" in str(verdict)
    for each in coarse:
        assert each.is_expected and each.step is not None and 1e-3 < each.largest < 0.5 and 0 < abs(each.loss) < 0.01
    assert "of the way from torch's params, and " in str(verdict) and "% from its loss" in str(verdict)
    assert len({(each.largest, each.loss) for each in coarse}) == 1  # a format is that of the param, not of the shard
    wrong = verify(Net, batches, 3, loss=loss, stages=(2,), ways=[{"max_grad_norm": 1e-3}], lr=0.01)
    assert not wrong.agrees and "stage 2, max_grad_norm=0.001: DIFFERS from step 1 on" in str(wrong)


def low() -> None:
    verdict = verify(
        lambda: Net().bfloat16(), [batch(0)], 5, loss=loss, stages=(2,), ways=[{"master": "split"}], lr=0.1
    )
    assert verdict.agrees and verdict.differences[0].is_expected, str(verdict)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square().sum()


def test_verdicts(ranks: Pool) -> None:
    ranks.run(verdicts, world=2)


def test_ways(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(verdicts_of_ways, str(tmp_path), world=2)
    low()


def test_alone() -> None:
    assert verify(Scalar, [torch.linspace(0, 1, 300)], steps=3).agrees
    with pytest.raises(ValueError, match="at least one batch"):
        verify(Scalar, [])
    with pytest.raises(ValueError, match="reference="):
        verify(Scalar, [torch.ones(300)], optimizer=shardopt.ShardedLion)


@pytest.mark.parametrize(
    "given",
    [
        {"build": nn.Linear(2, 2)},
        {"build": 7},
        {"build": lambda: 7},
        {"batches": 7},
        {"batches": []},
        {"steps": 0},
        {"steps": 1.5},
        {"optimizer": "AdamW"},
        {"optimizer": torch.optim.AdamW},
        {"optimizer": lambda module, **arguments: torch.optim.AdamW(module.parameters())},
        {"reference": "AdamW"},
        {"reference": lambda params, **arguments: params},
        {"loss": "mse"},
        {"loss": lambda module, batch: None},
        {"loss": lambda module, batch: 1.0},
        {"loss": lambda module, batch: loss(module, batch).detach()},
        {"loss": lambda module, batch: loss(module, batch).expand(2)},
        {"keywords": 7},
        {"stages": ()},
        {"stages": 2},
        {"stages": (4,)},
        {"ways": ()},
        {"ways": {"offload": "cpu"}},
        {"ways": ["cpu"]},
        {"tolerance": float("nan")},
        {"tolerance": -1},
        {"tolerance": "1e-3"},
    ],
    ids=lambda given: ", ".join(given),
)
def test_what_cannot_be_compared_is_refused(given: dict[str, Any]) -> None:
    """By name: an empty comparison would agree."""
    keywords: dict[str, Any] = {"build": Net, "batches": [batch(0)], "loss": loss, "steps": 2, **given}
    with pytest.raises((TypeError, ValueError), match=next(iter(given)).rstrip("es")):
        verify(**keywords)


def test_a_model_that_is_not_new_is_refused() -> None:
    same = Net()
    with pytest.raises(ValueError, match=r"same module twice.*Make a new, equally seeded model"):
        verify(lambda: same, [batch(0)], 2, loss=loss)
    seeds = iter(range(100))
    with pytest.raises(ValueError, match=r"gave embed.weight other values than its first call.*manual_seed\(0\)"):
        verify(lambda: Net(next(seeds)), [batch(0)], 2, loss=loss)


class Parted(nn.Module):
    """With a param of no elements, which no training moves."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.none, self.some = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(rows, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.some @ x).square().sum() + self.none.sum()


def test_params_of_no_elements_agree_and_other_shapes_are_other_models() -> None:
    verdict = verify(Parted, [torch.ones(4)], 2, stages=(1,))
    assert verdict.agrees and verdict.differences[0].largest < 1e-3
    rows = iter(range(3, 9))
    with pytest.raises(ValueError, match="gave some other values than its first call"):
        verify(lambda: Parted(next(rows)), [torch.ones(4)], 2)
