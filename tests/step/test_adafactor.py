"""Adafactor beside torch's, at every stage and number of ranks; its margins travel as torch's states do.

Gradients of the sharded runs are integers, the same on every rank: sums of their squares are exact, so that the bits of
params and margins are equal wherever shards end.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import (
    CommunicationError,
    DisagreementError,
    Offload,
    ShardedAdafactor,
    ShardedOptimizer,
    ShardoptError,
    StateError,
    Tuning,
    load_checkpoint,
    prepare_states,
    rule,
    save_checkpoint,
)
from shardopt.kernels.products import COLUMNS, DIMS, INNER_STEP, OUTER_STEP, RUN, SLOWER, geometry_of
from shardopt.partition.comm.group import Ranks
from shardopt.step import margins
from tests.step.test_norm_rules import Net
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.streams import Machine
from tests.support.sweep import drawn, grid
from tests.support.training import one_thread, raises

KEYWORDS: list[dict[str, Any]] = [
    {},
    {"lr": 0.3, "beta2_decay": -0.3, "eps": (1e-3, 1e-2), "d": 2.0, "weight_decay": 0.1, "maximize": True},
    {"eps": (0.0, 0.0), "d": math.inf},
]


def values() -> list[Tensor]:
    """Params of 0 to 4 dimensions; some in another order than that of a contiguous tensor."""
    shapes = ((50, 33), (300,), (7, 11, 13), (1,), (3, 700), (6, 5, 3, 3), (), (1, 9), (9, 1))
    torch.manual_seed(0)
    made = [0.1 * torch.randn(shape) for shape in shapes]
    others = [torch.randn(40, 20).t(), torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)]
    return [*made, *others, torch.randn(5, 4, 6).permute(2, 0, 1)]


def as_params(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(each.detach().clone().to(dtype)) for each in tensors]


def step_with(optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step; gradients of float64 params are those of fp32 ones."""
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            generator = torch.Generator().manual_seed(100 * step + number)
            param.grad = (torch.randn(param.shape, generator=generator) * 10.0**-step).to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_beside_torch_and_float64(keywords: dict[str, Any]) -> None:
    ours, theirs, exact = (as_params(values(), each) for each in (torch.float32, torch.float32, torch.float64))
    wide = {"eps": (torch.finfo(torch.float32).eps, 1e-3), **keywords}
    opt, plain = ShardedAdafactor(ours, **keywords), torch.optim.Adafactor(theirs, **keywords)
    oracle = torch.optim.Adafactor(exact, **wide)
    for step in range(4):
        for each in (opt, plain, oracle):
            step_with(each, step)
        for mine, other, there in zip(ours, theirs, exact, strict=True):
            assert distance(mine, there) <= 1.05 * distance(other, there) + 2e-7
            state, expected = opt.state[mine], oracle.state[there]
            assert list(state) == list(expected) and int(state["step"]) == step + 1
            for name, value in expected.items():
                torch.testing.assert_close(state[name].double(), value.double(), rtol=1e-6, atol=1e-12)


def distance(mine: Tensor, exact: Tensor) -> float:
    """Root of the mean square of the difference, over that of the values."""
    mine, exact = mine.detach().double(), exact.detach()
    return float((mine - exact).norm() / exact.norm())


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_eps_of_bf16_params_is_that_of_bf16(master: Any) -> None:
    ours, exact = as_params(values(), torch.bfloat16), [each.bfloat16().double() for each in values()]
    opt = ShardedAdafactor(ours, master=master)
    oracle = torch.optim.Adafactor(as_params(exact, torch.float64), eps=(torch.finfo(torch.bfloat16).eps, 1e-3))
    for step in range(3):
        for number, (mine, there) in enumerate(zip(ours, oracle.param_groups[0]["params"], strict=True)):
            generator = torch.Generator().manual_seed(100 * step + number)
            mine.grad = torch.randn(mine.shape, generator=generator).mul(1e-3).bfloat16()
            there.grad = mine.grad.double()
        opt.step()
        oracle.step()
    for mine, there in zip(ours, oracle.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(opt.state[mine]["master"].double(), there.detach(), rtol=2e-6, atol=2e-7)


def test_every_element_finds_its_row_and_column() -> None:
    """By the table alone, as the kernels do, for every order of up to five dimensions."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        count = int(torch.randint(2, 6, (), generator=generator))
        shape = [(1, 2, 3, 5)[each] for each in torch.randint(0, 4, (count,), generator=generator).tolist()]
        order = torch.randperm(count, generator=generator).tolist()
        flat = torch.empty([shape[dim] for dim in order])
        tensor = flat.permute([order.index(dim) for dim in range(count)])
        geometry = geometry_of(shape, tensor.stride())
        rows = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1).expand(shape)
        columns = torch.arange(math.prod(shape[:-2]) * shape[-1]).view(*shape[:-2], 1, shape[-1]).expand(shape)
        expected = [each.permute(order).reshape(-1).tolist() for each in (rows, columns)]
        row = (0, 0, 0, *geometry.columns)
        assert len(row) == COLUMNS
        for element in range(tensor.numel()):
            found = places(row, element)
            assert (found if geometry.outer_is_row else found[::-1]) == (expected[0][element], expected[1][element])


def places(row: Sequence[int], element: int) -> tuple[int, int]:
    number, inside = divmod(element, row[RUN])
    outer, inner = inside * row[OUTER_STEP], inside * row[INNER_STEP]
    for at in range(SLOWER, SLOWER + 3 * row[DIMS], 3):
        number, digit = divmod(number, row[at])
        outer, inner = outer + digit * row[at + 1], inner + digit * row[at + 2]
    return outer, inner


def test_params_without_elements() -> None:
    """Whose rows or columns have no mean; a warning is an error here."""
    params = as_params([torch.ones(0, 5), torch.ones(5, 0), torch.ones(3, 0, 4), torch.ones(2, 3)])
    opt, alone = ShardedAdafactor(params), ShardedAdafactor(as_params(params[3:]))
    for each in (opt, alone):
        for param in each.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        each.step()
    assert torch.equal(params[3], alone.param_groups[0]["params"][0])
    assert opt.state[params[2]]["col_var"].shape == (3, 1, 4)


def rate_alone(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {"lr": group["lr"]}


@rule(states=("average",), scalars=rate_alone, of_param=("is_matrix",))
def steps_of_matrices_are_longer(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
    state.average = state.average + grad
    if flags.is_matrix:
        grad = 10 * grad
    return param - s.lr * grad


def test_params_of_one_bucket_give_one_answer() -> None:
    """Also where a rule keeps the same states for all, so that only its arithmetic differs."""
    params = as_params([torch.zeros(3), torch.zeros(2, 2), torch.zeros(3)])
    opt = ShardedOptimizer(params, rule=steps_of_matrices_are_longer, defaults={"lr": 1.0})
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    assert [float(param.detach().mean()) for param in params] == [-1, -10, -1]


# -- at several ranks --------------------------------------------------------------------------------------------------

AXES: dict[str, Sequence[Any]] = {
    "stage": (0, 1, 2, 3),
    "world": (1, 2, 3),
    "tier": (None, "cpu", "disk"),
    "bucket_bytes": (2048, 32 << 20),
    "kind": ("fp32", "bf16"),
}
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {"ema": 0.9, "weight_decay": 0.1}),
    "bf16": (torch.bfloat16, {"master": "split", "state_format": "bf16"}),
}


def optimizer_of(model: nn.Module, kind: str, folder: str | None = None, **where: Any) -> ShardedAdafactor:
    tier, bucket_bytes = where.pop("tier", None), where.pop("bucket_bytes", 32 << 20)
    tuning = Tuning(bucket_bytes=bucket_bytes, keep_below=0, compress_from=0, chunk_bytes=4096)
    offload = f"{folder}/{dist.get_rank() if dist.is_initialized() else 0}" if tier == "disk" else tier
    return ShardedAdafactor(model, lr=0.1, offload=offload, tuning=tuning, **{**KINDS[kind][1], **where})


def take(model: nn.Module, opt: ShardedAdafactor, steps: Sequence[int]) -> None:
    for step in steps:
        opt.zero_grad()
        for _ in range(2):  # accumulated
            model(step).backward()
        opt.step()


def bits(model: nn.Module, opt: ShardedAdafactor) -> list[bytes]:
    """Of params, and on rank 0 of states. Collective."""
    with opt.unsharded():
        found = [raw(param) for param in model.parameters()]
    opt.consolidate_state_dict()
    if not dist.is_initialized() or dist.get_rank() == 0:
        states = opt.state_dict()["state"].values()
        found += [raw(each) for state in states for each in state.values()]
    return found


def train(kind: str, folder: str | None = None, **where: Any) -> list[bytes]:
    model = Net(KINDS[kind][0])
    opt = optimizer_of(model, kind, folder, **where)
    take(model, opt, range(3))
    found = bits(model, opt)
    opt.close()
    return found


def train_all(rows: Sequence[tuple[Any, ...]], folder: str) -> list[list[bytes]]:
    found = []
    for stage, _, tier, bucket_bytes, kind in rows:
        found.append(train(kind, folder, stage=stage, tier=tier, bucket_bytes=bucket_bytes))
    return found


def check(rows: Sequence[tuple[Any, ...]], ranks: Pool, folder: Path) -> None:
    expected = {kind: train(kind, stage=0) for kind in KINDS}
    for world in (1, 2, 3):
        of_world = [row for row in rows if row[1] == world]
        for theirs in ranks.run(train_all, of_world, str(folder), world=world):
            for row, each in zip(of_world, theirs, strict=True):
                assert each == expected[row[-1]][: len(each)], row


def test_the_same_bits_everywhere(ranks: Pool, tmp_path: Path) -> None:
    check(drawn(AXES), ranks, tmp_path)


@pytest.mark.slow
def test_the_same_bits_in_every_combination(ranks: Pool, tmp_path: Path) -> None:
    check(grid(AXES), ranks, tmp_path)


def with_own_sums() -> list[bytes]:
    """A rank takes the sums of its shard for those of all."""
    all_reduce = Ranks.all_reduce

    def faulty(self: Ranks, vector: Tensor, phase: str) -> None:
        mine = vector.clone()
        all_reduce(self, vector, phase)
        if phase == margins._ADDING_UP:
            vector.copy_(mine)

    with patch.object(Ranks, "all_reduce", faulty):
        return train("fp32", stage=1)


def clipped(stage: int) -> list[Tensor]:
    """Params after steps with gradients of any number, unscaled and clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 40), nn.Conv1d(1, 4, 3))
    opt = ShardedAdafactor(model, stage=stage, max_grad_norm=0.3, tuning=Tuning(bucket_bytes=2048))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        torch.manual_seed(step)
        opt.zero_grad()
        loss = model(torch.randn(7, 1, 33)).square().mean()
        scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()  # of which the second is skipped
        scaler.step(opt)
        scaler.update()
    assert opt.updates == 2
    opt.consolidate_state_dict()
    with opt.unsharded():
        found = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return found


def test_sums_of_shards_show_and_clipped_steps_are_close(ranks: Pool) -> None:
    assert ranks.run(with_own_sums, world=2)[0] != train("fp32", stage=0)
    for theirs in ranks.run(clipped, 2, world=2):
        for mine, expected in zip(theirs, clipped(0), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


# -- on a device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [None, Offload(step="gpu"), Offload(step="cpu")])
@one_thread()
def test_a_device_has_the_same_bits(offload: Any) -> None:
    """On the stand-in of CUDA: sums of several buckets, margins by way of the host, factors back on the device."""
    start = values()
    here = as_params(start)
    on_host = stepped(here, Tensor.clone, None)
    margins_here = [raw(each) for param in here for each in on_host.state[param].values()]
    with Machine(world=1) as machine:
        there = [nn.Parameter(machine.tensor(each)) for each in start]
        opt = stepped(there, machine.tensor, offload)
        found = [param.detach().cpu() for param in there]
        margins_there = [raw(each.cpu()) for param in there for each in opt.state[param].values()]
        opt.close()
        assert machine.races == []
    for mine, theirs in zip(found, here, strict=True):
        assert torch.equal(mine, theirs.detach())
    assert margins_there == margins_here


def stepped(params: Sequence[nn.Parameter], move: Callable[[Tensor], Tensor], offload: Any) -> ShardedAdafactor:
    tuning = Tuning(bucket_bytes=4096, chunk_bytes=1024, compress_from=0)
    opt = ShardedAdafactor(params, lr=0.1, max_grad_norm=1.0, offload=offload, tuning=tuning)
    for step in range(2):
        for number, param in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + number)
            strides = torch.empty_like(param, device="cpu").stride()
            grad = torch.empty_strided(param.shape, strides).copy_(torch.randn(param.shape, generator=generator))
            param.grad = move(grad)
        opt.step()
    return opt


# -- states outside ----------------------------------------------------------------------------------------------------


def resumed(folder: str, stage: int, saves: bool) -> list[bytes]:
    model = Net(torch.float32)
    opt = optimizer_of(model, "fp32", stage=stage)
    if saves:
        take(model, opt, range(2))
        save_checkpoint(folder, model, opt)
    else:
        load_checkpoint(folder, model, opt)
    take(model, opt, [2])
    found = bits(model, opt)
    opt.close()
    return found


def test_a_checkpoint_loads_at_any_stage_and_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    expected = train("fp32", stage=0)
    assert ranks.run(resumed, str(tmp_path), 3, True, world=3)[0] == expected
    assert ranks.run(resumed, str(tmp_path), 1, False, world=2)[0] == expected
    assert resumed(str(tmp_path), 0, False) == expected


def test_states_are_torchs_both_ways() -> None:
    ours, theirs = as_params(values()), as_params(values())
    opt, plain = ShardedAdafactor(ours, lr=0.1), torch.optim.Adafactor(theirs, lr=0.1)
    for step in range(2):
        step_with(opt, step)
        step_with(plain, step)
    there, back = as_params(values()), as_params(values())
    from_torch, to_torch = ShardedAdafactor(there), torch.optim.Adafactor(back)
    with torch.no_grad():
        for mine, other in zip(there + back, theirs + ours, strict=True):
            mine.copy_(other)
    from_torch.load_state_dict(copy.deepcopy(plain.state_dict()))
    to_torch.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each in (opt, plain, from_torch, to_torch):
        step_with(each, 2)
    for first, second, third, fourth in zip(ours, theirs, there, back, strict=True):
        for other in (second, third, fourth):
            torch.testing.assert_close(other, first, rtol=2e-6, atol=2e-7)
    assert from_torch.param_groups[0]["lr"] == 0.1


def test_states_are_copied_forgotten_and_checked() -> None:
    model = nn.Linear(30, 20)
    opt = ShardedAdafactor(model.parameters(), lr=0.1)
    step_with(opt, 0)
    other_model, other = copy.deepcopy((model, opt))
    before, state = copy.deepcopy(opt.state_dict()), opt.state[model.weight]
    step_with(opt, 1)
    assert not torch.equal(state["row_var"], before["state"][0]["row_var"])  # live; the copy is not
    step_with(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    assert opt.memory()["state"]["device"] == 4 * (30 + 20) + 4 * 256  # the margins, and a block for the bias
    opt.add_param_group({"params": [nn.Parameter(torch.ones(4, 5, 6))], "lr": 0.2})
    step_with(opt, 2)
    assert opt.state[opt.param_groups[1]["params"][0]]["col_var"].shape == (4, 1, 6)
    wrong = copy.deepcopy(before)
    wrong["state"][0]["row_var"] = torch.ones(20, 30)
    with pytest.raises(StateError, match=r"row_var of param 0.*shape \(20, 30\).*needs \(20, 1\)"):
        other.load_state_dict(wrong)
    del wrong["state"][0]["row_var"]
    with pytest.raises(StateError, match=r"missing \['row_var'\]"):
        other.load_state_dict(wrong)
    other.state = {}
    assert not other.state
    fresh = ShardedAdafactor(nn.Linear(30, 20).parameters())
    prepare_states(fresh)
    assert all(not value.any() for each in fresh.state.values() for value in each.values())


# -- errors ------------------------------------------------------------------------------------------------------------


def fail_on_one_rank(folder: str, is_on_disk: bool, fails_in: str) -> None:
    model = Net(torch.float32)
    opt = optimizer_of(model, "fp32", folder, tier="disk" if is_on_disk else None)
    take(model, opt, [0])
    before = {param: dict(opt.state[param]) for param in model.parameters()}

    odd = dist.get_rank() == 1
    told: Any = (CommunicationError, "look at the output of")
    if is_on_disk:
        told = (DisagreementError, "cannot take this step, so no rank does and nothing changed", "no room")

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    with (
        patch.object(margins, fails_in, fails if odd else getattr(margins, fails_in)),
        raises(MemoryError, "no room") if odd else raises(*told),
    ):
        take(model, opt, [1])
    if is_on_disk:
        after = {param: dict(opt.state[param]) for param in model.parameters()}
        assert all(raw(after[param][name]) == raw(value) for param in before for name, value in before[param].items())
        take(model, opt, [1, 2])
        assert bits(model, opt) == train("fp32", stage=1)
    else:
        with pytest.raises(ShardoptError, match="half-way"):
            opt.step()


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("fails_in", ["_add_own", "_made"])  # before the ranks meet, and between two meetings
def test_a_rank_that_cannot_add_up(fails_in: str, is_on_disk: bool, ranks: Pool, tmp_path: Path) -> None:
    """The others are told when they meet next: none waits for its deadline, whose error names no output to look at."""
    ranks.run(fail_on_one_rank, str(tmp_path), is_on_disk, fails_in, world=2)


def test_released_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"omit release_gradients.*adafactor takes norms"):
        ShardedAdafactor(Net(torch.float32), release_gradients=True)
