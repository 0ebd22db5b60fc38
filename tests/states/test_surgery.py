"""Surgery on a training: params are replaced by others with their states, as Gaussian splatting prunes and grows."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardopt import DisagreementError, ShardedAdam, StateError, save_checkpoint
from tests.support.ranks import Pool
from tests.support.training import raises

Change = Callable[[Any, Callable[[Tensor, bool], Tensor]], None]  # an optimizer; what makes the new tensors of the old

WIDTHS = {"xyz": 3, "features": 45, "opacity": 1, "rotation": 4}
ROWS = 200


def groups() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"params": [Parameter(torch.randn(ROWS, width, generator=generator))], "name": name, "lr": 1e-3 * width}
        for name, width in WIDTHS.items()
    ]


def step(opt: Any, generator: torch.Generator) -> None:
    for group in opt.param_groups:
        (param,) = group["params"]
        param.grad = torch.randn(param.shape, generator=generator)
    opt.step()
    opt.zero_grad(set_to_none=True)


# -- as public code does it: the first assigns other shapes before it forgets, the third before the group has the param


def as_graphdeco(opt: Any, change: Callable[[Tensor, bool], Tensor]) -> None:
    for group in opt.param_groups:
        stored = opt.state.get(group["params"][0], None)
        new = Parameter(change(group["params"][0].detach(), False))
        if stored is None:
            group["params"][0] = new
            continue
        stored["exp_avg"] = change(stored["exp_avg"], True)
        stored["exp_avg_sq"] = change(stored["exp_avg_sq"], True)
        del opt.state[group["params"][0]]
        group["params"][0] = new
        opt.state[group["params"][0]] = stored


def as_gsplat(opt: Any, change: Callable[[Tensor, bool], Tensor]) -> None:
    for group in opt.param_groups:
        (param,) = group["params"]
        new = Parameter(change(param.detach(), False))
        state = opt.state[param]
        del opt.state[param]
        for key in state.keys():  # noqa: SIM118 the loop writes to its values
            if key != "step":
                state[key] = change(state[key], True)
        group["params"] = [new]
        opt.state[new] = state


def as_splatfacto(opt: Any, change: Callable[[Tensor, bool], Tensor]) -> None:
    for group in opt.param_groups:
        param = group["params"][0]
        new = Parameter(change(param.detach(), False))
        state = opt.state[param]
        if "exp_avg" in state:
            state["exp_avg"] = change(state["exp_avg"], True)
            state["exp_avg_sq"] = change(state["exp_avg_sq"], True)
        del opt.state[param]
        opt.state[new] = state
        del group["params"][0]
        del group["params"]
        group["params"] = [new]


def as_popped(opt: Any, change: Callable[[Tensor, bool], Tensor]) -> None:
    """The group first, then the state."""
    for group in opt.param_groups:
        param = group["params"][0]
        group["params"] = [Parameter(change(param.detach(), False))]
        state = opt.state.pop(param, {})
        new = {key: change(value, True) if value.dim() else value for key, value in state.items()}
        opt.state[group["params"][0]] = new


def rounds(opt: Any, changes: list[Change], number: int) -> None:
    """Each round prunes some rows, grows as many anew, and now and then resets what a param is."""
    generator = torch.Generator().manual_seed(5)
    for index in range(number):
        change = changes[index % len(changes)]
        step(opt, generator)
        mask = torch.rand(ROWS, generator=generator) > 0.1
        grown = int((~mask).sum())
        change(opt, lambda value, _, mask=mask: value[mask])  # type: ignore[misc]
        change(opt, lambda value, is_state, grown=grown: _grown(value, is_state, grown))  # type: ignore[misc]
        if index % 3 == 2:
            change(opt, lambda value, is_state: torch.zeros_like(value) if is_state else value.clamp(max=0.1))
    step(opt, generator)


def _grown(value: Tensor, is_state: bool, grown: int) -> Tensor:
    rows = value[:grown]
    return torch.cat([value, torch.zeros_like(rows) if is_state else rows * 0.5])


def alike(opt: Any, other: Any) -> None:
    for its, of_other in zip(opt.param_groups, other.param_groups, strict=True):
        (param,), (reference,) = its["params"], of_other["params"]
        torch.testing.assert_close(param, reference, rtol=0, atol=5e-6)
        state, wanted = opt.state[param], other.state[reference]
        assert state.keys() == wanted.keys() and state["step"] == wanted["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name].cpu() + 0, wanted[name], rtol=1e-5, atol=1e-7)


ALL: list[Change] = [as_graphdeco, as_gsplat, as_splatfacto, as_popped]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_surgery_is_that_of_torch_and_leaves_nothing(tier: str, tmp_path: Path) -> None:
    offload = {"device": None, "host": "cpu", "disk": str(tmp_path)}[tier]
    opt, other = ShardedAdam(groups(), eps=1e-15, offload=offload), torch.optim.Adam(groups(), eps=1e-15)
    for each in (opt, other):
        as_graphdeco(each, lambda value, _: value * 2)  # before there are states
        rounds(each, ALL, 4)
    domain = opt.engine.domain
    assert domain is not None
    for each in (opt, other):
        rounds(each, ALL, 40 if tier == "device" else 8)
    alike(opt, other)
    assert len(domain.shards) == 1 and len(domain.entries) == len(WIDTHS) == len(opt.state)
    freed = weakref.ref(domain.shards[0])
    as_gsplat(opt, lambda value, _: value.clone())
    step(opt, torch.Generator())
    gc.collect()
    assert freed() is None
    fresh = ShardedAdam(groups(), eps=1e-15, offload=offload)
    step(fresh, torch.Generator())
    assert opt.memory() == fresh.memory()


def on_ranks() -> None:
    opt, other = ShardedAdam(groups(), eps=1e-15, stage=0), torch.optim.Adam(groups(), eps=1e-15)
    for each in (opt, other):
        rounds(each, ALL, 4)
    alike(opt, other)
    opt, generator = ShardedAdam(groups()), torch.Generator().manual_seed(5)
    for _ in range(3):
        step(opt, generator)
        for group in opt.param_groups:
            group["params"] = [Parameter(group["params"][0].detach()[:-9])]
    step(opt, generator)
    domain = opt.engine.domain
    assert domain is not None and len(domain.shards) == 1
    held = opt.state[opt.param_groups[0]["params"][0]]["exp_avg"]
    assert held.sum() != 0, "read from the other rank, which numbers its shards alike"
    dist.barrier()
    before = dict(domain.entries)
    if dist.get_rank() == 1:  # alone, which no gradient would show
        for group in opt.param_groups:
            group["params"] = []
    with raises(DisagreementError, "buckets whose params have left"):
        opt.step()
    assert domain.entries == before and len(domain.shards) == 1, "freed on one rank alone"


def test_ranks_free_a_bucket_together(ranks: Pool) -> None:
    ranks.run(on_ranks, world=2)


def test_what_no_record_can_hold_is_raised_before_it_is_lost(tmp_path: Path) -> None:
    opt = ShardedAdam(groups())
    step(opt, torch.Generator().manual_seed(3))
    (param,) = opt.param_groups[0]["params"]
    model = torch.nn.ParameterList(param for group in opt.param_groups for param in group["params"])
    before, held = opt.state[param]["exp_avg"].clone(), opt.state[param]
    held["exp_avg"] = before[:7]
    assert held["exp_avg"].shape == (7, 3), "what was assigned is not shown"
    for call in ("step", "state_dict", "__getitem__", "save"):
        with raises(StateError, r"del optimizer.state[param]"):
            if call == "__getitem__":
                print(opt.state[param])
            elif call == "save":
                save_checkpoint(tmp_path / "checkpoint", model, opt)
            else:
                getattr(opt, call)()
    del opt.state[param]
    assert opt.state[param] == {}
    # A state for a param that is in no group yet, and does not fit it: the next step has to raise it.
    new = Parameter(torch.zeros(5, 3))
    opt.state[new] = {"step": torch.tensor(1.0), "exp_avg": before, "exp_avg_sq": before}
    assert opt.state[new].keys() == {"step", "exp_avg", "exp_avg_sq"} and new not in opt.state
    opt.param_groups[0]["params"] = [new]
    with raises(StateError, "shape"):
        opt.step()
    opt.state[new] = {}
    step(opt, torch.Generator())
    assert opt.state[new]["step"] == 1
    del opt.state[param]  # once more: it has left its group
    assert opt.state[param] == {} and opt.state.pop(param, None) is None and opt.state.get(param) is None
