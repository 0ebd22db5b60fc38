"""The bytes that the planner says a step moves, against those that the system counts while a training takes it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardopt import ShardedAdamW, ShardedMuon, Tuning
from shardopt.config import Options
from shardopt.tools.plan import plan
from shardopt.tools.ways import WAYS, Way
from tests.support.llama import Llama, loss_of
from tests.support.ranks import Pool
from tests.support.wire import counting

# Padding, agreements and headers of messages: a third of this.
CLOSE = 0.01
MOVING = (
    *(way for way in WAYS if way.stage < 3),
    *(Way(stage, True, dtype, release_gradients=True) for stage in (0, 1) for dtype in (torch.float32, torch.bfloat16)),
    Way(0, True, torch.bfloat16, gradient_format="bf16"),  # sums go back as they are kept
)


def planned_and_moved(
    ways: Sequence[Way], blocks: int, tuning: Tuning | None = None, kind: Any = ShardedAdamW
) -> list[tuple[int, int]]:
    """Bytes that a step moves to this rank, at default settings: by plan, and as the system counts them."""
    found = []
    for way in ways:
        model = Llama(blocks).to(way.dtype)
        trained = model if way.has_module else DistributedDataParallel(model)
        opt = kind(
            trained if way.has_module else model.parameters(),
            stage=way.stage,
            release_gradients=way.release_gradients,
            gradient_format=way.gradient_format,
            tuning=tuning or Tuning(),
        )
        for _ in range(2):  # the first one also shares weights
            with counting() as moved:
                opt.zero_grad()
                loss_of(trained).backward()
                opt.step()
        found.append(
            (
                plan(model, opt, dist.get_world_size(), way, Options(tuning=tuning or Tuning())).moved["wire"],
                moved.received,
            )
        )
        opt.close()
    return found


def test_plans_are_what_moves(ranks: Pool) -> None:
    for by_way in ranks.run(planned_and_moved, MOVING, 3, world=3):
        for way, (planned, moved) in zip(MOVING, by_way, strict=True):
            assert moved == pytest.approx(planned, rel=CLOSE), f"{way}: {moved / planned:.3f} of what is planned"


def planned_for_muon() -> tuple[int, int]:
    return planned_and_moved([Way(2, True, torch.float32)], 3, kind=ShardedMuon)[0]


def test_plans_are_what_moves_of_matrices(ranks: Pool) -> None:
    """Over all ranks: owners hold more of their matrices than the Nth part that the plan takes off."""
    planned, moved = map(sum, zip(*ranks.run(planned_for_muon, world=3), strict=True))
    assert 0.9 <= moved / planned <= 1.01, f"{moved / planned:.3f} of what is planned"


def planned_at_stage_3(neighbours: bool) -> tuple[int, int]:
    found = planned_and_moved([Way(3, True, torch.float32)], 7, Tuning(neighbours=neighbours))
    return found[0]


def test_plans_are_what_moves_at_stage_3(ranks: Pool) -> None:
    for neighbours in (True, False):
        for planned, moved in ranks.run(planned_at_stage_3, neighbours, world=3):
            assert moved == pytest.approx(planned, rel=CLOSE), f"{moved / planned:.3f} of what is planned"
