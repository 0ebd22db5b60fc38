"""What a step looks up once for all steps: it costs little for each param, and whatever changes in between is seen."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shardopt import BindingError, ShardedSGD
from tests.support.cases import fill_gradients
from tests.support.training import raises

PARAMS = 500
CALLS = 450  # of Python's and of C's functions in a step, however many params there are


def test_calls_of_a_step_of_many_params() -> None:
    params = [Parameter(torch.ones(64)) for _ in range(PARAMS)]
    opt = ShardedSGD(params, lr=0.1, momentum=0.9)
    fill_gradients(params, "integers", 0)
    for _ in range(2):
        opt.step()
    with cProfile.Profile() as profile:
        opt.step()
    assert 0 < pstats.Stats(profile).total_calls < CALLS  # type: ignore[attr-defined]


def stepped() -> tuple[list[Parameter], ShardedSGD, list[Parameter], torch.optim.SGD]:
    """Params of shardopt and of torch that took three steps."""
    torch.manual_seed(0)
    values = [torch.randn(6, 6), torch.randn(300), torch.randn(4, 2)]
    ours, theirs = ([Parameter(value.clone()) for value in values] for _ in range(2))
    opt, usual = ShardedSGD(ours, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(3):
        step(ours, opt, theirs, usual)
    return ours, opt, theirs, usual


def step(ours: list[Parameter], opt: ShardedSGD, theirs: list[Parameter], usual: torch.optim.SGD) -> None:
    fill_gradients(ours, "integers", 0)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    opt.step()
    usual.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda data: data.view(torch.float16),
    "another shape": lambda data: data.view(-1),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_param_that_was_moved_after_some_steps(how: str) -> None:
    ours, opt, theirs, usual = stepped()
    before = ours[0].data
    ours[0].grad = None
    ours[0].data = MOVES[how](before)
    with raises(BindingError, "param 0 of group 0", "was moved, recast or given other storage"):
        opt.step()
    ours[0].data = before
    step(ours, opt, theirs, usual)


@pytest.mark.parametrize("how", ["other memory", "other strides"])
def test_a_tensor_of_its_own_kind_is_taken_as_its_values(how: str) -> None:
    """What ``param.data = tensor`` means to torch: the next step goes on from these values, and so do later ones."""
    ours, opt, theirs, usual = stepped()
    for params in (ours, theirs):
        values = params[0].data + 1
        params[0].data = values if how == "other memory" else values.t()
    for _ in range(2):
        step(ours, opt, theirs, usual)


def test_params_that_moved_between_groups() -> None:
    ours, opt, theirs, usual = stepped()
    for optimizer in (opt, usual):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))], "lr": 0.01})
        groups = optimizer.param_groups
        groups[1]["params"].append(groups[0]["params"].pop(0))
        groups[0]["params"].reverse()
    step(ours, opt, theirs, usual)
    for optimizer in (opt, usual):
        groups = optimizer.param_groups
        groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    step(ours, opt, theirs, usual)
    opt.param_groups[0]["params"].append(ours[1])
    with raises(BindingError, "it is listed twice"):
        opt.step()
    opt.param_groups[0]["params"].pop()
    step(ours, opt, theirs, usual)
    opt.close()
    step(ours, opt := ShardedSGD(ours, lr=0.1), theirs, torch.optim.SGD(theirs, lr=0.1))
    opt.close()


def test_gradients_of_another_kind() -> None:
    """In another order in memory, of some params only, and of none."""
    ours, opt, theirs, usual = stepped()
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = other.grad = None
    ours[0].grad = torch.randn(6, 6).t()
    theirs[0].grad = ours[0].grad.clone()
    opt.step()
    usual.step()
    torch.testing.assert_close(ours, theirs)
    ours[0].grad = None
    opt.step()
    torch.testing.assert_close(ours, theirs)
    ours[0].grad = torch.randn(6, 6).to_sparse()
    with raises(Exception, "sparse"):
        opt.step()
    step(ours, opt, theirs, usual)
