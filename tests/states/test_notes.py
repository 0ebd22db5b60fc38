"""A script's own entries beside the states of params, and states that are given past ``load_state_dict()``."""

import copy
import io
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from shardopt import Part, ShardedAdamW, ShardedSGD, StateError, save_checkpoint
from tests.support.ranks import Pool
from tests.support.training import raises

SHAPE = (40, 33)


def made(kind: Any, **options: Any) -> tuple[list[Parameter], Any]:
    generator = torch.Generator().manual_seed(1)
    params = [Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(2)]
    return params, kind(params, lr=0.05, **options)


def step(params: list[Parameter], opt: Any, number: int = 0) -> None:
    for param in params:
        param.grad = torch.linspace(-1, 1 + number, param.numel()).view(SHAPE)
    opt.step()


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, Part) else value.detach().clone()


def saved(found: dict[str, Any]) -> dict[str, Any]:
    box = io.BytesIO()
    torch.save(found, box)
    box.seek(0)
    return torch.load(box)  # type: ignore[no-any-return]


# -- notes -------------------------------------------------------------------------------------------------------------


def slow_weights(kind: Any, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """As published Lookaheads keep them: beside the states, reset with them."""
    params, opt = made(kind, **options)
    for number in range(6):
        step(params, opt, number)
        for param in params:
            state = opt.state[param]
            if "slow" not in state:
                state["slow"] = torch.empty_like(param.data).copy_(param.data)
                state["rounds"] = 0
            if number % 2:
                with torch.no_grad():
                    state["slow"].add_(param.data - state["slow"], alpha=0.5)
                    param.copy_(state["slow"])
                state["rounds"] += 1
                for name in ("exp_avg", "momentum_buffer"):
                    if name in state:
                        state[name] = torch.zeros_like(param.data)
    found = opt.state_dict()
    assert all(each["rounds"] == 3 for each in found["state"].values())
    return [each.detach() for each in params], found


def beside_torch() -> None:
    for ours, theirs, options in (
        (ShardedAdamW, torch.optim.AdamW, {}),
        (ShardedSGD, torch.optim.SGD, {"momentum": 0.9}),
        (ShardedSGD, torch.optim.SGD, {}),
    ):
        own, found = slow_weights(ours, **options)
        wanted, of_torch = slow_weights(theirs, **options)
        for one, other in zip(own, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for given in (found, saved(of_torch)) if dist.get_rank() == 0 and dist.get_world_size() == 1 else (of_torch,):
            params, opt = made(ours, **options)
            opt.load_state_dict(given)
            for param, slow in zip(params, wanted, strict=True):
                state = opt.state[param]
                torch.testing.assert_close(state["slow"], slow, rtol=1e-5, atol=1e-6)
                assert state["rounds"] == 3 and type(opt.state[param]["slow"]) is Tensor
            again = copy.deepcopy((params, opt))[1]
            assert list(again.state_dict()["state"][0]) == list(opt.state_dict()["state"][0])
            step(params, opt)
            assert opt.state[params[0]]["rounds"] == 3
            opt.close()


def test_notes_are_kept_as_torch_keeps_them(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(beside_torch, world=world)


def test_notes_before_the_first_step_and_their_end(tmp_path: Path) -> None:
    params, opt = made(ShardedAdamW)
    note = torch.ones(3)
    opt.state[params[0]]["old_p"] = note
    assert opt.state[params[0]]["old_p"] is note and params[0] in opt.state and list(opt.state) == params[:1]
    assert params[1] not in opt.state and opt.state_dict()["state"][0] == {"old_p": note}
    step(params, opt)
    assert list(opt.state[params[0]]) == ["step", "exp_avg", "exp_avg_sq", "old_p"]
    held = opt.state[params[0]]
    exp_avg = held["exp_avg"]
    held.update(old_p=2, other=3)
    assert exp_avg.sum().isfinite()  # a note ends nothing
    with pytest.warns(UserWarning, match=r"\['old_p', 'other'\] in extra="):
        save_checkpoint(tmp_path, nn.ParameterList(params), opt)
    del held["old_p"]
    assert held.pop("other") == 3 and "other" not in opt.state[params[0]] and "other" not in held
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path, nn.ParameterList(params), opt)
    opt.state[params[0]]["old_p"] = 1
    opt.state[params[0]] = {name: value for name, value in opt.state[params[0]].items() if name != "old_p"}
    assert "old_p" not in opt.state[params[0]]
    opt.state[params[0]]["old_p"] = 1
    del opt.state[params[0]]
    assert params[0] not in opt.state
    opt.state[params[1]]["old_p"] = 1
    opt.state = {}
    assert not list(opt.state)
    opt.load_state_dict({**opt.state_dict(), "state": {0: {"old_p": 5}}})
    assert opt.state[params[0]] == {"old_p": 5}
    step(params, opt)
    assert opt.state[params[0]]["step"] == 1


def test_names_of_states_are_no_notes() -> None:
    from shardopt.rules.state_names import STATE_NAMES

    for kind in ("AdamW", "NAdam", "ASGD", "Adagrad", "RAdam", "Adadelta", "Rprop", "RMSprop", "Adamax", "Adafactor"):
        param = Parameter(torch.ones(SHAPE))
        opt = getattr(torch.optim, kind)([param])
        param.grad = torch.ones(SHAPE)
        opt.step()
        assert set(opt.state[param]) <= STATE_NAMES, kind
    params, opt = made(ShardedSGD, momentum=0.9)
    step(params, opt)
    for name in STATE_NAMES - {"step", "momentum_buffer"}:
        before = opt.state_dict()["state"][0]["momentum_buffer"].clone()
        with raises(StateError, name):
            opt.state[params[0]][name] = torch.ones(SHAPE)
        assert torch.equal(opt.state[params[0]]["momentum_buffer"], before)


# -- __setstate__, __dict__, copies, defaults --------------------------------------------------------------------------


def given_past_the_load() -> None:
    for way in ("__setstate__", "__dict__", "assigned"):

        def give(opt: Any, state: Any, way: str = way) -> None:
            if way == "__setstate__":
                opt.__setstate__({"state": state})
            elif way == "assigned":
                opt.state = state
            else:
                opt.__dict__["state"] = state

        params, opt = made(ShardedAdamW)
        step(params, opt)
        ones = {"step": torch.tensor(7.0), "exp_avg": torch.ones(SHAPE), "exp_avg_sq": torch.ones(SHAPE), "mine": 3}
        give(opt, {params[0]: ones, "own": 4})
        assert list(opt.state) == [params[0], "own"] and "state" not in opt.__dict__
        assert opt.state_dict()["state"][0]["step"] == 7 and opt.state[params[0]]["mine"] == 3
        assert whole(opt.state[params[0]]["exp_avg"]).eq(1).all()
        give(opt, {params[0]: ones})
        step(params, opt)
        assert opt.state[params[0]]["step"] == 8 and opt.state[params[1]]["step"] == 1
        for wrong, word in (
            ({params[1]: ones, params[0]: {**ones, "exp_avg": torch.ones(2)}}, "shape"),
            ({params[1]: ones, Parameter(torch.ones(2)): ones}, "no group has"),
            ({params[1]: {**ones, "max_exp_avg_sq": ones["exp_avg"]}}, "max_exp_avg_sq"),
        ):
            with raises(StateError, word):
                give(opt, wrong)
                opt.step()
            opt.__dict__.pop("state", None)
            assert opt.state[params[0]]["step"] == 8 and opt.state[params[1]]["step"] == 1
        # Of what it shows itself: as it is, and changed.
        names = ("step", "exp_avg", "exp_avg_sq")
        before = [{name: whole(opt.state[param][name]) for name in names} for param in params]
        give(opt, {param: dict(opt.state[param]) for param in params})
        halves = {param: {**opt.state[param], "exp_avg": opt.state[param]["exp_avg"] * 0.5} for param in params}
        give(opt, halves)
        for param, its in zip(params, before, strict=True):
            assert opt.state[param]["step"] == its["step"]
            assert torch.equal(whole(opt.state[param]["exp_avg"]), its["exp_avg"] * 0.5)
            assert torch.equal(whole(opt.state[param]["exp_avg_sq"]), its["exp_avg_sq"])
        give(opt, defaultdict(dict))
        assert not list(opt.state)
        step(params, opt)
        assert opt.state[params[0]]["step"] == 1
        opt.close()


def test_states_given_past_the_load(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(given_past_the_load, world=world)


def test_a_stray_state_is_found_by_a_save(tmp_path: Path) -> None:
    params, opt = made(ShardedAdamW)
    step(params, opt)
    ones = {"step": torch.tensor(7.0), "exp_avg": torch.ones(SHAPE), "exp_avg_sq": torch.ones(SHAPE)}
    vars(opt)["state"] = {params[0]: ones}
    model = nn.ParameterList(params)
    save_checkpoint(tmp_path, model, opt)
    other = ShardedAdamW(model.parameters())
    shardopt.load_checkpoint(tmp_path, model, other)
    assert other.state[params[0]]["step"] == 7 and params[1] not in other.state


def test_keys_that_a_wrapper_adds_to_defaults() -> None:
    params, opt = made(ShardedAdamW)
    opt.defaults["lookahead_alpha"], opt.defaults["base"] = 0.5, object()
    for _ in range(2):
        step(params, opt)
    (others, other) = copy.deepcopy((params, opt))
    step(others, other)
    other.load_state_dict(opt.state_dict())
    step(others, other)
    added = Parameter(torch.ones(SHAPE))
    opt.add_param_group({"params": [added]})
    step([*params, added], opt)
    assert opt.param_groups[1]["lookahead_alpha"] == 0.5 and opt.state[added]["step"] == 1
    del opt.param_groups[0]["lr"]
    with raises(TypeError, "lr"):
        step(params, opt)
