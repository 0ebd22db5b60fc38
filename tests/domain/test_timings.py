"""Where a step's time goes: phases, the first step apart, labels in torch's profiler, a Chrome trace."""

import json
import operator
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedSGD, Tuning
from shardopt.domain.timings import Clock
from tests.support.ranks import Pool


def test_the_first_step_is_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels are compiled in it. A trace has every phase at its time, those inside of others too."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    clock = Clock()
    for seconds in (90.0, 1.0, 3.0, 2.0):
        with clock.phase("update"):
            now[0] += seconds
            with clock.phase("agree"):
                now[0] += 0.5
        clock.end_step()
        if seconds == 90.0:
            assert dict(clock.read()) == {"agree": 0.5, "update": 90.0}  # there is no other one yet
    timings = clock.read(rank=3)
    assert dict(timings) == {"agree": 0.5, "update": 2.0} and timings.first == 90.5
    assert re.search(r"first step +90500\.000 ms, apart: kernels are compiled", str(timings))
    assert all(map(operator.is_, timings._events, clock._events))  # thousands, of which a read makes nothing new
    timings.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [(each["name"], each["ts"], each["dur"], each["args"]["step"], each["pid"]) for each in events[:4]]
    assert shown == [
        ("agree", 1090.0e6, 0.5e6, 0, 3),
        ("update", 1000.0e6, 90.5e6, 0, 3),
        ("agree", 1091.5e6, 0.5e6, 1, 3),
        ("update", 1090.5e6, 1.5e6, 1, 3),
    ]
    assert len(events) == 8 and {each["ph"] for each in events} == {"X"}


def test_medians_are_over_the_last_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a page of slow steps at the beginning is forgotten, and one slow step changes nothing."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    for step in range(301):
        with clock.phase("update"):
            now[0] += float(step)
        clock.end_step()
    assert dict(clock.read()) == {"update": 250.5}  # of 201 to 300


def profiled(stage: int, folder: str) -> tuple[set[str], set[str], set[str]]:
    """What torch's profiler shows of a step, what the timings have, and what a trace names."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(3)))
    opt = ShardedSGD(module, stage=stage, tuning=Tuning(keep_below=0, neighbours=False, bucket_bytes=300 * 300 * 4))

    def step() -> None:
        opt.zero_grad()
        module(torch.ones(1, 300)).sum().backward()
        opt.step()

    def refused(*_: Any) -> None:
        raise AssertionError("a label, which costs more than what it names, and nobody records it")

    with pytest.MonkeyPatch.context() as patch:  # without a profiler there are no labels
        patch.setattr("torch.profiler.record_function", refused)
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    labels = {event.key.removeprefix("shardopt: ") for event in profile.key_averages() if "shardopt: " in event.key}
    file = Path(folder) / f"{stage}-{dist.get_rank()}.json"
    opt.timings().trace(file)
    events = json.loads(file.read_text())["traceEvents"]
    assert {each["pid"] for each in events} == {dist.get_rank()}
    found = set(opt.timings())
    opt.close()
    return labels, found, {each["name"] for each in events}


def test_a_profiler_shows_what_ranks_exchange(ranks: Pool, tmp_path: Path) -> None:
    """By the names of units and buckets; waits of stage 3 in forward and backward are a phase."""
    for labels, phases, traced in ranks.run(profiled, 2, str(tmp_path), world=2):
        assert {"reduce", "survey", "agree", "update", "gather"} <= phases and phases <= labels and phases <= traced
        assert {label for label in labels if "bucket" in label} == {
            f"{what} bucket {number}" for what in ("reduce", "gather") for number in range(3)
        }
    for labels, phases, traced in ranks.run(profiled, 3, str(tmp_path), world=2):
        assert "unshard" in phases
        for each in ("0", "1", "2"):
            assert {
                f"gather {each}",
                f"unshard {each}",
                f"reduce bucket {each}",
            } <= labels and f"unshard {each}" in traced
