"""State dicts have the entries of the torch class, key for key, at every moment, and each class goes on from either's.

Before a first step, after steps in which params had no gradient, after params were frozen, trained again or added.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardopt import Part, ShardedAdagrad, prepare_states
from tests.states.test_one_rank_alone import saved
from tests.support.cases import CASES, Case
from tests.support.ranks import Pool

# The params that have a gradient, step by step; param 3 is frozen in the first two, param 4 never trained.
STEPS: tuple[tuple[int, ...], ...] = ((), (0,), (0, 2), (1, 2), (3,), (0, 1, 2, 3))
SHAPES = ((40, 17), (300,), (3, 5), (20, 30), (7,))


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        Parameter(torch.randn(shape, generator=generator).to(dtype), index != 4) for index, shape in enumerate(SHAPES)
    ]


def take(optimizer: Any, params: list[Parameter], number: int) -> None:
    for index, param in enumerate(params):
        param.requires_grad_(index < 3 or (index == 3 and number > 2))
        param.grad = torch.full_like(param, 0.25 * (number + 1)) if index in STEPS[number] else None
    optimizer.step()


def consolidated(optimizer: Any) -> dict[str, Any]:
    """On every rank."""
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def same_entries(mine: dict[str, Any], theirs: dict[str, Any], what: Any) -> None:
    theirs = {number: state for number, state in theirs["state"].items() if state}
    assert sorted(mine["state"]) == sorted(theirs), what
    for number, state in theirs.items():
        assert set(mine["state"][number]) == set(state), (what, number)
        for name, value in state.items():
            own = mine["state"][number][name]
            assert isinstance(own, Tensor) and own.shape == value.shape, (what, number, name)
            if not isinstance(own, Part):
                torch.testing.assert_close(own.float(), value.float(), rtol=1e-5, atol=1e-6)


def fit_beside_torch(case: Case, of: Callable[[Any], dict[str, Any]], **options: Any) -> None:
    keywords: dict[str, Any] = case.keywords[-1]
    make, reference = case.ours, case.reference
    ours, theirs = params_of(), params_of()
    opt, torch_opt = make(ours, **keywords, **options), reference(theirs, **keywords)
    for number in range(len(STEPS)):
        same_entries(opt.state_dict(), torch_opt.state_dict(), (case, number))
        mine = of(opt)
        same_entries(mine, torch_opt.state_dict(), (case, number))
        # The torch class goes on from ours, ours from the torch class.
        there, here = copy.deepcopy(theirs), copy.deepcopy(theirs)
        go_on, come_back = reference(there, **keywords), make(here, **keywords, **options)
        go_on.load_state_dict(copy.deepcopy(mine))
        come_back.load_state_dict(copy.deepcopy(torch_opt.state_dict()))
        for each, params in ((opt, ours), (torch_opt, theirs), (go_on, there), (come_back, here)):
            take(each, params, number)
        for params in (ours, there, here):
            torch.testing.assert_close(params, theirs, rtol=1e-5, atol=1e-5)
        same_entries(of(come_back), torch_opt.state_dict(), (case, number))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_entries_on_one_rank(case: Case) -> None:
    fit_beside_torch(case, lambda opt: saved(opt.state_dict()))


def entries_on_ranks() -> None:
    for case in CASES:
        if case.name in ("Adagrad", "SGD", "ASGD"):
            fit_beside_torch(case, consolidated)


def adagrad_begins(folder: str) -> None:
    """Whatever takes a param back to before its first step gives it the state of before its first step."""
    import shardopt

    def check(opt: Any, index: int, what: str) -> None:
        state = saved(opt.state_dict())["state"][index] if dist.get_rank() == 0 else None
        if state is not None:
            assert (
                float(state["step"]) == 0 and bool((state["sum"] == 0.5).all()) and state["sum"].shape == SHAPES[index]
            ), what
        dist.barrier()

    for options in ({}, {"offload": folder + "/disk"}):
        params = params_of()
        module = torch.nn.ParameterList(params)
        opt = ShardedAdagrad(params, initial_accumulator_value=0.5, **options)
        before = copy.deepcopy(opt.state_dict())
        prepare_states(opt)
        for index in range(5):
            check(opt, index, "bound")
        shardopt.save_checkpoint(folder + f"/{len(options)}", module, opt)
        take(opt, params, 5)
        opt.state[params[0]] = {}
        check(opt, 0, "assigned")
        opt.load_state_dict({**before, "state": {1: before["state"][1]}})
        for index in (1, 2, 3, 4):
            check(opt, index, "loaded")
        take(opt, params, 5)
        opt.state = {}  # type: ignore[assignment]
        check(opt, 2, "forgotten")
        take(opt, params, 5)
        shardopt.load_checkpoint(folder + f"/{len(options)}", module, opt)
        check(opt, 3, "from a checkpoint")
        opt.add_param_group({"params": [Parameter(torch.ones(9))], "initial_accumulator_value": 0.5})
        assert float(opt.state_dict()["state"][5]["sum"][8]) == 0.5
        opt.close()


def test_entries_on_ranks(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(entries_on_ranks, world=2)
    ranks.run(adagrad_begins, str(tmp_path), world=2)
