"""How many calls a step makes: collectives of a clipped one, and kernel launches, whatever the groups and gradients."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from shardopt import ShardedAdamW, ShardedSGD, Tuning
from shardopt.kernels import native_backend
from tests.support.ranks import Pool
from tests.support.sweep import grid
from tests.support.wire import Calls

# -- collectives -------------------------------------------------------------------------------------------------------

WIDTH, LAYERS, MAX_NORM = 32, 3, 0.01
MESSAGES = ("send", "recv_")
# "in the step": max_grad_norm=; "before it": torch's function, after which a rank looks at norms on its own.
CLIPS = (None, "in the step", "before it")
SETTINGS = grid(
    {"stage": (0, 1, 2, 3), "handed_over": (True, False), "neighbours": (True, False)},
    lambda stage, handed_over, **_: handed_over or stage < 2,
)
Setting = tuple[int, bool, bool]
Found = dict[str, dict[str, int]]  # "no_sync", "backward", "step": name of a call -> how many


def calls_of_a_step(clip: str | None, stage: int, handed_over: bool, neighbours: bool) -> Found:
    """Of the second one, with one backward more under no_sync() before stage 2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    wrapped = model if handed_over else DistributedDataParallel(model)
    optimizer = ShardedSGD(
        model if handed_over else model.parameters(),
        lr=0.1,
        stage=stage,
        max_grad_norm=MAX_NORM if clip == "in the step" else None,
        tuning=Tuning(bucket_bytes=1, keep_below=1, neighbours=neighbours),
    )
    found: Found = {}
    for _ in range(2):
        optimizer.zero_grad()
        pauses: Any = optimizer if handed_over else wrapped
        for phase in ("no_sync", "backward")[stage >= 2 :]:
            with pauses.no_sync() if phase == "no_sync" else nullcontext():
                loss = wrapped(torch.ones(2, WIDTH)).sum()
                with Calls() as calls:
                    loss.backward()
                found[phase] = dict(calls.found)
        with Calls() as calls:
            if clip == "before it":
                before = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
                assert before > 10 * MAX_NORM  # it does clip
                if dist.get_rank() == 0:
                    assert float(model[0].weight.grad.norm()) < MAX_NORM
            optimizer.step()
        found["step"] = dict(calls.found)
    assert optimizer.grad_norm is None or optimizer.grad_norm > 10 * MAX_NORM
    return found


def calls_of_all() -> dict[Setting, dict[str | None, Found]]:
    return {setting: {clip: calls_of_a_step(clip, *setting) for clip in CLIPS} for setting in SETTINGS}


@pytest.fixture(scope="module")
def calls(ranks: Pool) -> dict[Setting, dict[str | None, Found]]:
    """By setting and way of clipping, on rank 0 of 3."""
    by_rank = ranks.run(calls_of_all, world=3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    return by_rank[0]


def collectives(found: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in found.items() if name not in MESSAGES}


def test_clipping_and_reading_norms_take_no_call(calls: Any) -> None:
    for setting, by_clip in calls.items():
        for clip in CLIPS:
            assert by_clip[clip] == by_clip[None], f"{setting}, clipped {clip}"


def test_a_step_agrees_once(calls: Any) -> None:
    """One all-gather tells everything; where shards travel, others tell when they may be read, and that they were."""
    for (stage, handed_over, neighbours), by_clip in calls.items():
        meetings = 0 if stage == 0 else 2 if neighbours else 1
        found = by_clip["in the step"]["step"]
        [(kind, count)] = collectives(found).items()
        assert kind == "_allgather_base_" and count <= 1 + meetings, (stage, handed_over, neighbours)
        # A message to each of the two others, and one from each.
        travels = 2 * LAYERS if stage in (1, 2) and not neighbours else 0
        assert found.get("send", 0) == found.get("recv_", 0) == travels


def test_no_sync_takes_no_call(calls: Any) -> None:
    found = [by_clip[None]["no_sync"] for by_clip in calls.values() if "no_sync" in by_clip[None]]
    assert found == [{}] * len(found) and len(found) == 8


def test_a_backward_ends_with_one_all_reduce(calls: Any) -> None:
    for (stage, handed_over, neighbours), by_clip in calls.items():
        if stage == 0 or not handed_over:  # whose own sums are all-reduced
            continue
        assert collectives(by_clip[None]["backward"]) == {"allreduce_": 1}, (stage, neighbours)


# -- launches ----------------------------------------------------------------------------------------------------------

NUMELS = (5, 300, 700, 1024, 40, 2000, 256, 1, 900, 513)
PRESENT: tuple[tuple[int, ...], ...] = (tuple(range(10)), (0, 2, 3, 4, 6, 7, 8), (5,), (1, 9), tuple(range(10)))


class Cell(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(numel))

    def forward(self) -> Tensor:
        return (self.weight * self.weight).sum()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(map(Cell, NUMELS))

    def forward(self, present: Collection[int]) -> Tensor:
        return torch.stack([self.cells[which]() for which in present]).sum()


@contextmanager
def launches() -> Iterator[dict[str, Counter[int]]]:
    """By kernel: the shard, by the address of its params or of the table of its blocks -> how often."""
    found: dict[str, Counter[int]] = {"step": Counter(), "look": Counter()}
    run, add_totals, count_nonfinite = native_backend.run, native_backend.add_totals, native_backend.count_nonfinite

    def steps(spec: Any, number: int, streams: Any, tables: Any) -> None:
        found["step"][streams.param.data_ptr()] += 1
        run(spec, number, streams, tables)

    def sums(grad: Any, gradients: Any, *arguments: Any) -> None:
        found["look"][gradients.row_of_block.data_ptr()] += 1
        add_totals(grad, gradients, *arguments)

    def counts(grad: Any, gradients: Any, count: Any) -> None:
        found["look"][gradients.row_of_block.data_ptr()] += 1
        count_nonfinite(grad, gradients, count)

    with patch.multiple(native_backend, run=steps, add_totals=sums, count_nonfinite=counts):
        yield found


def one_launch_a_shard(stage: int, handed_over: bool, **options: Any) -> None:
    """Each param has a group, and numbers, of its own; which have a gradient differs from step to step."""
    cells = Cells()
    model = cells if handed_over else DistributedDataParallel(cells, find_unused_parameters=True)
    numbers = [{"lr": 0.1 / (1 + n), "weight_decay": 0.01 * n, "betas": (0.1 * n, 0.9)} for n in range(len(NUMELS))]
    groups = [{"params": [cell.weight], **each} for cell, each in zip(cells.cells, numbers, strict=True)]
    optimizer = ShardedAdamW(
        groups,
        module=cells if handed_over else None,
        stage=stage,
        tuning=Tuning(bucket_bytes=6000, keep_below=100),
        **options,
    )
    for number, present in enumerate(PRESENT):
        optimizer.zero_grad()
        with launches() as found:
            model(present).backward()
            optimizer.step()
        assert optimizer.engine.domain is not None
        shards, entries = optimizer.engine.domain.shards, optimizer.engine.domain.entries
        assert len(shards) >= 5
        where = {
            (entries[cells.cells[which].weight].shard, entries[cells.cells[which].weight].index) for which in present
        }
        touched = [shard for shard in shards if any((shard, piece.param) in where for piece in shard.pieces)]
        what = f"stage {stage}, handed over {handed_over}, {options}, step {number}"
        assert list(found["step"].values()) == [1] * len(touched), what
        # Of copies of all gradients only the first rank looks at its own; one that releases them needs to know at once.
        looks = stage > 0 or not handed_over or dist.get_rank() == 0 or "release_gradients" in options
        assert set(found["look"].values()) == ({1} if looks else set()), what
        if not handed_over:  # else one launch looks at many shards, while backward runs
            assert len(found["look"]) == len(touched), what


def all_launch_once() -> None:
    for stage in (0, 1, 2, 3):
        one_launch_a_shard(stage, True)
        one_launch_a_shard(stage, True, max_grad_norm=0.1, state_format="int8", ema=0.9)
    for stage in (0, 1):
        one_launch_a_shard(stage, False, max_grad_norm=0.1)
        one_launch_a_shard(stage, True, release_gradients=True)


@pytest.mark.parametrize("world", [1, 2])
def test_one_launch_a_shard(world: int, ranks: Pool) -> None:
    ranks.run(all_launch_once, world=world)
