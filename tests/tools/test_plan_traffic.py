"""The bytes that the planner says a step of Muon moves, against those that the system counts while a training takes it.

Of rules that work element by element, partition/test_traffic.py counts them, and test_traffic_of_models.py at stage 3.
"""

import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedMuon
from shardopt.tools.plan import plan
from shardopt.tools.ways import Way
from tests.support.ranks import Pool
from tests.support.wire import counting

LAYERS, WIDTH = 12, 160  # small, as an update takes 15 products of matrices


def planned_and_moved() -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = ShardedMuon(model, stage=2)
    for _ in range(2):  # the first one also shares weights
        with counting() as moved:
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
    planned = plan(model, optimizer, dist.get_world_size(), Way(2, True, torch.float32), optimizer.options)
    return planned.moved["wire"], moved.received


def test_plans_are_what_moves_of_matrices(ranks: Pool) -> None:
    """Over all ranks: owners hold more of their matrices than the Nth part that the plan takes off."""
    planned, moved = map(sum, zip(*ranks.run(planned_and_moved, world=3), strict=True))
    assert 0.9 <= moved / planned <= 1.01, f"{moved / planned:.3f} of what is planned"
