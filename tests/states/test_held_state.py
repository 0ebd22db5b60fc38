"""Assignments to ``opt.state[param]`` reach the record, and a state can be forgotten."""

import copy
import pickle
from typing import Any

import pytest
import torch

from shardopt import ShardedAdamW, StateError, Tuning


def _stepped(**options: Any) -> tuple[torch.nn.Parameter, ShardedAdamW]:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(8192))
    opt = ShardedAdamW([param], lr=0.1, **options)
    param.grad = torch.randn(8192)
    opt.step()
    return param, opt


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": "cpu"}, {"state_format": "bf16", "tuning": Tuning(compress_from=1)}],
    ids=["device", "host", "bf16"],
)
def test_an_assignment_reaches_the_record(options: dict[str, Any]) -> None:
    param, opt = _stepped(**options)
    held = opt.state[param]
    param.grad = torch.ones(8192)
    opt.step()
    held["exp_avg"] = torch.ones(8192)
    assert opt.state[param]["exp_avg"].eq(1).all() and held["exp_avg"].eq(1).all()
    assert opt.state[param]["step"] == 2  # the count of now, not of the read
    held["step"] = torch.tensor(7.0)
    assert opt.state_dict()["state"][0]["step"] == 7
    with pytest.raises(StateError):
        del held["exp_avg"]
    with pytest.raises(StateError, match="shape"):
        opt.state[param] = {**held, "exp_avg": torch.ones(3)}
    assert opt.state[param]["exp_avg"].eq(1).all()


def test_a_state_is_forgotten_and_what_was_read_is_the_callers() -> None:
    param, opt = _stepped()
    held, before = opt.state[param], opt.state[param]["exp_avg"].clone()
    assert type(copy.copy(held)) is type(copy.deepcopy(held)) is type(pickle.loads(pickle.dumps(held))) is dict
    del opt.state[param]
    assert param not in opt.state and torch.equal(held["exp_avg"], before)
    del opt.state[param]  # torch's has an empty one of each param that was looked up
    held["exp_avg"] = held["exp_avg"][:4096]
    held["exp_avg_sq"] = held["exp_avg_sq"][:4096]
    new = torch.nn.Parameter(param.detach()[:4096].clone())
    opt.param_groups[0]["params"] = [new]
    opt.state[new] = held
    assert torch.equal(opt.state[new]["exp_avg"], before[:4096])
    del opt.state[param]  # it has left its group
    new.grad = torch.ones(4096)
    opt.step()
    popped = opt.state.pop(new)
    assert popped["step"] == 2 and new not in opt.state and opt.state.pop(new, None) is None
