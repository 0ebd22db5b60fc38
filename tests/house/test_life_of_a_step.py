"""Promise: docs/life-of-a-step.md tells the events of a step in their order: each function that it names exists and is
called after the one of the row before it, on the real way of a step on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedAdamW, Tuning
from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.told_pages import check_names, check_order, noted_calls, told

PAGE = ROOT / "docs" / "life-of-a-step.md"
WAYS: dict[str, dict[str, Any]] = {
    "Stage 1, params alone": {"stage": 1},
    "Stage 2": {"stage": 2, "module": True},
    "Stage 3": {"stage": 3, "module": True},
    "Offloaded to a disk": {"stage": 2, "module": True, "offload": "disk"},
}


def traced(stage: int, module: bool = False, offload: str | None = None) -> list[str]:
    """The package's functions in the order of their calls, in the second forward, backward and step of a model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tuning = Tuning(keep_below=0, bucket_bytes=4096, neighbours=False)
    opt = ShardedAdamW(model if module else model.parameters(), stage=stage, offload=offload, tuning=tuning)

    def step() -> None:
        model(torch.ones(4, 32)).sum().backward()
        if not module:
            for param in model.parameters():
                dist.all_reduce(param.grad)
        opt.step()

    step()
    opt.zero_grad()
    with noted_calls() as calls:
        step()
    opt.close()
    return calls


@pytest.mark.parametrize("heading", WAYS)
def test_events_come_as_the_page_tells(ranks: Pool, heading: str, tmp_path: Path) -> None:
    way = dict(WAYS[heading])
    if "offload" in way:
        way["offload"] = str(tmp_path)
    calls = ranks.run(traced, *way.values(), world=2)[0]
    check_order(told(PAGE)[heading], calls)


def test_all_that_is_named_is_there() -> None:
    check_names(PAGE)


def test_each_way_is_told() -> None:
    assert list(told(PAGE)) == list(WAYS)
    assert all(len(events) >= 10 for events in told(PAGE).values())
