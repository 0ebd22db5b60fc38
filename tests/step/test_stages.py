"""Stages 0 to 3 with the module handed over: same bits at every stage and world size, bytes held as promised.

Gradients are integers that autograd makes, other ones on every rank, whose mean over ranks is the same integer at every
world size. So a training on any number of ranks must leave the bits of the same training without a module and without
ranks (whose arithmetic test_parity.py compares with torch's), and every module must see these params at every step, in
forward and in backward.
"""

import functools
import math
import mmap
import random
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import shardopt
from shardopt import ShardedAdamW, ShardedOptimizer, ShardedSGD, Tuning
from shardopt.partition import reducer as reducer_module
from shardopt.partition.comm.reduce_scatter_peer import PeerReduceScatter
from shardopt.partition.memory import return_free_pages
from shardopt.tensors.gradient import GradientPart
from tests.support.cases import BLOCK, Zoo
from tests.support.cheats import CHEATS, REDUCING_CHEATS, cheating
from tests.support.comparing import digest, raw, states_of
from tests.support.moments import until
from tests.support.ranks import Pool
from tests.support.sweep import drawn
from tests.support.training import ddp

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)

# -- what is trained ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How to train. Nothing of it says where."""

    name: str = "AdamW"  # of the optimizer
    keywords: dict[str, Any] = field(default_factory=dict)
    steps: int = 12
    syncs: tuple[bool, ...] = (True,)  # for each backward of a step, whether it is synchronised
    clip: float | None = None  # by torch.nn.utils.clip_grad_norm_
    scaler: bool = False
    low: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype | None = None
    own_groups: bool = False  # for each param one, with rates of its own
    set_to_none: bool = True
    overflows: bool = False  # every other step, in one element on one rank


ADAMW = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
RECIPES = {
    "AdamW": Recipe("AdamW", ADAMW),
    "SGD": Recipe("SGD", SGD, low=torch.float32, clip=20.0),  # torch adds up norms dtype by dtype, in any order
    "accumulates in the shard": Recipe("SGD", SGD, syncs=(True, True, True)),
    "accumulates under no_sync": Recipe("AdamW", ADAMW, syncs=(False, False, True)),
    "now and then no_sync": Recipe("SGD", SGD, syncs=(True, False, False, True), reduce_dtype=torch.bfloat16),
    "clips in the step": Recipe("SGD", {**SGD, "max_grad_norm": 20.0}, reduce_dtype=torch.float32),
    "scaler": Recipe("SGD", SGD, scaler=True, clip=20.0, low=torch.float16, syncs=(True, True)),
    "fused scaler": Recipe("AdamW", {**ADAMW, "fused": True, "max_grad_norm": 40.0}, scaler=True),
    "own groups": Recipe("AdamW", ADAMW, own_groups=True, set_to_none=False),
    "overflows": Recipe("AdamW", ADAMW, steps=24, overflows=True),
    "overflows, scaler": Recipe("SGD", SGD, steps=16, overflows=True, scaler=True, syncs=(True, True)),
    "overflows, fused scaler": Recipe(
        "AdamW", {**ADAMW, "fused": True, "max_grad_norm": 40.0}, steps=16, overflows=True, scaler=True
    ),
}


@dataclass(frozen=True)
class Setting:
    """Where to train. None of it may change a bit."""

    stage: int
    wrapped: bool = False  # in DistributedDataParallel
    neighbours: bool = True
    bucket_bytes: int = 1200  # some params share a bucket, some have their own
    keep_below: int = 1
    live_bytes: int = 0
    hybrid: bool = False  # on a device mesh of two copies
    taken_over: bool = True  # False: DDP reduces, and the optimizer is given params only
    gradient_format: str = "fp32"  # where sums have few enough bits for the other one

    @property
    def ranks_differ(self) -> bool:
        """Whether each rank leaves some modules out: where no message waits for a call."""
        return self.taken_over and (self.stage < 3 or self.neighbours)

    def order(self, step: int, rank: int) -> list[int]:
        """Numbers of the cells as this step calls them: each rank in its own order, where units have none to keep."""
        seed = 100 * step + rank * self.ranks_differ
        if self.stage == 3 and self.ranks_differ:  # ranks may leave units out, of one order
            seed = 1
        found: list[int] = torch.randperm(CELLS, generator=torch.Generator().manual_seed(seed)).tolist()
        return found

    def options(self, recipe: Recipe) -> dict[str, Any]:
        tuning = Tuning(
            bucket_bytes=self.bucket_bytes,
            keep_below=self.keep_below,
            live_bytes=self.live_bytes,
            neighbours=self.neighbours,
        )
        options = {"stage": self.stage, "tuning": tuning, "reduce_dtype": recipe.reduce_dtype}
        if recipe.low is torch.bfloat16 and recipe.clip is None and self.taken_over:
            options["gradient_format"] = self.gradient_format
        return options


def drawn_setting(stage: int, world: int, number: int, hybrid: bool) -> Setting:
    """The same in every run; over a grid, all values of all knobs meet."""
    draw = random.Random(1000 * number + 10 * stage + world)
    return Setting(
        stage,
        wrapped=draw.random() < 0.5,
        neighbours=draw.random() < 0.5,
        bucket_bytes=draw.choice((1200, 3000, 1 << 20)),
        keep_below=draw.choice((1, BLOCK)),
        live_bytes=draw.choice((0, 6000, 1 << 20)),
        hybrid=hybrid,
        gradient_format=draw.choice(("fp32", "bf16")),
    )


# -- the module --------------------------------------------------------------------------------------------------------


class Notes:
    """What a cell is told and what it tells; outside of the module, whose attributes are slow to write."""

    coefficients: Tensor
    seen = 0  # checksum of the param in forward


class Cell(nn.Module):
    """Owns one param, whose gradient are the coefficients; theirs in turn is the param as backward saw it."""

    def __init__(self, weight: Parameter):
        super().__init__()
        self.weight = weight
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        self.notes.seen = checksum(weight)
        return x + (weight * self.notes.coefficients).sum().float()


class Cells(nn.Module):
    """A cell for every param of a zoo in fp32 and of one in low precision, tied ones in two cells each."""

    def __init__(self, low: torch.dtype, seed: int = 0):
        super().__init__()
        zoos = [Zoo(seed=seed), Zoo(low, seed=seed + 1)]
        params = [param for zoo in zoos for _, param in zoo.named_parameters(remove_duplicate=False)]
        # On 1, 2, 3 and 4 ranks it fills a bucket, which is then reduced where the gradient lies.
        params.append(Parameter(torch.linspace(-1, 1 + seed, 12 * BLOCK)))
        self.cells = nn.ModuleList(Cell(param) for param in params)
        self.order: list[int] = []  # of this forward

    def forward(self, x: Tensor) -> Tensor:
        cells = list(self.cells)
        for which in self.order:
            x = cells[which](x)
        return x


CELLS = len(Cells(torch.bfloat16).cells)
ABSENT_CELL = 4  # at times on all ranks; in all backwards of a step: no decay, no count
OVERFLOWING = {  # cell -> its elements
    which: cell.weight.numel()
    for which, cell in enumerate(Cells(torch.bfloat16).cells)
    if cell.weight.requires_grad and cell.weight.numel() and which != ABSENT_CELL
}


@functools.cache
def mean(step: int, micro: int, which: int, shape: torch.Size) -> Tensor | None:
    """Of the gradients of all ranks that a cell gives; None where it is in no graph."""
    if which == ABSENT_CELL and (step + micro) % 5 in (1, 2):
        return None
    return integers(shape, step, micro, which)


@functools.cache
def coefficients(
    step: int, micro: int, which: int, shape: torch.Size, rank: int, world: int, may_lack: bool
) -> Tensor | None:
    """This rank's. One rank takes what the sum lacks; another one, if it may, leaves the cell out."""
    whole = mean(step, micro, which, shape)
    if whole is None or world == 1:
        return whole
    lacking = (step + micro + which) % (2 * world) if may_lack else world
    balancing = (lacking + 1) % world

    def own(each: int) -> Tensor:
        return integers(shape, step, micro, which, 1 + each)

    if rank == lacking:
        return None
    if rank != balancing:
        return own(rank)
    return world * whole - sum(own(each) for each in range(world) if each not in (lacking, balancing))


def integers(shape: torch.Size, *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(functools.reduce(lambda total, each: 131 * total + each, seed))
    return torch.randint(-8, 9, shape, generator=generator).float()


@dataclass(frozen=True)
class Spoiled:
    """Where a step overflows."""

    which: int
    element: int
    rank: int
    value: float


def spoiled(recipe: Recipe, step: int, offset: int, world: int) -> Spoiled | None:
    """Every other step one element, the first, middle or last of each param in turn."""
    if not recipe.overflows or step % 2 == 0:
        return None
    number = step // 2 + offset
    which, numel = list(OVERFLOWING.items())[number % len(OVERFLOWING)]
    place = (number + number // len(OVERFLOWING)) % 3
    return Spoiled(
        which, (0, numel // 2, numel - 1)[place], number // 3 % world, (math.inf, -math.inf, math.nan)[place]
    )


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(raw(tensor))


# -- the training ------------------------------------------------------------------------------------------------------

Seen = set[tuple[int, int, str, int]]  # step, cell, forward or backward, checksum of the param


@dataclass
class Ended:
    """What a training leaves; states on rank 0 only."""

    params: list[Tensor]
    states: list[dict[str, Tensor]]
    seen: Seen


def make_optimizer(recipe: Recipe, params: Sequence[Parameter], module: nn.Module | None, **options: Any) -> Any:
    ours: Callable[..., ShardedOptimizer] = getattr(shardopt, f"Sharded{recipe.name}")
    if not recipe.own_groups:
        return ours(params if module is None else module, **recipe.keywords, **options)
    rates = [{"lr": 0.01 + 0.001 * number, "weight_decay": 0.01 * number} for number in range(len(params))]
    groups = [{"params": [param], **each} for param, each in zip(params, rates, strict=True)]
    return ours(groups, **recipe.keywords, **options, module=module)


def train(recipe: Recipe, setting: Setting, cheat: str | None = None, copies: DeviceMesh | None = None) -> Ended:
    """On ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cells = Cells(recipe.low, seed=rank)  # rank 0's values are shared at binding
    params = list(cells.parameters())
    model = DistributedDataParallel(cells, find_unused_parameters=True) if setting.wrapped else cells
    options = {**setting.options(recipe), "process_group": copies if setting.hybrid else None}
    optimizer = make_optimizer(recipe, params, model if setting.taken_over else None, **options)
    scheduler = CosineAnnealingLR(optimizer, T_max=recipe.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=recipe.scaler)
    seen: Seen = set()
    with cheating(cheat):
        for step in range(recipe.steps):
            bad = spoiled(recipe, step, 7 * setting.stage, world)
            optimizer.zero_grad(set_to_none=recipe.set_to_none)
            for micro, syncs in enumerate(recipe.syncs):
                paused = model if setting.wrapped else optimizer
                with nullcontext() if syncs else paused.no_sync():
                    prepare(cells, setting, step, micro, rank, world, bad if micro == 0 else None)
                    scaler.scale(model(torch.zeros(()))).backward()
                    note_what_was_seen(seen, cells, step, scaler.get_scale())
            if step % 3 == 2:  # evaluates; what is gathered for it must not stay over the step
                with torch.no_grad():
                    model(torch.zeros(()))
                note_what_was_seen(seen, cells, step, scaler.get_scale())
            if recipe.clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, recipe.clip)
            before = digest(optimizer) if bad else None
            with warnings.catch_warnings(record=bad is not None) as caught:
                warnings.simplefilter("always" if bad else "error")
                scaler.step(optimizer)
            scaler.update()
            if bad is not None:
                told = [str(each.message) for each in caught or ()]
                assert len(told) == (not recipe.scaler) and all("all ranks skipped" in each for each in told), told
                assert digest(optimizer) == before, f"a step that was skipped is not without effect: {bad}"
            scheduler.step()
    with optimizer.unsharded():
        values = [param.detach().clone() for param in params]
    return Ended(values, states_of(optimizer, params), seen)


def prepare(cells: Cells, setting: Setting, step: int, micro: int, rank: int, world: int, bad: Spoiled | None) -> None:
    """Says which cells the forward calls, in which order, with which coefficients."""
    cells.order = []
    every = list(cells.cells)
    for which in setting.order(step, rank):
        cell = every[which]
        may_lack = setting.ranks_differ and (bad is None or bad.which != which)
        found = coefficients(step, micro, which, cell.weight.shape, rank, world, may_lack)
        if found is not None:
            found = found.to(cell.weight.dtype, copy=True)
            if bad is not None and (bad.which, bad.rank) == (which, rank):
                found.view(-1)[bad.element] = bad.value
            cell.notes.coefficients = found.requires_grad_()
            cells.order.append(which)


def note_what_was_seen(seen: Seen, cells: Cells, step: int, scale: float) -> None:
    every = list(cells.cells)
    for which in cells.order:
        notes = every[which].notes
        grad = notes.coefficients.grad
        assert grad is not None
        seen |= {(step, which, "forward", notes.seen), (step, which, "backward", checksum(grad / scale))}


def with_steps(name: str, steps: int | None) -> Recipe:
    return RECIPES[name] if steps is None else replace(RECIPES[name], steps=steps)


@functools.cache
def reference(name: str, steps: int | None = None) -> Ended:
    """The training of ``params`` alone, in one process, all in fp32, without what overflows and without a scaler."""
    recipe = with_steps(name, steps)
    cells = Cells(recipe.low)
    dtypes = {each.weight: each.weight.dtype for each in cells.cells}
    for param in dtypes:
        param.data = param.data.float()
    params = list(cells.parameters())
    optimizer = make_optimizer(recipe, params, None)
    scheduler = CosineAnnealingLR(optimizer, T_max=recipe.steps)
    seen: Seen = set()
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        for which, cell in enumerate(cells.cells):
            param = cell.weight
            seen |= {(step, which, when, checksum(param.to(dtypes[param]))) for when in ("forward", "backward")}
            for micro in range(len(recipe.syncs)):
                grad = mean(step, micro, which, param.shape)
                if param.requires_grad and grad is not None:
                    param.grad = grad.clone() if param.grad is None else param.grad + grad
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(params, recipe.clip)
        if not (recipe.overflows and step % 2):
            optimizer.step()
        scheduler.step()
    return Ended([param.detach() for param in params], states_of(optimizer, params), seen)


# -- the comparison ----------------------------------------------------------------------------------------------------


def check_same_bits(expected: Ended, by_rank: Sequence[Ended], where: Any) -> None:
    for rank, ended in enumerate(by_rank):
        for which, (mine, theirs) in enumerate(zip(ended.params, expected.params, strict=True)):
            assert raw(mine) == raw(theirs.to(mine.dtype)), f"{where}: param {which} is not right on rank {rank}"
    for which, (mine, theirs) in enumerate(zip(by_rank[0].states, expected.states, strict=True)):
        states = dict(mine)
        if by_rank[0].params[which].dtype != torch.float32 and theirs:
            master = states.pop("master")
            assert raw(master) == raw(expected.params[which]), f"{where}: master {which} is not right"
        assert list(states) == list(theirs), f"{where}: states of param {which} are not those expected"
        for name, value in states.items():
            assert raw(value) == raw(theirs[name]), f"{where}: {name} {which} is not right"
    for rank, ended in enumerate(by_rank):
        wrong = sorted(ended.seen - expected.seen)
        assert ended.seen and not wrong, f"{where}: what cells saw is not right, rank {rank}: {wrong[0]}"


def trainings(calls: Sequence[tuple[Recipe, Setting, str | None]]) -> list[Ended]:
    """Several on the same ranks."""
    copies = init_device_mesh("cpu", (2, 2)) if any(setting.hybrid for _, setting, _ in calls) else None
    return [train(*call, copies) for call in calls]


# -- bits --------------------------------------------------------------------------------------------------------------


# In few steps as in many: other params on other ranks, params that are in no graph, an evaluation, a scale that grows.
FEW_STEPS = 5
# Those that others hold: "AdamW" trains for many steps below, "overflows" has a test of its own.
DAILY = [name for name in RECIPES if name not in ("AdamW", "fused scaler", "overflows")]
PLACES = ((1, False), (2, False), (3, False), (4, True))  # ranks, and whether they are two copies


def few() -> dict[int, list[tuple[str, Setting]]]:
    """By number of ranks: every recipe meets every stage and every place, every stage every place."""
    calls: dict[int, list[tuple[str, Setting]]] = {world: [] for world in WORLDS}
    rows = drawn({"name": DAILY, "stage": STAGES, "place": PLACES})
    for number, (name, stage, (world, hybrid)) in enumerate(rows):
        setting = drawn_setting(stage, world, number, hybrid)
        if stage == 3 and not setting.neighbours:  # a message for each bucket, forward and backward
            setting = replace(setting, bucket_bytes=max(setting.bucket_bytes, 12000))
        calls[world].append((name, setting))
    return calls


def grid(world: int) -> list[tuple[str, Setting]]:
    """All recipes at all stages."""
    return [
        (name, drawn_setting(stage, world, number, hybrid=world == 4 and number // 4 % 2 == 0))
        for stage in STAGES
        for number, name in enumerate(RECIPES)
    ]


def check_bits(calls: Sequence[tuple[str, Setting]], world: int, ranks: Pool, steps: int | None = None) -> None:
    by_rank = ranks.run(trainings, [(with_steps(name, steps), setting, None) for name, setting in calls], world=world)
    for number, (name, setting) in enumerate(calls):
        check_same_bits(reference(name, steps), [ended[number] for ended in by_rank], (name, setting))


@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_everywhere(world: int, ranks: Pool) -> None:
    check_bits(few()[world], world, ranks, FEW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_with_everything(world: int, ranks: Pool) -> None:
    check_bits(grid(world), world, ranks)


def test_same_bits_after_many_steps(ranks: Pool) -> None:
    check_bits([("AdamW", Setting(3, wrapped=True, bucket_bytes=3000, live_bytes=6000))], 2, ranks, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_after_very_many_steps(world: int, ranks: Pool) -> None:
    check_bits([(name, Setting(stage)) for name in ("AdamW", "SGD") for stage in STAGES], world, ranks, steps=200)


def test_same_bits_as_with_gradients_of_ddp(ranks: Pool) -> None:
    calls = [
        (name, Setting(stage, wrapped=True, taken_over=False))
        for name in ("AdamW", "accumulates under no_sync")
        for stage in (0, 1)
    ]
    check_bits(calls, 2, ranks, FEW_STEPS)


def test_every_rank_skips_what_overflows_on_one(ranks: Pool) -> None:
    """Over the stages, in every param."""
    steps = 16
    spoils = [spoiled(RECIPES["overflows"], step, 7 * stage, 2) for stage in STAGES for step in range(steps)]
    assert {each.which for each in spoils if each} == set(OVERFLOWING)
    for world, stages in ((2, (0, 2)), (3, (1, 3))):
        check_bits([("overflows", Setting(stage, neighbours=stage < 2)) for stage in stages], world, ranks, steps)


@pytest.mark.parametrize("world", [2, 3])
def test_displacement_is_the_mean_gradient(world: int, ranks: Pool) -> None:
    """With a rate of 1 and nothing else; of several backwards, their sum."""
    recipe = Recipe("SGD", {"lr": 1.0}, steps=1, syncs=(True, False, True), low=torch.float32)
    calls = [(recipe, Setting(stage, neighbours=stage > 1), None) for stage in STAGES]
    cells = Cells(recipe.low)
    with torch.no_grad():
        moved: dict[Parameter, Tensor] = {}
        for which, cell in enumerate(cells.cells):
            if cell.weight.requires_grad:
                means = [mean(0, micro, which, cell.weight.shape) for micro in range(len(recipe.syncs))]
                there = [each for each in means if each is not None]
                moved[cell.weight] = moved.get(cell.weight, torch.zeros(())) + sum(there)
        for param, distance in moved.items():
            param -= distance
    for ended in ranks.run(trainings, calls, world=world):
        for each in ended:
            for which, (mine, theirs) in enumerate(zip(each.params, cells.parameters(), strict=True)):
                assert raw(mine) == raw(theirs), f"param {which}"


class Many(nn.Module):
    """More buckets than may be under way at once, each filled by its one gradient; a rank begins its backward late."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(Parameter(torch.zeros(4 * BLOCK)) for _ in range(100))

    def forward(self) -> Tensor:
        total = torch.stack([index * weight.sum() for index, weight in enumerate(self.weights)]).sum()
        total.register_hook(lambda _: time.sleep(0.5 * (dist.get_rank() == 1)))
        return total


def waits_for_a_late_rank() -> None:
    # At times no rank looks at another one before the end of its backward: then all of their boards are full.
    never_in_backward = patch.object(PeerReduceScatter, "progress", lambda self: [])
    for neighbours, looks in ((True, nullcontext()), (True, never_in_backward), (False, nullcontext())):
        model = Many()
        optimizer = ShardedSGD(model, lr=1.0, stage=2, tuning=Tuning(bucket_bytes=1, neighbours=neighbours))
        with looks:
            model().backward()
        optimizer.step()
        for index, weight in enumerate(model.weights):
            assert raw(weight) == raw(torch.zeros(4 * BLOCK) - index), (neighbours, index)


def test_many_buckets_and_a_late_rank(ranks: Pool) -> None:
    ranks.run(waits_for_a_late_rank, world=2)


# -- the same under cheats ---------------------------------------------------------------------------------------------


def cheats_of(name: str) -> list[str]:
    """Those that this recipe must notice."""
    if name == "accumulates under no_sync":
        return ["no_sync() forgets", "second moment zeroed", "step off by one", "decay dropped"]
    return [cheat for cheat in CHEATS | REDUCING_CHEATS if cheat not in cheats_of("accumulates under no_sync")]


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("accumulates in the shard", (0, 1)),
        ("accumulates under no_sync", (0, 1)),
        *(pytest.param(name, (2, 3), marks=pytest.mark.slow) for name in RECIPES if name.startswith("accumulates")),
    ],
)
def test_every_cheat_is_noticed_at_every_stage(name: str, rounds: tuple[int, ...], ranks: Pool) -> None:
    """Each in two rounds at a stage below 2 and at one above; in four at all of them."""
    steps, world = 3, 2
    calls = [
        (cheat, Setting(stage, neighbours=bool(number + stage & 1), live_bytes=1 << 20, bucket_bytes=6000))
        for number, cheat in enumerate(cheats_of(name))
        for stage in (STAGES[(number // 2 + 2 * turn + turn // 2) % 4] for turn in rounds)
        if stage < 2 or cheat != "no_sync() forgets"  # where it does nothing
    ]
    by_rank = ranks.run(trainings, [(with_steps(name, steps), setting, cheat) for cheat, setting in calls], world=world)
    for number, (cheat, setting) in enumerate(calls):
        with pytest.raises(AssertionError, match=r"is not right|are not those"):
            check_same_bits(reference(name, steps), [ended[number] for ended in by_rank], (cheat, setting))
            pytest.fail(f"{name} does not notice {cheat!r} in {setting}")


# -- bytes held --------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 3, 256
# Of each layer, weights are 512 blocks and biases 2. A shard is rounded up to blocks, so that a bucket grows by less
# than one block a rank: 1 % at the most.
NUMEL = LAYERS * (WIDTH * 2 * WIDTH + 2 * WIDTH)
LAYER_NUMEL = NUMEL // LAYERS
CLOSE = 0.01


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :WIDTH]


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to(dtype)


def run_layers(model: nn.Module, optimizer: ShardedOptimizer, steps: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
        optimizer.step()


def held_bytes_are_the_formula() -> None:
    """AdamW; per param 4 bytes of gradient or 2, 8 of states, 4 of master where it is bf16, each over the ranks."""
    world = dist.get_world_size()
    for dtype, gradient_format in ((torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "bf16")):
        for stage in STAGES:
            model = layers(dtype)
            bucket_bytes = LAYER_NUMEL * dtype.itemsize
            tuning = Tuning(bucket_bytes=bucket_bytes, keep_below=1, live_bytes=bucket_bytes)
            optimizer = ShardedAdamW(model, stage=stage, tuning=tuning, gradient_format=gradient_format)
            largest = watch_params(model, optimizer)
            # A rank that is late by more than the reducer's patience costs a buffer more; here it has all the time. So
            # does a round of another reducer that is open: one that an earlier job of this process never finished.
            alone = weakref.WeakSet[Any]()
            no_slack = {"BYTES_UNDER_WAY": 0, "BYTES_WITHOUT_WAITS": 0, "BUFFERS_WITHOUT_WAITS": 0}
            with patch.multiple(reducer_module, **no_slack, PATIENCE=120.0, _REDUCERS=alone):
                run_layers(model, optimizer, steps=2)
            held = {kind: sum(tiers.values()) for kind, tiers in optimizer.memory().items()}
            shards = world if stage else 1
            parts = {
                "param": dtype.itemsize / (world if stage == 3 else 1),
                "gradient": (4 if gradient_format == "fp32" else 2) / shards,
                "master": (4 if dtype is torch.bfloat16 else 0) / shards,
                "state": 8 / shards,
            }
            where = f"stage {stage}, {dtype}, gradients in {gradient_format}"
            for kind, each in parts.items():
                assert held[kind] == pytest.approx(each * NUMEL, rel=CLOSE), f"{where}: {kind}"
            assert all(isinstance(param.grad, GradientPart) for param in model.parameters())
            # Two buckets under way and one being filled, and the table of blocks.
            assert held["buffer"] <= 3 * bucket_bytes * (1 + CLOSE) + 4 * NUMEL / BLOCK, where
            if stage == 3:
                assert_nothing_gathered(optimizer, where)
                # While a layer runs: our slices, it, and what may stay.
                most = dtype.itemsize * NUMEL / world + 2 * bucket_bytes
                assert 0 < max(largest) <= most * (1 + CLOSE), where
                with torch.no_grad():
                    model(torch.ones(2, WIDTH, dtype=dtype))
                run_layers(model, optimizer)
                assert_nothing_gathered(optimizer, where)
            optimizer.zero_grad()
            assert all(param.grad is None for param in model.parameters())


def watch_params(model: nn.Module, optimizer: ShardedOptimizer) -> list[int]:
    """Bytes of params whenever a layer runs, forward or backward."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(optimizer.memory()["param"].values()))

    for layer in model.children():
        layer.register_forward_hook(look)
    for param in model.parameters():
        param.register_hook(look)
    return seen


def assert_nothing_gathered(optimizer: ShardedOptimizer, where: str) -> None:
    for shard in optimizer.engine.domain.shards:  # type: ignore[union-attr]
        assert shard.bucket.resident_bytes == 0, where
        assert pages_there(shard.bucket.flat) == 0, where
        assert pages_there(shard.param) > 0, where  # it does see pages


def pages_there(tensor: Tensor) -> int:
    """Of the pages that lie wholly in the tensor, those that the system holds memory for."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return 0
    first, end = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = file.read(8 * (end - first))
    return sum(byte >= 64 for byte in entries[7::8])  # present, or in swap


def resident() -> int:
    """Bytes that this process has for itself, and uses."""
    return_free_pages()
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private")) * 1024


def buckets_of_ddp_are_freed() -> None:
    """And with them the half of what DDP holds: gradients lie in its buckets and in ``param.grad``."""
    model = ddp(nn.Linear(3200, 3200, bias=False))  # a bucket of its own
    nbytes = 4 * 3200 * 3200
    x = torch.ones(1, 3200)
    model(x).sum().backward()  # its buckets are touched now
    optimizer = ShardedSGD(model, lr=1.0, stage=2)
    optimizer.zero_grad()
    reducer = weakref.ref(model.reducer)
    before = resident()
    assert optimizer.engine.takeover is not None
    optimizer.engine.takeover.retire_reducer()
    assert reducer() is None
    assert_freed(before, nbytes)
    model(x).sum().backward()
    optimizer.step()
    # Beside the params: a shard of the gradient. It filled its bucket, and was reduced where it lay.
    optimizer.zero_grad()
    assert_freed(before, nbytes / 2)


def assert_freed(before: int, nbytes: float) -> None:
    """So many bytes fewer are resident; soon, as gloo's thread drops a message, and its memory, behind who waited."""
    until(lambda: before - resident() > 0.9 * nbytes, f"{nbytes:.0f} bytes to be freed")
    assert before - resident() == pytest.approx(nbytes, rel=0.1)


def test_held_bytes(ranks: Pool) -> None:
    ranks.run(held_bytes_are_the_formula, world=3)
    ranks.run(buckets_of_ddp_are_freed, world=2)
