"""Trainings whose masters and states are kept in less than fp32: the same bits wherever they run and after each resume.

Gradients are whole numbers, other ones on every rank, with the same mean at every number of ranks. So each training has
the bits of one rank alone, at stage 1, with params only and everything in memory (whose kernels test_kernels.py
compares with NumPy).
"""

import copy
import functools
import io
import itertools
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardopt
from shardopt import (
    BindingError,
    CheckpointError,
    OffloadError,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    Tuning,
)
from shardopt.errors import DisagreementError
from shardopt.kernels import codecs
from shardopt.kernels.formats import BF16, FP32, SIGNED8, UNSIGNED8, BlockFormat
from tests.offload.test_offload_faults import Faulty, system
from tests.support.cases import CASES, KEPT, KEPT_IN, MASTERS, STATE_FORMATS, Case
from tests.support.comparing import raw, values_of
from tests.support.ranks import Pool
from tests.support.training import raises

STAGES, WORLDS, TIERS = (0, 1, 2, 3), (1, 2, 3), ("device", "cpu", "disk")
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (257,), (24, 24), (7, 300), (3, 256), (511,)]
ABSENT = 5  # at times, and large enough that a shard holds nothing else


@dataclass(frozen=True)
class Recipe:
    """How to train. Nothing of it says where."""

    case: int
    master: str
    state_format: Any
    dtype: torch.dtype = torch.bfloat16
    steps: int = 5
    compress_from: int = 1
    seed: int = 0
    ema: float | None = None
    keywords: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def of(self) -> Case:
        return CASES[self.case]

    @property
    def sums(self) -> str:
        """The format of gradients' sums in the few settings of the default run.

        Mostly bf16: the kernel is then that of a training without a module, and a kernel takes a second to compile.
        """
        return "fp32" if self.case % 4 == 1 else "bf16"

    def __str__(self) -> str:
        return f"{self.of}-{self.master}-{self.state_format}-{str(self.dtype)[6:]}"


@dataclass(frozen=True)
class Setting:
    """Where to train. None of it may change a bit."""

    stage: int = 1
    tier: str = "device"
    bucket_bytes: int = 1500
    keep_below: int = 300
    module: bool = True
    gradient_format: str = "fp32"  # of the sums of bf16 params, where the module is handed over


ALONE = Setting(module=False)
# Every rule, and every format of a master with every format of states.
RECIPES = [
    *(Recipe(index, *formats) for index, formats in enumerate(KEPT_IN.values())),
    *(Recipe(0, *formats) for formats in KEPT[len(CASES) :]),
    Recipe(0, "fp32", "int8", torch.float32, ema=0.9),
    Recipe(0, "none", {"exp_avg": "int8", "exp_avg_sq": "bf16"}, seed=7, compress_from=500, ema=0.9),
    Recipe(2, "none", "bf16", keywords={"lr": 0.01}),  # without a state
]
EVERYTHING = [
    Recipe(index, master, states)
    for index, master, states in itertools.product(range(len(CASES)), MASTERS, STATE_FORMATS)
]


class Cell(nn.Module):
    """Owns one param, whose gradient are the coefficients."""

    def __init__(self, weight: Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, coefficients: Tensor) -> Tensor:
        return (self.weight * coefficients.to(self.weight.dtype)).sum().float()


class Cells(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
        weights.append(torch.randn(40, 30, generator=generator).t())
        self.cells = nn.ModuleList(Cell(Parameter(weight.to(dtype))) for weight in weights)

    def forward(self, step: int) -> Tensor:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        total = torch.zeros(())
        for which, cell in enumerate(self.cells):
            if (step, which) in ((1, ABSENT), (3, ABSENT)):
                continue
            own = drawn(cell.weight.shape, 8, step, which) + (2 * rank - world + 1) * drawn(
                cell.weight.shape, 4, step, which, 1
            )
            total = total + cell(own)
        return total


def drawn(shape: torch.Size, most: int, *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(functools.reduce(lambda total, each: 131 * total + each, seed, 1))
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def build(recipe: Recipe, setting: Setting, folder: str) -> tuple[Cells, ShardedOptimizer]:
    model = Cells(recipe.dtype)
    tuning = Tuning(
        bucket_bytes=setting.bucket_bytes,
        keep_below=setting.keep_below,
        live_bytes=0,
        chunk_bytes=1024,  # of some params several
        compress_from=recipe.compress_from,
        seed=recipe.seed,
    )
    params = list(model.parameters())
    keywords = recipe.of.keywords[-1] if recipe.keywords is None else recipe.keywords
    options: dict[str, Any] = {"stage": setting.stage, "tuning": tuning, "master": recipe.master, "ema": recipe.ema}
    if setting.module and recipe.dtype is torch.bfloat16:
        options["gradient_format"] = setting.gradient_format
    optimizer = recipe.of.ours(
        [{"params": params[:4]}, {"params": params[4:], "lr": 0.004}],
        **copy.deepcopy(keywords),
        **options,
        module=model if setting.module else None,
        state_format=recipe.state_format,
        offload={"device": None, "cpu": "cpu", "disk": folder}[setting.tier],
    )
    return model, optimizer


def train(model: nn.Module, optimizer: ShardedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def trained(recipe: Recipe, setting: Setting, folder: str) -> dict[str, str]:
    model, optimizer = build(recipe, setting, folder)
    train(model, optimizer, range(recipe.steps))
    found = values_of(model, optimizer)
    optimizer.close()
    return found


def all_trained(calls: Sequence[tuple[Recipe, Setting]], folder: str) -> list[dict[str, str]]:
    return [trained(*call, folder) for call in calls]


_alone: dict[str, dict[str, str]] = {}


def alone(recipe: Recipe) -> dict[str, str]:
    key = repr(recipe)
    if key not in _alone:
        _alone[key] = trained(recipe, ALONE, "")
    return _alone[key]


def check(found: dict[str, str], expected: dict[str, str], where: Any) -> None:
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    assert not wrong and found.keys() == expected.keys(), f"{where}: not the same bits: {wrong}"


# -- the same bits everywhere ------------------------------------------------------------------------------------------


def few(world: int) -> list[tuple[Recipe, Setting]]:
    """Each recipe once: over all numbers of ranks every stage meets every tier."""
    draw, turns = random.Random(world), enumerate(RECIPES, world)
    return [
        (
            recipe,
            Setting(
                turn % 4,
                TIERS[(turn + turn // 4 + world) % 3],
                draw.choice((1500, 6000, 1 << 20)),
                draw.choice((1, 300)),
                gradient_format=recipe.sums,
            ),
        )
        for turn, recipe in turns
    ]


def grid(recipes: Sequence[Recipe], world: int) -> list[tuple[Recipe, Setting]]:
    """Every stage for each recipe, on one of the numbers of ranks; tiers and the rest by turns."""
    draw = random.Random(world)
    return [
        (
            recipe,
            Setting(
                stage, TIERS[(number + stage + world) % 3], draw.choice((1500, 6000, 1 << 20)), draw.choice((1, 300))
            ),
        )
        for number, recipe in enumerate(recipes)
        for stage in STAGES
        if (number + stage + world) % 3 == 0
    ]


def check_everywhere(calls: Sequence[tuple[Recipe, Setting]], world: int, ranks: Pool, folder: Path) -> None:
    by_rank = ranks.run(all_trained, calls, str(folder), world=world)
    for number, (recipe, setting) in enumerate(calls):
        check(by_rank[0][number], alone(recipe), (str(recipe), setting))
        for each in by_rank[1:]:
            params = {name: digest for name, digest in alone(recipe).items() if " of " not in name}
            check(each[number], params, (str(recipe), setting))


def test_few_are_enough() -> None:
    met = {(setting.stage, setting.tier) for world in WORLDS for _, setting in few(world)}
    assert met == set(itertools.product(STAGES, TIERS))


@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_everywhere(world: int, ranks: Pool, tmp_path: Path) -> None:
    check_everywhere(few(world), world, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_at_every_stage(world: int, ranks: Pool, tmp_path: Path) -> None:
    check_everywhere(grid(RECIPES, world), world, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("quarter", range(4))
def test_same_bits_of_everything(quarter: int, world: int, ranks: Pool, tmp_path: Path) -> None:
    check_everywhere(grid(EVERYTHING[quarter::4], world), world, ranks, tmp_path)


def test_formats_change_bits() -> None:
    """Or the comparisons above would compare fp32 with itself; so does the seed of what is rounded randomly."""
    plain, found = Recipe(0, "fp32", "fp32"), {}
    for name, recipe in {
        "fp32": plain,
        "none": replace(plain, master="none"),
        "seed": replace(plain, master="none", seed=1),
        "split24": replace(plain, master="split24"),
        "int8": replace(plain, state_format="int8"),
        "bf16": replace(plain, state_format="bf16"),
        "some": replace(plain, state_format="int8", compress_from=600),
    }.items():
        found[name] = alone(recipe)["cells.5.weight"] + str(alone(recipe).get("exp_avg of 5"))
        found[name] += str(alone(recipe).get("master of 5")) + str(alone(recipe).get("exp_avg of 3"))
    assert len(set(found.values())) == len(found)


def test_every_param_and_step_draws_anew() -> None:
    """The same values, gradients and rate everywhere; a third of a gap is cut off."""
    params = [Parameter(torch.ones(5000, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ShardedSGD(params, lr=2.0**-7 / 3, master="none")
    seen = []
    for _ in range(2):
        for param in params:
            param.grad = -torch.ones_like(param)
        optimizer.step()
        seen += [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.fill_(1)
    for draw in seen:
        assert set(draw.tolist()) == {1.0, 1 + 2.0**-7}
        assert abs(float((draw > 1).float().mean()) - 1 / 3) < 4 * math.sqrt(2 / 9 / 5000)
    for one, other in itertools.combinations(seen, 2):  # alike in 1/9 + 4/9 of the places, as strangers are
        assert abs(float((one == other).float().mean()) - 5 / 9) < 4 * math.sqrt(20 / 81 / 5000)


@pytest.mark.parametrize("states", STATE_FORMATS)
def test_split_is_fp32(states: str) -> None:
    """A split master is an fp32 master: the same states, masters, and params but for ties."""
    whole, split = alone(Recipe(0, "fp32", states)), alone(Recipe(0, "split", states))
    assert {name: digest for name, digest in whole.items() if " of " in name} == {
        name: digest for name, digest in split.items() if " of " in name
    }


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_bytes_and_formats(tmp_path: Path) -> None:
    """Per element: what the format says; params that are small keep their states in fp32."""
    numel = 40 * 256
    for master, states, expected in [
        ("fp32", "fp32", (4, 8)),
        ("split", "bf16", (2, 4)),
        ("split24", "int8", (1, 2 + 2 * 4 / 256)),
        ("none", {"exp_avg_sq": "int8"}, (0, 5 + 4 / 256)),
    ]:
        for offload in (None, "cpu", tmp_path):
            params = [Parameter(torch.ones(numel, dtype=torch.bfloat16))]
            optimizer = ShardedAdamW(params, master=master, state_format=states, offload=offload)  # type: ignore[arg-type]
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
            memory = optimizer.memory()
            assert (sum(memory["master"].values()), sum(memory["state"].values())) == tuple(
                numel * each for each in expected
            )
            optimizer.close()


def test_one_wide_param_shrinks_and_a_small_one_does_not() -> None:
    params = [Parameter(torch.ones(5000)), Parameter(torch.ones(4095)), Parameter(torch.ones(4096))]
    optimizer = ShardedAdamW(params, state_format="int8")
    for param in params:
        param.grad = torch.linspace(0.1, 1, param.numel())
    optimizer.step()
    distinct = [optimizer.state[param]["exp_avg"][:256].unique().numel() for param in params]
    assert distinct[1] == 256 and distinct[0] < 128 and distinct[2] < 128


# -- state dicts -------------------------------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ORDERS = tuple(itertools.product((0, 2, 4), (True, False)))  # steps before loading, whether weights are loaded first


def resumptions() -> Iterator[Any]:
    """Each recipe on one tier in one of the orders, so that every two of these meet; all of it in the slow run."""
    for number, recipe in enumerate(RECIPES):
        tier, other = ("device", "disk") if number % 2 else ("disk", "device")
        order = ORDERS[number // 2 % len(ORDERS)]
        yield pytest.param(recipe, tier, (order,), id=f"{recipe}-{tier}")
        for each in (tier, other):
            yield pytest.param(recipe, each, ORDERS, id=f"{recipe}-{each}-all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("recipe", "tier", "orders"), list(resumptions()))
def test_a_state_dict_resumes_with_the_same_bits(
    recipe: Recipe, tier: str, orders: Sequence[tuple[int, bool]], tmp_path: Path
) -> None:
    """Loaded before the first step or in mid-training, before the weights or after them; and a deep copy."""
    setting = replace(ALONE, tier=tier)
    model, optimizer = build(recipe, setting, str(tmp_path))
    train(model, optimizer, range(3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = through_a_file(optimizer.state_dict())
    twin, its = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, recipe.steps))
    check(values_of(model, optimizer), alone(recipe), "the training itself")
    train(twin, its, range(3, recipe.steps))
    check(values_of(twin, its), alone(recipe), "a deep copy")
    for started, weights_first in orders:
        other, fresh = build(recipe, setting, str(tmp_path))
        train(other, fresh, range(started))
        for loads_weights in (weights_first, not weights_first):
            if loads_weights:
                other.load_state_dict(weights)
            else:
                fresh.load_state_dict(saved)
        order = f"after {started} steps, {'weights' if weights_first else 'states'} first"
        check_same_dict(fresh.state_dict(), saved, order)
        path = shardopt.save_checkpoint(tmp_path / "of-the-loaded", other, fresh).wait()
        train(other, fresh, range(3, recipe.steps))
        check(values_of(other, fresh), alone(recipe), order)
        shardopt.load_checkpoint(path, other, fresh)
        check_same_dict(fresh.state_dict(), saved, f"{order}, from a checkpoint")
        fresh.close()


def check_same_dict(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for key, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][key][name]), torch.as_tensor(value)), (where, key, name)


@pytest.mark.parametrize("states", STATE_FORMATS)
def test_states_go_to_torch_and_come_back(states: str) -> None:
    recipe = Recipe(0, "fp32", states, torch.float32, keywords={"lr": 0.01})
    model, optimizer = build(recipe, ALONE, "")
    train(model, optimizer, range(3))
    theirs = torch.optim.AdamW([{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups])
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    for param, state in theirs.state.items():
        assert all(raw(state[name]) == raw(value) for name, value in optimizer.state[param].items())
    other, fresh = build(recipe, ALONE, "")
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(theirs.state_dict())
    train(other, fresh, range(3, 5))
    check(values_of(other, fresh), alone(recipe), "by way of torch")
    train(model, theirs, range(3, 5))  # type: ignore[arg-type]
    assert all(bool(param.isfinite().all()) for param in model.parameters())


FORMATS_OF = {  # of exp_avg and exp_avg_sq
    "fp32": (FP32, FP32),
    "int8": (SIGNED8, UNSIGNED8),
    "bf16": (BF16, BF16),
}


@pytest.mark.parametrize("to", STATE_FORMATS)
@pytest.mark.parametrize("source", STATE_FORMATS)
def test_states_are_loaded_into_another_format(source: str, to: str) -> None:
    """As near as the format allows, which for what was in it is exactly."""
    masters = {"fp32": "fp32", "int8": "split", "bf16": "none"}
    of, into = (Recipe(0, masters[each], each, keywords={"lr": 0.01}) for each in (source, to))
    model, optimizer = build(of, ALONE, "")
    train(model, optimizer, range(3))
    other, fresh = build(into, ALONE, "")
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    train(other, fresh, range(0))
    check_loaded(optimizer, list(model.parameters()), fresh, list(other.parameters()), to)


def check_loaded(
    saved: ShardedOptimizer, its_params: list[Parameter], loaded: ShardedOptimizer, params: list[Parameter], to: str
) -> None:
    for param in params:
        param.grad = None
    loaded.step()  # of nothing: binds
    for mine, theirs in zip(its_params, params, strict=True):
        for name, format in zip(("exp_avg", "exp_avg_sq"), FORMATS_OF[to], strict=True):
            value = saved.state[mine][name].contiguous()
            if mine.dim() == 2 and not mine.is_contiguous():
                value = saved.state[mine][name].t().contiguous()
            expected = codecs.decode(*codecs.encode(value.reshape(-1), format), format)
            found = loaded.state[theirs][name]
            found = found.t() if mine.dim() == 2 and not mine.is_contiguous() else found
            assert raw(found.contiguous()) == raw(expected), name
            if not isinstance(format, BlockFormat):
                continue
            assert float((expected - value.reshape(-1)).abs().max() if value.numel() else 0) <= 0.04 * float(
                value.abs().max() if value.numel() else 0
            )


def tied_masters() -> Tensor:
    """Half-way between two bf16 numbers, the even one below and above, both signs; and others."""
    upper = torch.arange(0x3F80, 0x3F80 + 150, dtype=torch.int32)
    ties = ((upper << 16) + 0x8000).view(torch.float32)
    return torch.cat([ties, -ties, ties * (1 + 2.0**-20)])


@pytest.mark.parametrize("to", ["fp32", "split"])
@pytest.mark.parametrize("source", ["fp32", "split"])
def test_masters_that_are_ties_go_over(source: str, to: str) -> None:
    """Split masters are rounded away from zero, fp32 ones to even: the params of the one are not the other's.

    Nothing of the master is lost by that but the last of its bits, where 16 of them cannot hold the difference.
    """
    masters = tied_masters()
    param = Parameter(masters.bfloat16())
    optimizer = ShardedAdamW([param], master=source, lr=0.0, weight_decay=0.0)  # type: ignore[arg-type]
    param.grad = torch.ones_like(param)
    state = {name: torch.ones(len(masters)) for name in ("exp_avg", "exp_avg_sq")}
    saved = {"state": {0: {**state, "master": masters, "step": torch.tensor(1.0)}}}
    if source == "split":
        with torch.no_grad():
            away = (masters.view(torch.int32) + 0x8000 >> 16).short().view(torch.bfloat16)
            param.copy_(away)
    optimizer.load_state_dict({**optimizer.state_dict(), **saved})
    optimizer.step()
    assert raw(optimizer.state[param]["master"]) == raw(masters) or source == "split"
    other = Parameter(param.detach().clone())
    fresh = ShardedAdamW([other], master=to, lr=0.0, weight_decay=0.0)  # type: ignore[arg-type]
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    other.grad = torch.ones_like(other)
    fresh.step()
    found = fresh.state[other]["master"]
    away = (found.view(torch.int32) - masters.view(torch.int32)).abs()
    assert int(away.max()) <= (1 if (source, to) == ("fp32", "split") else 0)


@pytest.mark.parametrize("master", ["fp32", "split", "split24"])
def test_weights_of_another_model_count_more_than_masters(master: str) -> None:
    """Whether they are loaded before or after states that hold no master, or later on."""
    recipe = Recipe(0, master, "fp32", keywords={"lr": 0.01})
    model, optimizer = build(recipe, ALONE, "")
    train(model, optimizer, range(2))
    saved = through_a_file(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("master")
    for order in ("before", "after", "later"):
        other, fresh = build(recipe, ALONE, "")
        train(other, fresh, range(3))
        with torch.no_grad():
            if order == "after":
                fresh.load_state_dict(copy.deepcopy(saved))
            for param in other.parameters():
                param.fill_(1.5)
            if order == "before":
                fresh.load_state_dict(copy.deepcopy(saved))
        for group in fresh.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        train(other, fresh, range(3, 4))
        for param in other.parameters():
            if param.grad is not None:
                found = fresh.state[param]["master"]
                found = found.bfloat16() if master == "fp32" else found  # which is kept where it rounds to the param
                assert bool((found == 1.5).all()) and bool((param == 1.5).all()), order


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_half_way(calls: Sequence[tuple[Recipe, Setting]], folder: str) -> None:
    for number, (recipe, setting) in enumerate(calls):
        model, optimizer = build(recipe, setting, f"{folder}/swap")
        train(model, optimizer, range(3))
        shardopt.save_checkpoint(f"{folder}/{number}", model, optimizer)
        optimizer.close()


def go_on(calls: Sequence[tuple[Recipe, Setting]], folder: str) -> list[dict[str, str]]:
    found = []
    for number, (recipe, setting) in enumerate(calls):
        model, optimizer = build(recipe, setting, f"{folder}/swap")
        train(model, optimizer, range(number % 3))  # before the first step, too
        shardopt.load_checkpoint(f"{folder}/{number}", model, optimizer)
        train(model, optimizer, range(3, recipe.steps))
        found.append(values_of(model, optimizer))
        optimizer.close()
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_with_the_same_bits(before: int, after: int, ranks: Pool, tmp_path: Path) -> None:
    """At another number of ranks, another stage, another tier."""
    (tmp_path / "swap").mkdir()
    recipes = RECIPES[before::2]
    ranks.run(save_half_way, grid_of_one(recipes, before), str(tmp_path), world=before)
    by_rank = ranks.run(go_on, grid_of_one(recipes, after + 1), str(tmp_path), world=after)
    for number, recipe in enumerate(recipes):
        check(by_rank[0][number], alone(recipe), str(recipe))


def grid_of_one(recipes: Sequence[Recipe], shift: int) -> list[tuple[Recipe, Setting]]:
    return [
        (recipe, Setting((number + shift) % 4, TIERS[(number + 2 * shift) % 3], gradient_format=recipe.sums))
        for number, recipe in enumerate(recipes)
    ]


@pytest.mark.parametrize(("source", "to"), [("int8", "bf16"), ("bf16", "fp32"), ("fp32", "int8")])
def test_a_checkpoint_is_loaded_into_other_formats(source: str, to: str, tmp_path: Path) -> None:
    masters = {"fp32": "fp32", "int8": "split", "bf16": "none"}
    of, into = (Recipe(0, masters[each], each, keywords={"lr": 0.01}) for each in (source, to))
    model, optimizer = build(of, ALONE, "")
    train(model, optimizer, range(3))
    shardopt.save_checkpoint(tmp_path, model, optimizer)
    other, fresh = build(into, ALONE, "")
    losses = " ".join(shardopt.load_checkpoint(tmp_path, other, fresh).losses)
    assert ("master" in losses) == ("exp_avg_sq" in losses) == (to != "fp32")
    if masters[source] == "split" and masters[to] == "fp32":
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert raw(optimizer.state[mine]["master"]) == raw(fresh.state[theirs]["master"])
    check_loaded(optimizer, list(model.parameters()), fresh, list(other.parameters()), to)


# -- the moving average of the weights ---------------------------------------------------------------------------------

DECAY = 0.8


def averages_beside_torch(dtype: torch.dtype, settings: Sequence[Setting], folder: str) -> None:
    """Params in low precision are averaged as their masters, which are the params of the same training in fp32."""
    master = "fp32" if dtype is torch.float32 else "split"
    recipe = Recipe(0, master, "fp32", dtype, keywords={"lr": 0.05, "weight_decay": 0.1}, ema=DECAY)
    reference = Cells(dtype).float()
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    params = list(reference.parameters())
    theirs = ShardedAdamW([{"params": params[:4]}, {"params": params[4:], "lr": 0.004}], lr=0.05, weight_decay=0.1)
    for step in range(6):
        theirs.zero_grad()
        mean = mean_gradients(reference, step)
        for param, grad in zip(params, mean, strict=True):
            param.grad = grad
        theirs.step()
        averaged.update_parameters(reference)
    for setting in settings:
        model, optimizer = build(recipe, setting, folder)
        train(model, optimizer, range(6))
        weights = [raw(whole) for whole in whole_params(model, optimizer)]
        with optimizer.unsharded(ema=True):
            for (name, mine), expected in zip(model.named_parameters(), averaged.module.parameters(), strict=True):
                if name.split(".")[1] == str(ABSENT):  # torch's counts the steps that it was not updated in
                    continue
                torch.testing.assert_close(mine.float(), expected.to(dtype).float(), rtol=ROUNDING[dtype], atol=1e-7)
                assert mine.numel() < 2 or not torch.equal(mine.float(), dict(reference.named_parameters())[name])
        assert [raw(whole) for whole in whole_params(model, optimizer)] == weights
        optimizer.close()


ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}


def whole_params(model: nn.Module, optimizer: ShardedOptimizer) -> list[Tensor]:
    with optimizer.unsharded():
        return [param.detach().clone() for param in model.parameters()]


def mean_gradients(model: Cells, step: int) -> list[Tensor | None]:
    return [
        None if step in (1, 3) and which == ABSENT else drawn(cell.weight.shape, 8, step, which)
        for which, cell in enumerate(model.cells)
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_the_average_is_that_of_torch(world: int, ranks: Pool, tmp_path: Path) -> None:
    settings = [Setting(stage, TIERS[stage % 3]) for stage in STAGES]
    for dtype in (torch.float32, torch.bfloat16):
        ranks.run(averages_beside_torch, dtype, settings, str(tmp_path), world=world)


@pytest.mark.parametrize("is_bound", [False, True])
def test_an_average_begins_with_the_weights_that_are_loaded(is_bound: bool) -> None:
    """Whichever is loaded first, they or states that were saved without one."""

    def linear(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        model = nn.Linear(40, 30)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return model

    source = linear(0)
    saved = ShardedAdamW(source.parameters())
    saved.step()
    model = linear(1)
    optimizer = ShardedAdamW(model.parameters(), ema=0.9)
    if is_bound:
        optimizer.step()
    optimizer.load_state_dict(saved.state_dict())
    model.load_state_dict(source.state_dict())
    if is_bound:
        with optimizer.unsharded(ema=True):
            assert raw(model.weight) == raw(source.weight)
    begun = source.weight.detach().clone()
    optimizer.step()
    expected = begun + torch.tensor(1 - 0.9) * (model.weight.detach() - begun)
    with optimizer.unsharded(ema=True):
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=0)


def test_there_is_no_average_before_a_step() -> None:
    model = nn.Linear(40, 30)
    optimizer = ShardedAdamW(model.parameters(), ema=0.9)
    shardopt.prepare_states(optimizer)
    with pytest.raises(ShardoptError, match="take a step before"), optimizer.unsharded(ema=True):
        pass


def guards_its_weights(setting: Setting, folder: str) -> None:
    recipe = Recipe(0, "split", "fp32", keywords={"lr": 0.05}, ema=DECAY)
    expected = trained(replace(recipe, steps=4), setting, folder)
    model, optimizer = build(recipe, setting, folder)
    train(model, optimizer, range(3))
    before, states = values_of(model, optimizer), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    model(3).backward()
    with optimizer.unsharded(ema=True):
        inside = optimizer.state_dict()
        masters = {index: raw(state["master"]) for index, state in inside["state"].items()}
        for call, what in (
            (lambda: optimizer.step(), r"step\(\)"),
            (lambda: optimizer.load_state_dict(states), "loading states"),
            (lambda: optimizer.refresh_masters(), r"refresh_masters\(\)"),
            (lambda: optimizer.close(), r"close\(\)"),
            (lambda: optimizer.unsharded(ema=True).__enter__(), r"unsharded\(ema=True\)"),
        ):
            with pytest.raises(ShardoptError, match=f"before {what}: inside"):
                call()
        with pytest.raises(CheckpointError, match=r"(show the average of the weights|are gathered)"):
            shardopt.save_checkpoint(Path(folder) / "inside", model, optimizer)
        assert torch.is_grad_enabled()
    assert masters == {index: raw(state["master"]) for index, state in optimizer.state_dict()["state"].items()}
    check(values_of(model, optimizer), before, "behind the average")
    optimizer.step()
    check(values_of(model, optimizer), expected, "a step behind the average")
    optimizer.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("setting", [Setting(1), Setting(3), Setting(3, "disk")], ids=lambda each: str(each)[8:28])
def test_an_average_is_not_taken_for_the_weights(setting: Setting, world: int, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(guards_its_weights, setting, str(tmp_path), world=world)


def reads_no_average_on_one_rank(folder: str) -> None:
    recipe, setting = Recipe(0, "split", "fp32", keywords={"lr": 0.05}, ema=DECAY), Setting(2, "disk")
    model, optimizer = build(recipe, setting, folder)
    train(model, optimizer, range(2))
    before = values_of(model, optimizer)
    fault = Faulty("read", "EIO" if dist.get_rank() == 1 else "none", 0)
    with system(fault), raises(OffloadError if dist.get_rank() == 1 else ShardoptError, "Input/output error"):
        optimizer.unsharded(ema=True).__enter__()
    check(values_of(model, optimizer), before, "behind an average that could not be read")
    with optimizer.unsharded(ema=True):  # nobody waits for a rank that gave up
        pass
    check(values_of(model, optimizer), before, "behind the average")
    optimizer.close()


def test_an_average_that_one_rank_cannot_read_is_an_error_on_all(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(reads_no_average_on_one_rank, str(tmp_path), world=2)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_kept_is_refused() -> None:
    params = [Parameter(torch.ones(3))]
    with raises(ValueError, "exp_avg_typo", "does not keep", "exp_avg_sq"):
        ShardedAdamW(params, state_format={"exp_avg_typo": "int8"})  # type: ignore[dict-item]
    with raises(ValueError, "momentum_buffer"):
        ShardedAdamW(params, state_format={"momentum_buffer": "bf16"})
    for case in CASES:
        for name, least in case.rule.tolerated.items():
            for each in STATE_FORMATS[: STATE_FORMATS.index(least)]:  # the coarser ones
                with raises(ValueError, name, each, f"use {least!r}"):
                    case.ours([Parameter(torch.ones(3))], state_format={name: each})
                case.ours([Parameter(torch.ones(3))], state_format=each)  # for all states: as far as they tolerate it
    with raises(ValueError, "ema", "int8", "bf16"):
        ShardedAdamW(params, ema=0.9, state_format={"ema": "int8"})
    for wrong in ("int4", None, {"exp_avg": "fp16"}):
        with raises((ValueError, TypeError), "state_format"):  # type: ignore[arg-type]
            ShardedAdamW(params, state_format=wrong)  # type: ignore[arg-type]
    for wrong_average in (1.0, -0.1, 2):
        with raises(ValueError, "ema"):
            ShardedAdamW(params, ema=wrong_average)
    with raises(ValueError, "master", "split24"):
        ShardedAdamW(params, master="bf16")  # type: ignore[arg-type]
    for seed in (1.5, "x", 2**63, True):
        with raises((ValueError, TypeError), "seed"):  # type: ignore[arg-type]
            Tuning(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("master", ["split", "split24", "none"])
def test_half_precision_has_fp32_masters(master: Any) -> None:
    param = Parameter(torch.ones(300, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    optimizer = ShardedAdamW([param], master=master)
    with raises(BindingError, master, "float16", "master='fp32'"):
        optimizer.step()
    assert bool((param == 1).all()) and not optimizer.state
    optimizer = ShardedAdamW([param], state_format="int8", tuning=Tuning(compress_from=1))
    optimizer.step()
    assert optimizer.state[param]["master"].dtype is torch.float32 and not bool((param == 1).any())


@pytest.mark.parametrize("master", ["split", "split24", "none"])
def test_a_master_that_says_nothing_is_warned_of(master: Any) -> None:
    """Once, where all params are fp32: one that is bf16 has it."""
    params = [Parameter(torch.ones(300)) for _ in range(2)]
    optimizer = ShardedAdamW(params[:1], master=master)
    for count in (1, 0):
        for param in params:
            param.grad = torch.ones_like(param)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert ["no effect" in str(each.message) and repr(master) in str(each.message) for each in caught] == [
            True
        ] * count
        if count:
            optimizer.add_param_group({"params": params[1:]})
    mixed = [Parameter(torch.ones(300)), Parameter(torch.ones(300, dtype=torch.bfloat16))]
    for options in ({"params": mixed, "master": master}, {"params": params}):
        optimizer = ShardedAdamW(**options)
        params[0].grad = mixed[0].grad = torch.ones(300)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


DIFFERENCES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("master", {"master": "split"}, {}),
    ("state_format", {"state_format": "int8"}, {"state_format": {"exp_avg": "int8"}}),
    ("state_format", {"state_format": {"exp_avg": "bf16"}}, {"state_format": {"exp_avg": "int8"}}),
    ("ema", {"ema": 0.9}, {"ema": 0.99}),
    ("compress_from", {"tuning": Tuning(compress_from=7)}, {}),
    ("seed", {"tuning": Tuning(seed=7)}, {"tuning": Tuning(seed=8)}),
]


def disagree() -> None:
    for name, first, second in DIFFERENCES:
        param = Parameter(torch.ones(300, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        optimizer = ShardedAdamW([param], **(first if dist.get_rank() == 0 else second))
        with raises(DisagreementError, name):
            optimizer.step()
        assert bool((param == 1).all()) and not optimizer.state


def test_ranks_that_disagree_are_told(ranks: Pool) -> None:
    ranks.run(disagree, world=2)
