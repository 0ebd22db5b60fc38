"""Rules that look at whole params: LAMB, LARS and one's own, beside float64 and plain torch; the same bits everywhere.

Gradients are integers that autograd makes, the same on every rank, so that their mean has the same bits at every number
of ranks. Shards cut params in the midst: what is taken of a shard's elements alone is another norm.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import (
    CheckpointError,
    CommunicationError,
    DisagreementError,
    Offload,
    ShardedAdam,
    ShardedAdamW,
    ShardedLAMB,
    ShardedLARS,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    StateError,
    Tuning,
    load_checkpoint,
    rule,
    save_checkpoint,
)
from shardopt.partition.comm.group import Ranks
from shardopt.rules import maximum, norm
from shardopt.step import norms, update
from tests.support.comparing import digest, raw
from tests.support.norm_rules import NORM_CASES, NormCase, three_cuts
from tests.support.oracle import Oracle
from tests.support.ranks import Pool
from tests.support.streams import Machine
from tests.support.streams.scenarios import Scenario
from tests.support.sweep import drawn, grid
from tests.support.training import one_thread, raises

SHAPES = ((50, 33), (300,), (7, 11, 13), (1,), (3, 700), (0, 4))

# -- beside float64 and plain torch ------------------------------------------------------------------------------------


def params_and_gradients(steps: int) -> tuple[list[nn.Parameter], list[list[Tensor | None]]]:
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params.append(nn.Parameter(torch.zeros(20, 30)))  # of norm zero, until it has moved
    grads: list[list[Tensor | None]] = [[torch.randn_like(param) for param in params] for _ in range(steps)]
    grads[1][0] = None
    grads[2][4] = torch.zeros(3, 700)
    return params, grads


def moved(params: Sequence[Tensor], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().to(dtype).clone()) for param in params]


def set_gradients(params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.to(param.dtype)


ALL = [pytest.param(case, each, id=f"{case}-{each}") for case in NORM_CASES for each in case.keywords]


@pytest.mark.parametrize(("case", "keywords"), ALL)
def test_beside_float64_and_plain_torch(case: NormCase, keywords: dict[str, Any]) -> None:
    """After every step; in float64 the plain implementation agrees with the rule's own source in NumPy."""
    start, grads = params_and_gradients(5)
    ours, theirs, exact = (moved(start, each) for each in (torch.float32, torch.float32, torch.float64))
    opt = case.ours(ours, **keywords)
    plain, wide = case.reference(theirs, **keywords), case.reference(exact, **keywords)
    oracle = Oracle(case.rule, opt.param_groups[0], [param.detach().double().numpy() for param in start])
    for of_step in grads:
        for optimizer, params in ((opt, ours), (plain, theirs), (wide, exact)):
            set_gradients(params, of_step)
            optimizer.step()
        oracle.step([None if each is None else each.double().numpy() for each in of_step])
        for index, param in enumerate(exact):
            np.testing.assert_allclose(oracle.params[index], param.detach().numpy(), rtol=1e-12, atol=1e-14)
            assert distance(ours[index], param) <= 1.05 * distance(theirs[index], param) + 2e-7
            for name in opt.state[ours[index]]:
                if name in case.states and param.numel():
                    there = wide.state[param][name]
                    mine = opt.state[ours[index]][name].double()
                    torch.testing.assert_close(mine, there, rtol=1e-6, atol=1e-7)
                    np.testing.assert_allclose(oracle.states[index][name], there.numpy(), rtol=1e-12, atol=1e-14)
    assert opt.rule is case.rule
    assert set(case.rule.variant(opt.param_groups[0]).states) == set(opt.state[ours[0]]) - {"step"}


def distance(mine: Tensor, exact: Tensor) -> float:
    """Root of the mean square of the difference, over that of the values."""
    mine, exact = mine.detach().double(), exact.detach()
    scale = float(exact.square().sum().sqrt())
    return float((mine - exact).square().sum().sqrt()) / scale if scale else 0.0


@pytest.mark.parametrize("state_format", ["bf16", "int8"])
def test_the_direction_is_that_of_the_rounded_states(state_format: Any) -> None:
    """The param follows from the stored states alone, its norm too: a step of the ones not rounded is another one."""
    torch.manual_seed(3)
    param = nn.Parameter(torch.randn(64, 80))
    opt = ShardedLAMB([param], lr=1.0, state_format=state_format, tuning=Tuning(compress_from=0))
    for step in (1, 2, 3):
        before = param.detach().double().clone()
        param.grad = torch.randn(64, 80)
        opt.step()
        mean, square = (opt.state[param][name].double() for name in ("exp_avg", "exp_avg_sq"))
        direction = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + 0.01 * before
        expected = before - before.norm() / direction.norm() * direction
        torch.testing.assert_close(param.detach().double(), expected, rtol=2e-6, atol=2e-6)


def test_a_rule_of_ones_own_with_three_cuts() -> None:
    start, grads = params_and_gradients(4)
    params = moved(start, torch.float32)
    opt = ShardedOptimizer(params, {"lr": 0.1}, rule=three_cuts)
    oracle = Oracle(three_cuts, {"lr": 0.1}, [param.detach().double().numpy() for param in start])
    for of_step in grads:
        set_gradients(params, of_step)
        opt.step()
        oracle.step([None if each is None else each.double().numpy() for each in of_step])
    for param, expected in zip(params, oracle.params, strict=True):
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_a_norm_that_is_nan_makes_its_param_nan(case: NormCase) -> None:
    """With a ratio of 1 the other elements would take a step of another size, and nothing would tell."""
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))]
    opt = case.ours(params, tuning=Tuning(nonfinite="propagate"), **case.keywords[0])
    for param in params:
        param.grad = torch.ones(3, 4)
    params[0].grad[1, 1] = float("inf")  # type: ignore[index]
    opt.step()
    assert params[0].isnan().all() and params[1].isfinite().all()


# -- the same bits -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Params of many shapes in three submodules; the loss has integers for gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        shapes = (((80, 33), (33,)), ((7, 11, 13), (1,), (300,)), ((3, 700),))
        self.parts = nn.ModuleList(Part([torch.randn(shape).to(dtype) for shape in each]) for each in shapes)

    def forward(self, step: int) -> Tensor:
        return sum((part(step) for part in self.parts), torch.zeros(()))


class Part(nn.Module):
    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(each) for each in values)

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for number, param in enumerate(self.own):
            generator = torch.Generator().manual_seed(100 * step + number)
            total = total + (param * torch.randint(-9, 10, param.shape, generator=generator)).float().sum()
        return total


AXES: dict[str, Sequence[Any]] = {
    "stage": (0, 1, 2, 3),
    "world": (1, 2, 3),
    "tier": (None, "cpu", "disk"),
    "bucket_bytes": (2048, 32 << 20),
    "kind": ("LAMB", "LAMB in 8 bits", "LARS in bf16", "three cuts"),
}
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "LAMB": (torch.float32, {"ema": 0.9, "max_grad_norm": 50.0}),
    "LAMB in 8 bits": (torch.bfloat16, {"master": "none", "state_format": "int8"}),
    "LARS in bf16": (torch.bfloat16, {"master": "split", "state_format": "bf16"}),
    "three cuts": (torch.float32, {"state_format": "int8"}),
}


def train(kind: str, folder: str | None = None, **where: Any) -> bytes:
    """Bits of params and states after three steps."""
    dtype, options = KINDS[kind]
    tier, bucket_bytes = where.pop("tier", None), where.pop("bucket_bytes", 32 << 20)
    tuning = Tuning(bucket_bytes=bucket_bytes, keep_below=0, compress_from=0, chunk_bytes=4096)
    offload = f"{folder}/{dist.get_rank() if dist.is_initialized() else 0}" if tier == "disk" else tier
    model = Net(dtype)
    keywords = {**options, **where, "offload": offload, "tuning": tuning}
    if kind == "three cuts":
        opt = ShardedOptimizer(model, {"lr": 0.1}, rule=three_cuts, **keywords)
    else:
        opt = (ShardedLARS if kind.startswith("LARS") else ShardedLAMB)(model, lr=0.1, **keywords)
    for step in range(3):
        opt.zero_grad()
        model(step).backward()
        opt.step()
    with opt.unsharded():
        found = [raw(param) for param in model.parameters()]
    opt.consolidate_state_dict()
    if not dist.is_initialized() or dist.get_rank() == 0:
        states = opt.state_dict()["state"].values()
        found += [raw(each) for state in states for each in state.values() if isinstance(each, Tensor)]
    opt.close()
    return b"".join(found)


def train_all(rows: Sequence[tuple[Any, ...]], folder: str) -> list[bytes]:
    found = []
    for row in rows:
        stage, _, tier, bucket_bytes, kind = row
        try:
            found.append(train(kind, folder, stage=stage, tier=tier, bucket_bytes=bucket_bytes))
        except Exception as error:
            error.add_note(str(row))
            raise
    return found


def check(rows: Sequence[tuple[Any, ...]], ranks: Pool, folder: Path) -> None:
    expected = {kind: train(kind, stage=0) for kind in KINDS}
    for world in (1, 2, 3):
        of_world = [row for row in rows if row[1] == world]
        found = ranks.run(train_all, of_world, str(folder), world=world)
        for row, mine in zip(of_world, found[0], strict=True):
            assert mine == expected[row[-1]], row
        for others in found[1:]:
            for row, theirs in zip(of_world, others, strict=True):
                assert theirs == expected[row[-1]][: len(theirs)], row


def test_the_same_bits_everywhere(ranks: Pool, tmp_path: Path) -> None:
    check(drawn(AXES), ranks, tmp_path)


@pytest.mark.slow
def test_the_same_bits_in_every_combination(ranks: Pool, tmp_path: Path) -> None:
    check(grid(AXES), ranks, tmp_path)


def with_own_norms(fault: str) -> bytes:
    """A rank takes what it measured of its shard for the whole, or adds up what another one measured twice."""
    all_reduce = Ranks.all_reduce

    def faulty(self: Ranks, vector: Tensor, phase: str) -> None:
        mine = vector.clone()
        all_reduce(self, vector, phase)
        if phase == norms._ADDING_UP and (fault == "own" or dist.get_rank() == 1):
            vector.copy_(mine if fault == "own" else vector + mine)

    with patch.object(Ranks, "all_reduce", faulty):
        return train("LAMB", stage=1)


@pytest.mark.parametrize("fault", ["own", "twice"])
def test_norms_of_shards_show(fault: str, ranks: Pool) -> None:
    """What the sweep compares finds both faults."""
    found = ranks.run(with_own_norms, fault, world=2)[0]
    assert len(found) == len(expected := train("LAMB", stage=0))
    assert found != expected


# -- on a device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["memory", "ring", "CPU step"])
@one_thread()
def test_passes_are_in_order_on_a_device(tier: str) -> None:
    """On the stand-in of CUDA: what a pass wrote is there for the next one, through each tier."""
    assert Scenario(2, tier, way="once", options={"clip_update": 1.0}).run().races == []


def stepped(params: Sequence[nn.Parameter], move: Callable[[Tensor], Tensor], offload: Any) -> ShardedOptimizer:
    tuning = Tuning(bucket_bytes=4096, chunk_bytes=1024, compress_from=0)
    opt = ShardedLAMB(params, lr=0.1, state_format="int8", offload=offload, tuning=tuning)
    for step in range(2):
        for number, param in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + number)
            param.grad = move(torch.randn(param.shape, generator=generator))
        opt.step()
    return opt


@pytest.mark.parametrize("offload", [None, Offload(step="gpu"), Offload(step="cpu")])
@one_thread()
def test_shards_that_share_launches_have_the_same_bits(offload: Any) -> None:
    """Several buckets of a device take each pass together, and each param gets its own norms."""
    shapes = ((30, 40), (900,), (5, 300), (20, 64))
    values = [torch.randn(shape) for shape in shapes]
    here = [nn.Parameter(each.clone()) for each in values]
    stepped(here, Tensor.clone, None)
    with Machine(world=1) as machine:
        there = [nn.Parameter(machine.tensor(each)) for each in values]
        opt = stepped(there, machine.tensor, offload)
        found = [param.detach().cpu() for param in there]
        opt.close()
        assert machine.races == []
    for mine, theirs in zip(found, here, strict=True):
        assert torch.equal(mine, theirs.detach())


# -- errors ------------------------------------------------------------------------------------------------------------


def fail_on_one_rank(folder: str, is_on_disk: bool) -> None:
    """Rank 1's second pass of a step cannot run."""
    model = Net(torch.float32)
    opt = ShardedLAMB(model, lr=0.1, stage=1, offload=f"{folder}/{dist.get_rank()}" if is_on_disk else None)
    model(0).backward()
    opt.step()
    opt.zero_grad()
    model(1).backward()
    before, odd = digest(opt), dist.get_rank() == 1
    told: Any = (CommunicationError, "look at the output of")
    if is_on_disk:
        told = (DisagreementError, "cannot take this step, so no rank does and nothing changed", "no room")

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    with (
        patch.object(update, "chunks_of", fails if odd else update.chunks_of),
        raises(MemoryError, "no room") if odd else raises(*told),
    ):
        opt.step()
    if is_on_disk:  # what the other rank had written is taken back, and the step can be taken again
        assert before == digest(opt)
        opt.step()
        assert before != digest(opt)
    else:
        with pytest.raises(ShardoptError, match="half-way"):
            opt.step()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_rank_that_cannot_measure(is_on_disk: bool, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(fail_on_one_rank, str(tmp_path), is_on_disk, world=2)


def test_released_gradients_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"omit release_gradients.*lamb takes norms of whole params"):
        ShardedLAMB(Net(torch.float32), release_gradients=True)
    ShardedAdamW(Net(torch.float32), release_gradients=True).close()


def test_clip_update_of_a_group_is_read_or_refused() -> None:
    group = {"params": [nn.Parameter(torch.ones(3, 4))], "clip_update": 0.5}
    with pytest.raises(ValueError, match="give clip_update to the optimizer too"):
        ShardedAdamW([group])
    with pytest.raises(ValueError, match="clip_update must be a number above 0"):
        ShardedAdamW([{**group, "clip_update": -1.0}], clip_update=1.0)
    assert ShardedAdamW([group], clip_update=1.0).param_groups[0]["clip_update"] == 0.5


def clipping(**keywords: Any) -> tuple[nn.Module, ShardedAdamW]:
    """After a step."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    optimizer = ShardedAdamW(module, **keywords)
    module(torch.ones(2, 40)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def test_clip_update_is_not_lost_by_loading(tmp_path: Path) -> None:
    """States alone would fit, and the update would be AdamW's own from there on."""
    module, saved = clipping(clip_update=0.5)
    save_checkpoint(tmp_path, module, saved)
    other, optimizer = clipping(lr=0.1)
    before = digest(optimizer), repr(optimizer.param_groups)
    with pytest.raises(StateError, match=r"construct the optimizer with clip_update=0.5.*Nothing was loaded"):
        optimizer.load_state_dict(saved.state_dict())
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer 0 has clip_update=0.5 .* Nothing was loaded"):
        load_checkpoint(tmp_path, other, optimizer)
    assert (digest(optimizer), repr(optimizer.param_groups)) == before
    (left_out,) = load_checkpoint(tmp_path, other, optimizer, strict=False).mismatches
    assert "clip_update" in left_out and "clip_update" not in optimizer.param_groups[0]
    assert digest(optimizer) == digest(saved) and optimizer.param_groups[0]["lr"] == 1e-3


def test_adam_takes_no_states_of_a_clipped_adamw() -> None:
    """Its rule has no clipping: it would go on with longer steps, and say nothing."""
    _, saved = clipping(clip_update=0.5)
    optimizer = ShardedAdam(nn.Linear(40, 30))
    with pytest.raises(StateError, match=r"clip_update=0.5.*Nothing was loaded"):
        optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("saved", "other"), [(ShardedLAMB, ShardedAdamW), (ShardedLARS, ShardedSGD)])
def test_dicts_of_other_rules_are_refused(saved: Any, other: Any) -> None:
    """Their states have the same names: the trust ratio would be lost without an error."""
    model = nn.Linear(3, 2)
    optimizer = saved(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    loading = other(nn.Linear(3, 2).parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"trust=False, of the class that was saved.*[Nn]othing was loaded"):
        loading.load_state_dict(optimizer.state_dict())
    assert "trust" not in loading.param_groups[0] and not loading.state_dict()["state"]


@rule(states=(), scalars=lambda group, step, carried: {"lr": group["lr"]})
def clips_by_flag(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
    scale = norm(grad)
    if flags.clip:
        grad = grad / maximum(scale, 1)
    return param - s.lr * grad


def test_a_norm_that_the_flags_make_no_use_of_is_not_taken() -> None:
    """A group without the flag is beside one with it: each has the passes that it needs."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    groups = [{"params": [param], "clip": clips} for param, clips in zip(params, (False, True), strict=True)]
    for several in (groups, groups[:1]):
        optimizer = ShardedOptimizer(several, {"lr": 0.5}, rule=clips_by_flag)
        for param in params:
            param.data.fill_(1)
            param.grad = torch.ones(4)
        optimizer.step()
        optimizer.close()
        assert params[0].tolist() == [0.5] * 4
        assert params[1].tolist() == ([0.75] * 4 if several is groups else [1.0] * 4)


def test_clip_update_stays_where_plain_states_are_loaded(tmp_path: Path) -> None:
    module, saved = clipping()
    save_checkpoint(tmp_path, module, saved)
    for takes_checkpoint in (False, True):
        other, optimizer = clipping(clip_update=0.5, lr=0.1)
        optimizer.param_groups[0]["clip_update"] = 0.25
        if takes_checkpoint:
            load_checkpoint(tmp_path, other, optimizer)
        else:
            optimizer.load_state_dict(saved.state_dict())
            other.load_state_dict(module.state_dict())
        (group,) = optimizer.param_groups
        assert (group["clip_update"], group["lr"]) == (0.25, 1e-3)
        assert digest(optimizer) == digest(saved)


def test_adam_and_clipped_adamw_do_not_load_each_other(tmp_path: Path) -> None:
    """Adam would go on without clipping; AdamW would take Adam's flag, which its rule does not read."""
    module = nn.Linear(40, 30)
    clipped, adam = clipping(clip_update=0.5), (module, ShardedAdam(module))
    module(torch.ones(2, 40)).sum().backward()
    adam[1].step()
    pairs: list[tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]] = [(clipped, adam), (adam, clipped)]
    for number, (saved, loads) in enumerate(pairs):
        save_checkpoint(tmp_path / str(number), *saved)
        before = digest(loads[1]), repr(loads[1].param_groups)
        with pytest.raises(CheckpointError, match=r"the states of 'bias' are those of .*adam.* Nothing was loaded"):
            load_checkpoint(tmp_path / str(number), *loads)
        with pytest.raises(StateError, match=r"construct .* of the class that was saved.*othing was loaded"):
            loads[1].load_state_dict(saved[1].state_dict())
        assert (digest(loads[1]), repr(loads[1].param_groups)) == before


def test_adams_states_leave_adamw_what_it_is(tmp_path: Path) -> None:
    """Its decay stays decoupled, as torch's AdamW has it; a group of Adam's flags would make it Adam, silently."""
    module = nn.Linear(40, 30)
    adam = ShardedAdam(module, weight_decay=0.1)
    module(torch.ones(2, 40)).sum().backward()
    adam.step()
    save_checkpoint(tmp_path, module, adam)
    for takes_checkpoint in (False, True):
        other, optimizer = clipping()
        if takes_checkpoint:
            load_checkpoint(tmp_path, other, optimizer)
        else:
            optimizer.load_state_dict(adam.state_dict())
            other.load_state_dict(module.state_dict())
        (group,) = optimizer.param_groups
        assert group["decoupled_weight_decay"] is True and group["weight_decay"] == 0.1
        assert digest(optimizer) == digest(adam)
