"""Promise: docs/life-of-a-step.md tells the events of a step in their order: each function that it names exists and is
called after the one of the row before it, on the real way of a step on two ranks."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedAdamW, Tuning
from tests.support.paths import ROOT
from tests.support.ranks import Pool

PAGE = ROOT / "docs" / "life-of-a-step.md"
WAYS: dict[str, dict[str, Any]] = {
    "Stage 1, params alone": {"stage": 1},
    "Stage 2": {"stage": 2, "module": True},
    "Stage 3": {"stage": 3, "module": True},
    "Offloaded to a disk": {"stage": 2, "module": True, "offload": "disk"},
}
ROW = re.compile(r"^\| \d+ \|.*\| `([a-z0-9_/]+\.py)` `([A-Za-z0-9_.<>]+)` \|$")


def told() -> dict[str, list[str]]:
    """Heading -> what its table names, as "file:function"."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and line[2].isdigit():
            match = ROW.match(line)
            assert match is not None, line
            found.setdefault(heading, []).append(":".join(match.groups()))
    return found


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
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT / "shardopt" in path.parents:
            calls.append(f"{path.relative_to(ROOT / 'shardopt').as_posix()}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    opt.close()
    return calls


@pytest.mark.parametrize("heading", WAYS)
def test_events_come_as_the_page_tells(ranks: Pool, heading: str, tmp_path: Path) -> None:
    way = dict(WAYS[heading])
    if "offload" in way:
        way["offload"] = str(tmp_path)
    calls = ranks.run(traced, *way.values(), world=2)[0]
    at = 0
    for event in told()[heading]:
        assert event in calls, f"{event} is not called"
        assert event in calls[at:], f"{event} is called before the row above it, and not after"
        at = calls.index(event, at) + 1


def names_in(path: Path) -> set[str]:
    """The classes and functions of a file, qualified."""

    def within(node: ast.AST, prefix: str) -> Iterator[str]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                yield f"{prefix}{each.name}"
                yield from within(each, f"{prefix}{each.name}.")

    return set(within(ast.parse(path.read_text()), ""))


def test_all_that_is_named_is_there() -> None:
    text = PAGE.read_text()
    for path, name in re.findall(r"`([a-z0-9_/]+\.py)` `([A-Za-z0-9_.]+)`", text):
        assert name in names_in(ROOT / "shardopt" / path), f"{path} has no {name}"
    for path in re.findall(r"`([a-z0-9_/]+\.py)`", text):
        assert (ROOT / "shardopt" / path).exists() or (ROOT / path).exists(), path


def test_each_way_is_told() -> None:
    assert list(told()) == list(WAYS)
    assert all(len(events) >= 10 for events in told().values())
