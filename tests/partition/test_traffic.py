"""Bytes that a step moves: 2 units at stages 0 to 2 and at most 3 at stage 3, at default settings; and as planned.

A unit is (N-1)/N of the params' elements, which each rank receives, and sends. The system counts the bytes of a step
of a real training, from the second step on: the first one also shares weights and finds the order of buckets.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardopt import ShardedAdamW, Tuning
from shardopt.plan import Cut, plan
from shardopt.plan import Way as Planned
from tests.support.llama import Llama, loss_of
from tests.support.ranks import Pool
from tests.support.wire import counting

# Padding of shards to blocks, agreements and the headers of messages, as a share of what moves: a third of this.
CLOSE = 0.01


def params_bytes(model: nn.Module, itemsize: int = 4) -> int:
    return sum(param.numel() for param in model.parameters()) * itemsize


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, syncs: Sequence[bool] = (True,)) -> None:
    optimizer.zero_grad()
    pauses: Any = model if isinstance(model, DistributedDataParallel) else optimizer
    for each in syncs:
        with nullcontext() if each else pauses.no_sync():
            loss_of(model).backward()
    optimizer.step()


class Units(NamedTuple):
    """What a rank receives and sends in a step that is not the first, in units of fp32; and what is planned."""

    received: float
    sent: float
    planned: float = 0.0


def units_moved(model: nn.Module, optimizer: torch.optim.Optimizer, syncs: Sequence[bool] = (True,)) -> Units:
    step_of(model, optimizer, syncs)
    with counting() as moved:
        step_of(model, optimizer, syncs)
    return Units(moved.received / unit_of(model), moved.sent / unit_of(model))


def unit_of(model: nn.Module) -> float:
    world = dist.get_world_size()
    return params_bytes(model) * (world - 1) / world


def planned_units(model: nn.Module, optimizer: Any, way: Planned, cut: Cut | None = None) -> float:
    need = plan(model, optimizer, dist.get_world_size(), way, optimizer.options, cut)
    return need.moved["wire"] / unit_of(model)


# -- default settings --------------------------------------------------------------------------------------------------


def at_default_settings(stages: Sequence[int]) -> dict[str, Units]:
    found = {}
    for stage in stages:
        for machine, tuning in {"one": Tuning(), "several": Tuning(neighbours=False)}.items():
            model = Llama()
            optimizer = ShardedAdamW(model, stage=stage, tuning=tuning)
            units = units_moved(model, optimizer)
            planned = planned_units(model, optimizer, Planned(stage, True, torch.float32))
            found[f"stage {stage}, {machine} machine"] = units._replace(planned=planned)
            # Its matrices are just large enough to be sharded: a larger default would keep them whole, and move less.
            assert bool(optimizer.units) == (stage == 3)
    model = Llama()
    wrapped = DistributedDataParallel(model)
    found["DDP"] = units_moved(wrapped, torch.optim.AdamW(model.parameters()))
    return found


def test_no_more_than_ddp(ranks: Pool) -> None:
    """DDP's own step is counted beside them: that it is 2 units shows that the counters see everything."""
    for found in ranks.run(at_default_settings, (0, 1, 2), world=3):
        for where, moved in found.items():
            assert moved[:2] == pytest.approx((2, 2), rel=CLOSE), where
            assert where == "DDP" or moved.received == pytest.approx(moved.planned, rel=CLOSE), where


def test_at_most_three_units_at_stage_3(ranks: Pool) -> None:
    for found in ranks.run(at_default_settings, (3,), world=3):
        for where, (received, sent, planned) in found.items():
            assert min(received, sent) >= 2 * (1 - CLOSE), f"{where}: not all that moves is counted"
            if max(received, sent) > 3 * (1 + CLOSE):
                pytest.fail(f"{where}: {received:.2f} units received, {sent:.2f} sent")
            assert where == "DDP" or received == pytest.approx(planned, rel=CLOSE), where


# -- everything else that bytes depend on ------------------------------------------------------------------------------

LOW = torch.bfloat16
EACH_MATRIX = {"bucket_bytes": 1, "keep_below": 1}


@dataclass(frozen=True)
class Way:
    """A training, and what it moves by stage: bytes an element of gradients, and of params, for (N-1)/N of them."""

    gradients: float
    params: float
    stage: int
    options: Any = ()  # of the optimizer
    tuning: Any = ()
    dtype: torch.dtype = torch.float32
    syncs: tuple[bool, ...] = (True,)
    wrapped: bool = False
    handed_over: bool = True

    def planned(self, model: nn.Module, optimizer: Any) -> float:
        options = {name: value for name, value in dict(self.options).items() if not name.endswith("_dtype")}
        way = Planned(self.stage, self.handed_over, self.dtype, **options)
        cut = Cut(micro_batches=len(self.syncs), at_once=self.stage < 2 and len(self.syncs) > 1)
        return planned_units(model, optimizer, way, cut)


WORLD = 3
PAUSES = (False, False, True)
WAYS = (
    # Sums are fp32, and go round as such at stage 0.
    Way(2 + 4, 0, 0, dtype=LOW),
    Way(2 + 2, 0, 0, {"gradient_format": "bf16"}, dtype=LOW),
    *(Way(2, 2, stage, dtype=LOW) for stage in (1, 2)),
    Way(4, 2, 2, {"reduce_dtype": torch.float32}, dtype=LOW),
    Way(2, 4, 2, {"reduce_dtype": LOW}, {"neighbours": False}),
    Way(1 + 4 / 256, 4, 2, {"reduce_dtype": "int8"}, {"neighbours": False}),
    Way(1 / 2 + 4 / 256, 4, 1, {"reduce_dtype": "int4"}),
    Way(4, 1 + 4 / 256, 2, {"gather_dtype": "int8"}),
    Way(1 + 4 / 256, 1 + 4 / 256, 1, {"reduce_dtype": "int8", "gather_dtype": "int8"}, dtype=LOW),
    # Under no_sync(), ours or DDP's, stages 0 and 1 move nothing; stage 2 reduces every backward.
    Way(4 + 4, 0, 0, syncs=PAUSES),
    Way(4, 4, 1, syncs=PAUSES, wrapped=True),
    Way(3 * 4, 4, 2, syncs=PAUSES),
    Way(3 * 4, 4, 2, syncs=PAUSES, wrapped=True),
    # DDP's all-reduce, which knows nothing of slices.
    Way(8, 0, 0, wrapped=True, handed_over=False),
    Way(8, 4, 1, wrapped=True, handed_over=False),
    Way(4, 2, 1, dtype=LOW, wrapped=True, handed_over=False),
    # Every rank receives all that the others have; the slices of the sums alone.
    Way(WORLD * 4, 0, 0, {"release_gradients": True}),
    Way(4, 4, 1, {"release_gradients": True}),
    Way(WORLD * 2, 0, 0, {"release_gradients": True}, dtype=LOW),
    Way(2, 2, 1, {"release_gradients": True}, dtype=LOW),
    # A bucket a module: gathered for forward and for backward, or once where it stays.
    Way(4, 8, 3, tuning={"live_bytes": 0, **EACH_MATRIX}),
    Way(4, 8, 3, tuning={"live_bytes": 0, "neighbours": False, **EACH_MATRIX}),
    Way(4, 2 + 8 / 256, 3, {"gather_dtype": "int8"}, {"live_bytes": 0, **EACH_MATRIX}),
    Way(4, 4, 3, tuning={"live_bytes": 1 << 30, **EACH_MATRIX}),
    Way(2, 4, 3, tuning={"live_bytes": 0, **EACH_MATRIX}, dtype=LOW),
    Way(3 * 4, 3 * 8, 3, tuning={"live_bytes": 0, **EACH_MATRIX}, syncs=PAUSES, wrapped=True),
)


def moves(way: Way, group: Any = None) -> Units:
    model = Llama(blocks=2).to(way.dtype)
    wrapped = DistributedDataParallel(model) if way.wrapped else model
    optimizer = ShardedAdamW(
        wrapped if way.handed_over else model.parameters(),
        stage=way.stage,
        process_group=group,
        tuning=Tuning(**dict(way.tuning)),
        **dict(way.options),
    )
    found = units_moved(wrapped, optimizer, way.syncs)._replace(planned=way.planned(model, optimizer))
    optimizer.close()
    return found


def all_move() -> list[Units]:
    return [moves(way) for way in WAYS]


def test_formats_accumulation_and_releasing(ranks: Pool) -> None:
    for by_way in ranks.run(all_move, world=WORLD):
        for way, found in zip(WAYS, by_way, strict=True):
            units = (way.gradients + way.params) / 4
            assert found == pytest.approx((units, units, units), rel=3 * CLOSE), way
            assert found.received == pytest.approx(found.planned, rel=CLOSE), way


def copies_move() -> list[Units]:
    group = init_device_mesh("cpu", (2, 2))
    return [moves(Way(0, 0, stage, tuning={"live_bytes": 0, **EACH_MATRIX}), group) for stage in (1, 2, 3)]


def test_two_copies_of_two_slices(ranks: Pool) -> None:
    """Gradients travel within a copy, then sums of slices across copies, there and back; params within a copy."""
    unit, within, across = 3 / 4, 1 / 2, 1 / 2 / 2
    for found in ranks.run(copies_move, world=4):
        for each, params in zip(found, (1, 1, 2), strict=True):
            expected = ((1 + params) * within + 2 * across) / unit
            assert each[:2] == pytest.approx((expected, expected), rel=3 * CLOSE)
