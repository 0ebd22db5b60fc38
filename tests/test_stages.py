"""Stages 0 to 3 with the module handed over: same bits at every stage and world size, bytes moved and held as promised.

Gradients are integers that autograd makes, other ones on every rank, whose mean over ranks is the same integer at every
world size. So a training on any number of ranks must leave the bits of the same training without a module and without
ranks (whose arithmetic test_parity.py compares with torch's), and every module must see these params at every step, in
forward and in backward.
"""

import copy
import functools
import hashlib
import math
import os
import random
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import BLOCK, Zoo
from cheats import CHEATS, REDUCING_CHEATS, cheating
from ranks import Pool, RankFailure
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from training import ddp, raw

import shardopt
from shardopt import Part, ShardedAdamW, ShardedOptimizer, ShardedSGD, Tuning
from shardopt.gradient import GradientPart
from shardopt.partition import reducer as reducer_module

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
    "overflows, fused scaler": Recipe("AdamW", {**ADAMW, "fused": True}, steps=16, overflows=True, scaler=True),
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

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks call modules in orders of their own, and leave some out; where nothing is gathered by calls."""
        return self.stage < 3 or self.neighbours

    def options(self, recipe: Recipe) -> dict[str, Any]:
        tuning = Tuning(
            bucket_bytes=self.bucket_bytes,
            keep_below=self.keep_below,
            live_bytes=self.live_bytes,
            neighbours=self.neighbours,
        )
        options = {"stage": self.stage, "tuning": tuning, "reduce_dtype": recipe.reduce_dtype}
        return {**options, "process_group": init_device_mesh("cpu", (2, 2))} if self.hybrid else options


def drawn_setting(stage: int, world: int, number: int) -> Setting:
    """The same in every run; over a grid, all values of all knobs meet."""
    draw = random.Random(1000 * number + 10 * stage + world)
    return Setting(
        stage,
        wrapped=draw.random() < 0.5,
        neighbours=draw.random() < 0.5,
        bucket_bytes=draw.choice((1200, 3000, 1 << 20)),
        keep_below=draw.choice((1, BLOCK)),
        live_bytes=draw.choice((0, 6000, 1 << 20)),
        hybrid=world == 4 and draw.random() < 0.5,
    )


# -- the module --------------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """Owns one param, whose gradient are the coefficients; theirs in turn is the param as backward saw it."""

    coefficients: Tensor

    def __init__(self, weight: Parameter):
        super().__init__()
        self.weight = weight
        self.seen = 0  # in forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen = checksum(self.weight)
        return x + (self.weight * self.coefficients).sum().float()


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
        for which in self.order:
            x = self.cells[which](x)
        return x


CELLS = len(Cells(torch.bfloat16).cells)
ABSENT_CELL = 4  # at some steps on all ranks: no decay, no count
OVERFLOWING = {  # cell -> its elements
    which: cell.weight.numel()
    for which, cell in enumerate(Cells(torch.bfloat16).cells)
    if cell.weight.requires_grad and cell.weight.numel() and which != ABSENT_CELL
}


def mean(step: int, micro: int, which: int, shape: torch.Size) -> Tensor | None:
    """Of the gradients of all ranks that a cell gives; None where it is in no graph."""
    if which == ABSENT_CELL and step % 5 in (3, 4):
        return None
    return integers(shape, step, micro, which)


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
    return Spoiled(which, (0, numel // 2, numel - 1)[place], number // 3 % world, (math.inf, -math.inf, math.nan)[place])


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(raw(tensor))


# -- the training ------------------------------------------------------------------------------------------------------

Seen = dict[tuple[int, int, str], int]  # step, cell, forward or backward -> checksum of the param


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


def train(recipe: Recipe, setting: Setting, cheat: str | None = None) -> Ended:
    """On ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cells = Cells(recipe.low, seed=rank)  # rank 0's values are shared at binding
    params = list(cells.parameters())
    model = ddp(cells) if setting.wrapped else cells
    optimizer = make_optimizer(recipe, params, model, **setting.options(recipe))
    scheduler = CosineAnnealingLR(optimizer, T_max=recipe.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=6, enabled=recipe.scaler)
    seen: Seen = {}
    with cheating(cheat):
        for step in range(recipe.steps):
            bad = spoiled(recipe, step, 7 * setting.stage, world)
            optimizer.zero_grad(set_to_none=recipe.set_to_none)
            for micro, syncs in enumerate(recipe.syncs):
                paused = model if setting.wrapped else optimizer
                with nullcontext() if syncs else paused.no_sync():
                    prepare(cells, step, micro, rank, world, setting.ranks_differ, bad if micro == 0 else None)
                    scaler.scale(model(torch.zeros(()))).backward()
                    note_what_was_seen(seen, cells, step, scaler.get_scale())
            if recipe.clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, recipe.clip)
            before = held_bits(optimizer) if bad else None
            with warnings.catch_warnings(record=bad is not None) as caught:
                warnings.simplefilter("always" if bad else "error")
                scaler.step(optimizer)
            scaler.update()
            if bad is not None:
                told = [str(each.message) for each in caught or ()]
                assert len(told) == (not recipe.scaler) and all("all ranks skipped" in each for each in told), told
                assert held_bits(optimizer) == before, f"a step that was skipped is not without effect: {bad}"
            scheduler.step()
    with optimizer.unsharded():
        values = [param.detach().clone() for param in params]
    return Ended(values, states_of(optimizer, params), seen)


def prepare(
    cells: Cells, step: int, micro: int, rank: int, world: int, ranks_differ: bool, bad: Spoiled | None
) -> None:
    """Says which cells the forward calls, in which order, with which coefficients."""
    order = torch.randperm(CELLS, generator=torch.Generator().manual_seed(100 * step + ranks_differ * rank))
    cells.order = []
    for which in order.tolist():
        cell = cells.cells[which]
        may_lack = ranks_differ and (bad is None or bad.which != which)
        found = coefficients(step, micro, which, cell.weight.shape, rank, world, may_lack)
        if found is not None:
            if bad is not None and (bad.which, bad.rank) == (which, rank):
                found.view(-1)[bad.element] = bad.value
            cell.coefficients = found.to(cell.weight.dtype).requires_grad_()
            cells.order.append(which)


def note_what_was_seen(seen: Seen, cells: Cells, step: int, scale: float) -> None:
    for which in cells.order:
        cell = cells.cells[which]
        grad = cell.coefficients.grad
        assert grad is not None
        for when, found in (("forward", cell.seen), ("backward", checksum(grad / scale))):
            at = step, which, when
            assert seen.setdefault(at, found) == found, f"the param is not the same in each micro-batch of {at}"


def held_bits(optimizer: ShardedOptimizer) -> str:
    """Of all that this rank holds: params, masters, states, step counts."""
    sha = hashlib.sha256()
    for group in optimizer.param_groups:
        for param in group["params"]:
            sha.update(raw(param.detach()))
            for name, value in optimizer.state[param].items():
                sha.update(name.encode() + raw(value))
    return sha.hexdigest()


def states_of(optimizer: ShardedOptimizer, params: Sequence[Parameter]) -> list[dict[str, Tensor]]:
    optimizer.consolidate_state_dict(to=0)
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    return [{name: value.clone() for name, value in optimizer.state[param].items()} for param in params]


@functools.cache
def reference(name: str, steps: int | None = None) -> Ended:
    """The training of ``params`` alone, in one process, all in fp32, without what overflows and without a scaler."""
    recipe = RECIPES[name]
    cells = Cells(recipe.low)
    for each in cells.cells:
        each.weight.data = each.weight.data.float()
    params = list(cells.parameters())
    optimizer = make_optimizer(recipe, params, None)
    scheduler = CosineAnnealingLR(optimizer, T_max=recipe.steps)
    seen: Seen = {}
    low = [param.dtype for param in Cells(recipe.low).parameters()]
    dtypes = dict(zip(params, low, strict=True))
    for step in range(steps or recipe.steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        for which, cell in enumerate(cells.cells):
            param = cell.weight
            for when in ("forward", "backward"):
                seen[step, which, when] = checksum(param.to(dtypes[param]))
            for micro in range(len(recipe.syncs)):
                grad = mean(step, micro, which, param.shape)
                if param.requires_grad and grad is not None:
                    param.grad = grad if param.grad is None else param.grad + grad
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
        assert ended.seen
        for at, found in ended.seen.items():
            assert found == expected.seen[at], f"{where}: what cell {at[1]} saw is not right, rank {rank}, {at}"


def trainings(calls: Sequence[tuple[Recipe, Setting, str | None]]) -> list[Ended]:
    """Several on the same ranks."""
    return [train(*call) for call in calls]


# -- bits --------------------------------------------------------------------------------------------------------------


def grid(world: int) -> list[tuple[str, Setting]]:
    """All recipes at all stages, such that every few in a row have different ones of both."""
    pairs = [(number, (number + shift) % 4) for shift in STAGES for number in range(len(RECIPES))]
    names = list(RECIPES)
    return [(names[number], drawn_setting(stage, world, number)) for number, stage in pairs]


def check_bits(calls: Sequence[tuple[str, Setting]], world: int, ranks: Pool) -> None:
    by_rank = ranks.run(trainings, [(RECIPES[name], setting, None) for name, setting in calls], world=world)
    for number, (name, setting) in enumerate(calls):
        check_same_bits(reference(name), [ended[number] for ended in by_rank], (name, setting))


PER_WORLD = {1: 24, 2: 24, 3: 16, 4: 12}


@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_everywhere(world: int, ranks: Pool) -> None:
    check_bits(grid(world)[: PER_WORLD[world]], world, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_with_everything(world: int, ranks: Pool) -> None:
    check_bits(grid(world)[PER_WORLD[world] :], world, ranks)
