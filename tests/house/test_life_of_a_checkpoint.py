"""Promise: docs/life-of-a-checkpoint.md tells the events of a save and a load in their order: each function that it
names exists and is called after the one of the row before it, on two ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardopt
from shardopt import ShardedAdamW, ShardedOptimizer, Tuning
from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.told_pages import check_names, check_order, noted_calls, told

PAGE = ROOT / "docs" / "life-of-a-checkpoint.md"
WAYS = ("Saving", "Saving in the background", "Loading")


def built() -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return model, ShardedAdamW(model, stage=2, tuning=Tuning(keep_below=0, bucket_bytes=4096))


def traced(root: Path) -> dict[str, list[str]]:
    """The package's functions in the order of their calls, by the heading that tells of them."""
    model, optimizer = built()
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    with noted_calls() as saving:
        shardopt.save_checkpoint(root, model, optimizer, keep=1)
    with noted_calls() as in_background:
        shardopt.save_checkpoint(root, model, optimizer, asynchronous=True).wait()
    model, optimizer = built()
    with noted_calls() as loading:
        shardopt.load_checkpoint(root, model, optimizer)
    optimizer.close()
    return dict(zip(WAYS, (saving, in_background, loading), strict=True))


@pytest.fixture(scope="module")
def calls(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    found: dict[str, list[str]] = ranks.run(traced, tmp_path_factory.mktemp("runs"), world=2)[0]
    return found


@pytest.mark.parametrize("heading", WAYS)
def test_events_come_as_the_page_tells(calls: dict[str, list[str]], heading: str) -> None:
    check_order(told(PAGE)[heading], calls[heading])


def test_all_that_is_named_is_there() -> None:
    check_names(PAGE)


def test_each_way_is_told() -> None:
    assert list(told(PAGE)) == list(WAYS)
    assert all(len(events) >= 9 for events in told(PAGE).values())
