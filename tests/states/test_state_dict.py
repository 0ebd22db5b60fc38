"""Saving, loading, converting from and to torch, at several ranks; the bits go on as if nothing had happened."""

import copy
import io
import math
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardopt import (
    Part,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    StateError,
    Tuning,
    load_checkpoint,
    prepare_states,
    save_checkpoint,
)
from tests.support.cases import Zoo, fill_gradients
from tests.support.ranks import Pool
from tests.support.training import digest, load_bytes, raises, raw, saved_bytes
from tests.support.wire import Calls

# -- state dicts -------------------------------------------------------------------------------------------------------


def continued(dtype: torch.dtype) -> tuple[str, bytes]:
    """Ten steps; also five, saved, loaded elsewhere in every way, and five: the same bits. Returns them, the file."""

    def advance(params: list[Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            fill_gradients(params, "heavy_tailed", step)
            if step == 3:
                params[4].grad = None
            optimizer.step()

    whole = list(Zoo(dtype).parameters())
    opt = ShardedAdamW(whole, lr=1e-2, amsgrad=True)
    advance(whole, opt, range(5))
    data = saved_bytes(opt)
    weights = [param.detach().clone() for param in whole]
    parts = {
        key: {name: value.clone() for name, value in state.items()} for key, state in opt.state_dict()["state"].items()
    }
    part_dict = {**opt.state_dict(), "state": parts}
    advance(whole, opt, range(5, 10))
    expected = digest(opt)
    ways: dict[str, Callable[[list[Parameter], ShardedOptimizer], None]] = {
        "before the first step": lambda params, fresh: fresh.load_state_dict(load_bytes(data)),
        "parts, on the ranks that they come from": lambda params, fresh: (
            advance(params, fresh, range(50, 52)),
            fresh.load_state_dict(part_dict),
        ),
        "after other steps": lambda params, fresh: (
            advance(params, fresh, range(50, 52)),
            fresh.load_state_dict(load_bytes(data)),
        ),
        "twice": lambda params, fresh: (
            fresh.load_state_dict(load_bytes(data)),
            fresh.load_state_dict(fresh.state_dict()),
        ),
        "deepcopied after loading": lambda params, fresh: fresh.load_state_dict(load_bytes(data)),
    }
    for name, way in ways.items():
        params = list(Zoo(dtype, seed=5).parameters())
        fresh = ShardedAdamW(params, lr=3.0, amsgrad=True, stage=1, tuning=Tuning(bucket_bytes=1 << 20))
        way(params, fresh)
        with torch.no_grad():
            for param, value in zip(params, weights, strict=True):
                param.copy_(value)
        if name.startswith("after") or name.startswith("parts"):
            # The weights were written after the state was loaded: masters that round to other values were refreshed.
            fresh.load_state_dict(load_bytes(data))
        if name.startswith("deepcopied"):
            params, fresh = copy.deepcopy((params, fresh))
        advance(params, fresh, range(5, 10))
        assert digest(fresh) == expected, name
    return expected, data


def moved_and_cast_after_loading(data: bytes) -> None:
    """Loaded before .to(dtype) and before DDP: kept until the params are bound."""
    low = list(Zoo(torch.bfloat16).parameters())
    ours = ShardedAdamW(low, lr=1e-2, amsgrad=True)
    ours.load_state_dict(load_bytes(data))
    late_model = Zoo()
    late = ShardedAdamW(late_model.parameters(), lr=1e-2, amsgrad=True)
    late.load_state_dict(load_bytes(data))
    late_model.bfloat16()
    with torch.no_grad():
        for mine, theirs in zip(late_model.parameters(), low, strict=True):
            mine.copy_(theirs)
    for step in range(3):
        fill_gradients(low, "integers", step)
        fill_gradients(late_model.parameters(), "integers", step)
        ours.step()
        late.step()
    assert digest(ours) == digest(late)


def through_torch() -> None:
    """torch -> ours -> torch, each going on from the other's file as it would from its own."""
    for kind, ours, keywords in (
        (torch.optim.AdamW, ShardedAdamW, {"lr": 1e-2, "amsgrad": True}),
        (torch.optim.SGD, ShardedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ):
        reference, params = list(Zoo().parameters()), list(Zoo().parameters())
        torch_opt, first = kind(reference, **keywords), kind(params, **keywords)
        middle, last = ours(params, **keywords), kind(params, **keywords)
        for step in range(9):
            if step == 3:
                middle.load_state_dict(first.state_dict())
            if step == 6:
                saved, expected = load_bytes(saved_bytes(middle)), torch_opt.state_dict()
                assert saved.keys() == expected.keys()
                assert saved["param_groups"][0].keys() == expected["param_groups"][0].keys()
                last.load_state_dict(saved)
            fill_gradients(reference, "integers", step)
            fill_gradients(params, "integers", step)
            torch_opt.step()
            (first, middle, last)[step // 3].step()
        for mine, theirs in zip(params, reference, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=2e-6)
            for name, value in torch_opt.state.get(theirs, {}).items():
                torch.testing.assert_close(last.state[mine][name], value, atol=1e-6, rtol=2e-6)


def wrong_state_dicts() -> None:
    params = [param for param in Zoo().parameters() if param.requires_grad]
    opt = ShardedAdamW(params)
    fill_gradients(params, "integers", 0)
    opt.step()
    before = digest(opt), repr(opt.param_groups)

    def refuse(saved: dict[str, Any], kind: type[Exception], *words: str) -> None:
        with raises(kind, *words):
            opt.load_state_dict(saved)
        assert (digest(opt), repr(opt.param_groups)) == before

    def stepped(kind: type[torch.optim.Optimizer], shapes: list[Any], **keywords: Any) -> dict[str, Any]:
        others = [Parameter(torch.ones(shape)) for shape in shapes]
        other = kind(others, **keywords)
        for each in others:
            each.grad = torch.ones_like(each)
        other.step()
        return other.state_dict()

    shapes = [param.shape for param in params]
    refuse(stepped(torch.optim.AdamW, shapes[::-1]), StateError, "shape", "another model")
    refuse(stepped(torch.optim.AdamW, shapes[1:]), ValueError, "doesn't match the size")
    refuse(stepped(torch.optim.SGD, shapes, momentum=0.9), StateError, "exp_avg", "momentum_buffer")
    refuse(stepped(torch.optim.Adagrad, shapes), StateError, "exp_avg")
    good = stepped(torch.optim.AdamW, shapes)
    lacks = copy.deepcopy(good)
    del lacks["state"][3]["exp_avg_sq"]
    refuse(lacks, StateError, "missing", "exp_avg_sq")
    stranger = copy.deepcopy(good)
    stranger["state"][99] = stranger["state"][0]
    refuse(stranger, StateError, "99")
    two_groups = copy.deepcopy(good)
    two_groups["param_groups"].append(two_groups["param_groups"][0])
    refuse(two_groups, ValueError, "different number of parameter groups")
    flags = stepped(torch.optim.AdamW, shapes, amsgrad=True)
    for group in flags["param_groups"]:
        group["amsgrad"] = False
    refuse(flags, StateError, "max_exp_avg_sq")
    with raises(TypeError, "a dict of states by param", "list"):
        opt.state = [1]  # type: ignore[assignment]
    with raises(StateError, "no group has"):
        opt.state = {torch.nn.Parameter(torch.ones(2)): good["state"][0]}


def parts() -> None:
    """A part says what it is, refuses what it cannot answer, and gathers."""
    params = [param for param in Zoo(torch.bfloat16).parameters() if param.requires_grad]
    opt, alone = ShardedAdamW(params), copy.deepcopy(params)
    torch_opt = ShardedAdamW(alone, stage=0)
    for step in range(3):
        for each, optimizer in ((params, opt), (alone, torch_opt)):
            fill_gradients(each, "integers", step)
            optimizer.step()
    found = 0
    for param, other in zip(params, alone, strict=True):
        for name, value in opt.state[param].items():
            exact = torch_opt.state[other][name]
            assert value.shape == exact.shape and value.dtype == exact.dtype
            if name == "step":
                continue
            assert isinstance(value, Part) and not isinstance(exact, Part)
            assert raw(value.full_tensor()) == raw(exact)
            assert value.full_tensor().stride() == exact.stride()
            assert raw(value.sum()) == raw(exact.sum()) and raw((value + 1).full_tensor()) == raw(exact + 1)
            file = io.BytesIO()
            torch.save(copy.deepcopy(value), file)
            file.seek(0)
            assert raw(torch.load(file)) == raw(exact)
            assert raw(value.clone()) == raw(value) and f"shape={tuple(value.shape)}" in repr(value)
            if name == "exp_avg":
                dist.barrier()  # a rank that reads alone would find the slices of two moments
                value += 1
                assert raw(value.full_tensor()) == raw(exact + 1) == raw(opt.state[param][name].full_tensor())
                if value.dim():
                    with raises(StateError, "by elements"):
                        value.cumsum_(0)
            found += value.local.numel()
    assert found
    with raises(StateError, "state_dict"):
        torch.save(opt, io.BytesIO())
    opt.consolidate_state_dict(to=dist.get_world_size() - 1)
    is_plain = dist.get_rank() == dist.get_world_size() - 1
    for state in opt.state_dict()["state"].values():
        assert isinstance(state["exp_avg"], Part) != is_plain
    with raises(ValueError, "ranks", "found 7"):
        opt.consolidate_state_dict(to=7)


def of_frozen_params() -> None:
    """A state that was loaded for a param that nothing trains yet is gathered with the others, and saved."""
    params = [Parameter(torch.ones(300)), Parameter(torch.ones(500))]
    trained, resumed = ShardedAdamW(params), ShardedAdamW(others := copy.deepcopy(params))
    fill_gradients(params, "integers", 0)
    trained.step()
    data = saved_bytes(trained)
    others[1].requires_grad_(False)
    resumed.load_state_dict(load_bytes(data))
    fill_gradients(others[:1], "integers", 1)
    resumed.step()
    (before, after) = (load_bytes(each)["state"] for each in (data, saved_bytes(resumed)))
    assert after.keys() == {0, 1} and [float(after[index]["step"]) for index in range(2)] == [2.0, 1.0]
    assert raw(after[1]["exp_avg"]) == raw(before[1]["exp_avg"]) != raw(torch.zeros(500))


def test_states_of_frozen_params_are_consolidated(ranks: Pool) -> None:
    ranks.run(of_frozen_params, world=2)


def consolidated() -> Counter[str]:
    params = [Parameter(torch.ones(700)), Parameter(torch.ones(5))]
    optimizer = ShardedAdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with Calls() as calls:
        optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:  # each tensor holds its own elements: torch.save writes all of the memory that it views
        for state, param in zip(optimizer.state_dict()["state"].values(), params, strict=True):
            assert state["exp_avg"].untyped_storage().nbytes() == 4 * param.numel()
    return calls.found


def test_consolidating_sends_no_messages(ranks: Pool) -> None:
    """Over NCCL each pair of ranks that sends one would get a communicator, which stays."""
    for found in ranks.run(consolidated, world=3):
        assert found["gather_"] and not any(name.startswith(("send", "recv")) for name in found), found


def looked_at_anew(folder: str) -> None:
    """What changes states without a step ends what was consolidated: the rank that gathered them shows the new ones."""
    module = torch.nn.ParameterList([Parameter(torch.ones(700).bfloat16()), Parameter(torch.ones(600).bfloat16())])
    params = list(module)
    optimizer = ShardedAdamW(params, lr=2**-7)

    def step(gradient: float) -> None:
        for param in params:
            param.grad = torch.full_like(param, gradient)
        optimizer.step()

    def shows(name: str, value: float) -> None:
        """All elements of one state of both params that this rank holds are this number."""
        for param in params:
            found = optimizer.state[param][name]
            own = found.local if isinstance(found, Part) else found
            assert bool((own == value).all()), (name, value, own)

    step(1.0)
    first = float(next(iter(optimizer.state_dict()["state"].values()))["exp_avg"].full_tensor()[0])
    save_checkpoint(folder, module, optimizer)
    step(-4.0)
    assert raw(params[0]) != raw(torch.ones(700).bfloat16())

    optimizer.consolidate_state_dict()
    held = {index: type(state["exp_avg"]) for index, state in optimizer.state_dict()["state"].items()}
    assert set(held.values()) == {torch.Tensor if dist.get_rank() == 0 else Part}
    load_checkpoint(folder, module, optimizer)
    shows("exp_avg", first)

    optimizer.consolidate_state_dict()
    for param in params:
        param.data.fill_(0.25)
    optimizer.refresh_masters()
    shows("master", 0.25)

    optimizer.consolidate_state_dict()
    for param in params:
        whole = {"step": torch.tensor(1.0), "exp_avg": torch.full((param.numel(),), 3.0)}
        optimizer.state[param] = {**whole, "exp_avg_sq": whole["exp_avg"], "master": torch.full_like(param, 0.25)}
    shows("exp_avg", 3.0)

    optimizer.consolidate_state_dict()
    with torch.no_grad():
        for param in params:
            param.fill_(0.5)
    warnings.simplefilter("ignore")
    step(math.inf)  # skipped, but masters follow the weights that were written
    assert optimizer.updates == 2
    shows("master", 0.5)

    optimizer.consolidate_state_dict()
    optimizer.state = {}
    assert len(optimizer.state) == 0 and not optimizer.state_dict()["state"]
    optimizer.consolidate_state_dict()
    prepare_states(optimizer)
    shows("exp_avg", 0.0)


def test_what_was_consolidated_ends_with_any_change(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(looked_at_anew, str(tmp_path), world=2)


def test_state_dicts(ranks: Pool) -> None:
    finals: dict[torch.dtype, list[Any]] = {torch.float32: [], torch.bfloat16: []}
    files = {}
    for world in (1, 2, 3):
        for dtype, found in finals.items():
            by_rank = ranks.run(continued, dtype, world=world)
            files[dtype, world] = by_rank[0][1]
            found.append(load_bytes(by_rank[0][1]))
        ranks.run(moved_and_cast_after_loading, files[torch.bfloat16, 1], world=world)
        ranks.run(through_torch, world=world)
        ranks.run(wrong_state_dicts, world=world)
        if world > 1:
            ranks.run(parts, world=world)
    for dicts in finals.values():  # what is saved does not tell how many ranks saved it
        for other in dicts[1:]:
            assert other["param_groups"] == dicts[0]["param_groups"]
            for key, state in dicts[0]["state"].items():
                assert all(raw(value) == raw(other["state"][key][name]) for name, value in state.items())
