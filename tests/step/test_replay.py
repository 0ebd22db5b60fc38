"""A step is replayed while nothing that it was planned of changes: it is the step that would be planned anew, and costs
few calls; each change is seen, in the second, third and later steps as well."""

import cProfile
import pstats
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from shardopt import ShardedAdamW, ShardedNAdam, ShardoptError
from shardopt.step.frozen_step import FrozenStep
from tests.support.cases import fill_gradients
from tests.support.replayed import compared
from tests.support.training import raises

CALLS = 1  # of Python's and of C's functions, for each param alone
FEW, MANY = 100, 400


@pytest.fixture(autouse=True)
def _compared() -> Iterator[None]:
    with compared():
        yield


def calls_of_a_step(count: int) -> int:
    params = [Parameter(torch.ones(64)) for _ in range(count)]
    opt = ShardedAdamW(params, lr=0.1)
    fill_gradients(params, "integers", 0)
    for _ in range(3):
        opt.step()
    with cProfile.Profile() as profile:
        opt.step()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_a_replayed_step_makes_few_calls_for_each_param() -> None:
    with compared(False):
        assert calls_of_a_step(MANY) - calls_of_a_step(FEW) < CALLS * (MANY - FEW)


Changes = Callable[[list[Parameter], Any], None]


def written(params: list[Parameter], opt: Any) -> None:
    with torch.no_grad():
        params[0].mul_(2)


def without_a_gradient(params: list[Parameter], opt: Any) -> None:
    params[1].grad = None


def a_transposed_gradient(params: list[Parameter], opt: Any) -> None:
    params[0].grad = params[0].grad.t().contiguous().t()  # type: ignore[union-attr]


def frozen(params: list[Parameter], opt: Any) -> None:
    params[2].requires_grad_(not params[2].requires_grad)


def another_rate(params: list[Parameter], opt: Any) -> None:
    opt.param_groups[0]["lr"] *= 0.5


def another_variant(params: list[Parameter], opt: Any) -> None:
    for group in opt.param_groups:
        group["decoupled_weight_decay"] = True
        group["weight_decay"] = 0.1


def loaded(params: list[Parameter], opt: Any) -> None:
    state = opt.state_dict()
    for each in state["state"].values():
        each["step"] = each["step"] + 3
    opt.load_state_dict(state)


def one_state_forgotten(params: list[Parameter], opt: Any) -> None:
    opt.state[params[1]] = {name: value * 1 for name, value in opt.state[params[0]].items() if value.ndim == 0} | {
        name: torch.zeros_like(params[1]) for name in ("exp_avg", "exp_avg_sq")
    }


# What is done before a step, and whether that step is planned anew.
CHANGES: dict[str, tuple[Changes, bool]] = {
    "written": (written, True),
    "without a gradient": (without_a_gradient, True),
    "a transposed gradient": (a_transposed_gradient, True),
    "frozen": (frozen, True),
    "another rate": (another_rate, False),
    "another variant": (another_variant, True),
    "loaded": (loaded, True),
    "one state assigned": (one_state_forgotten, True),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("at", [2, 3, 7])
def test_each_change_is_seen(name: str, at: int) -> None:
    change, is_planned = CHANGES[name]
    torch.manual_seed(0)
    values = [torch.randn(5, 7), torch.randn(300), torch.randn(3)]
    ours, theirs = ([Parameter(value.clone()) for value in values] for _ in range(2))
    opt, usual = ShardedNAdam(ours, lr=0.1), torch.optim.NAdam(theirs, lr=0.1)
    plan, planned = FrozenStep.__init__, []

    def count(self: FrozenStep, *arguments: Any) -> None:
        planned.append(step)
        plan(self, *arguments)

    for step in range(10):
        fill_gradients(ours, "integers", step)
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad.clone()  # type: ignore[union-attr]
        if step == at:
            change(ours, opt)
            change(theirs, usual)
        with patch.object(FrozenStep, "__init__", count), compared(step != at):
            opt.step()
        usual.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, msg=f"step {step}")
    assert (at in planned) == is_planned


def test_a_step_of_sums_is_replayed() -> None:
    """The module is handed over: gradients are parts, shown anew or kept; the loss may be scaled or clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = ShardedAdamW(model, lr=0.1, stage=2)
    holds, found = FrozenStep.holds, []

    def noted(self: FrozenStep, *arguments: Any) -> bool:
        found.append(holds(self, *arguments))
        return found[-1]

    with patch.object(FrozenStep, "holds", noted):
        for step in range(6):
            model(torch.ones(2, 8)).square().sum().backward()
            if step == 4:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
    opt.close()
    assert found.count(True) >= 4


def test_params_of_one_shape_that_changed_groups() -> None:
    ours, theirs = ([Parameter(torch.ones(8)), Parameter(torch.ones(8))] for _ in range(2))
    opt, usual = (
        kind([{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.01}])
        for kind, params in ((ShardedNAdam, ours), (torch.optim.NAdam, theirs))
    )
    for step in range(6):
        fill_gradients(ours, "integers", step)
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad.clone()  # type: ignore[union-attr]
        if step == 3:
            for optimizer in (opt, usual):
                one, two = optimizer.param_groups
                one["params"], two["params"] = two["params"], one["params"]
        opt.step()
        usual.step()
        torch.testing.assert_close(ours, theirs)


def test_a_part_of_an_earlier_backward_is_refused() -> None:
    model = nn.Linear(8, 8)
    opt = ShardedAdamW(model, lr=0.1, stage=2)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        kept = model.weight.grad
        opt.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    shown, model.weight.grad = model.weight.grad, kept
    with compared(False), raises(ShardoptError, "read param.grad again"):
        opt.step()
    model.weight.grad = shown
    opt.step()
    opt.close()
