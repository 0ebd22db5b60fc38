"""Promise: of a step's engines the busiest one bounds it: copies, kernels, collectives and the CPU's threads overlap.

Nothing here runs on a GPU, and no time is taken: stand-ins record what waits for what (``tests/support/streams``), and
each work takes its bytes over a rate that is fixed below. A wait too many, an order that lets an engine stand idle, or
work that is done twice changes a number. The host's own time is left out: ``tests/step/test_host_calls.py`` counts it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardopt import Offload, ShardedAdamW, Tuning
from shardopt.offload.streams import CopyStreams
from tests.support.streams import Machine
from tests.support.streams.group import Group
from tests.support.timeline.hardware import GB, Hardware
from tests.support.timeline.schedule import Timed, schedule
from tests.support.timeline.trainings import Round, Step, record, timed
from tests.support.training import one_thread

LARGER, WIDTH, LAYERS, ROWS = 32, 64, 8, 64
# Bytes a nanosecond as on an H100; links and flops such that each engine has a part in a step of this model.
FIXED = Hardware(
    "fixed",
    memory=3000 * GB,
    flops=100e12,
    bus=45 * GB,
    host_memory=80 * GB,
    link=40 * GB,
    disk=20 * GB,
    gap=0.0,
    latency=0.0,
    link_latency=0.0,
)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass(frozen=True)
class Scenario:
    """A training of layers of one size, a bucket each.

    Attributes:
        bound: the most that a step takes, over its busiest engine.
        microseconds: the most that it takes: of work that is done twice an engine is only busier.
    """

    stage: int
    world: int
    bound: float
    microseconds: int
    offload: str | None = None  # a field of Offload, or "disk"
    releases: bool = False  # buckets are updated in backward

    def __str__(self) -> str:
        more = ", in backward" * self.releases
        return f"stage {self.stage} of {self.world}, {self.offload or 'device'}{more}"

    def start(self, machine: Machine, directory: Path) -> tuple[ShardedAdamW, Callable[[], None]]:
        torch.manual_seed(0)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
        model = machine.move(nn.Sequential(*layers).bfloat16())
        tiers = {None: None, "gpu": Offload(step="gpu"), "cpu": Offload(step="cpu"), "disk": Offload(directory)}
        optimizer = ShardedAdamW(
            model,
            stage=self.stage,
            process_group=machine.group,
            offload=tiers[self.offload],
            release_gradients=self.releases,
            tuning=Tuning(bucket_bytes=2 * WIDTH**2, chunk_bytes=4096, nonfinite="propagate", keep_below=0),
        )
        x = machine.tensor(torch.randn(ROWS, WIDTH).bfloat16())

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return optimizer, step

    def record(self, directory: Path) -> Round:
        with Machine(self.world) as machine:
            optimizer, step = self.start(machine, directory)
            found = record(machine, [("step", step)], larger=LARGER)
            optimizer.close()
        return found


SCENARIOS = (
    Scenario(1, 1, 1.02, 4630),
    Scenario(2, 1, 1.02, 4630),
    Scenario(3, 1, 1.02, 4710),
    Scenario(1, 8, 1.42, 5900),  # params are gathered at the end of the step: see Tuning.overlap_gather
    Scenario(2, 8, 1.42, 5900),
    Scenario(3, 8, 1.12, 4660),
    Scenario(2, 1, 1.38, 12_400, "gpu"),  # states come and go in the step alone, while forward and backward use no bus
    Scenario(2, 1, 1.16, 10_400, "gpu", releases=True),
    Scenario(2, 8, 1.46, 6050, "gpu"),
    Scenario(2, 1, 1.35, 17_990, "cpu"),
    Scenario(2, 1, 1.11, 44_400, "disk"),
)


def step_of(scenario: Scenario, directory: Path) -> Step:
    return timed(scenario.record(directory), FIXED)["step"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_busiest_engine_bounds_a_step(scenario: Scenario, tmp_path: Path) -> None:
    step = step_of(scenario, tmp_path)
    assert step.over_bound <= scenario.bound and step.nanoseconds <= 1000 * scenario.microseconds, step


# -- an overlap that is lost is found ----------------------------------------------------------------------------------


def scenario_of(name: str) -> Scenario:
    (found,) = (each for each in SCENARIOS if str(each) == name)
    return found


def test_copies_of_both_directions_in_one_stream_are_found(tmp_path: Path) -> None:
    scenario = scenario_of("stage 2 of 1, gpu")
    with patch.object(CopyStreams, "to_host", CopyStreams.to_device):
        assert step_of(scenario, tmp_path).over_bound > 1.2 * scenario.bound


def test_a_kernel_that_waits_for_each_collective_is_found(tmp_path: Path) -> None:
    scenario, run = scenario_of("stage 2 of 8, device"), Group._run

    def waited_for(group: Group, *arguments: Any) -> Any:
        work = run(group, *arguments)
        group._book.stream.follow(group.stream.clock)
        return work

    with patch.object(Group, "_run", waited_for):
        assert step_of(scenario, tmp_path).over_bound > 1.2 * scenario.bound


def test_a_host_that_waits_for_each_copy_is_found(tmp_path: Path) -> None:
    scenario, copy = scenario_of("stage 2 of 1, gpu"), CopyStreams._copy

    def waited_for(streams: CopyStreams, *arguments: Any) -> Any:
        mark = copy(streams, *arguments)
        streams.synchronize(mark)
        return mark

    with patch.object(CopyStreams, "_copy", waited_for):
        assert step_of(scenario, tmp_path).over_bound > 1.2 * scenario.bound


# -- a schedule --------------------------------------------------------------------------------------------------------


def test_a_schedule_is_exact() -> None:
    """Two copies and two kernels, of which the second kernel needs both copies; the host needs the kernels."""
    found = schedule(
        [
            Timed("first copy", "bus", 5, ()),
            Timed("first kernel", "compute", 7, (0,)),
            Timed("second copy", "bus", 9, ()),
            Timed("second kernel", "compute", 1, (0, 2)),
            Timed("a wait", "host", 0, (1, 3)),
        ]
    )
    assert (found.starts, found.ends, found.makespan) == ([0, 5, 5, 14, 15], [5, 12, 14, 15, 15], 15)
    assert [found.works[each].name for each in found.critical_path()] == [
        "first copy",
        "second copy",
        "second kernel",
        "a wait",
    ]
    assert found.busy() == {"bus": 14, "compute": 8, "host": 0} and found.busy(2) == {"bus": 9, "compute": 1, "host": 0}


def test_an_engine_takes_the_work_that_could_begin_first() -> None:
    works = [Timed("late", "bus", 3, ()), Timed("waits", "link", 1, (0,)), Timed("ready", "link", 5, ())]
    assert schedule(works).starts == [0, 5, 0]


def test_a_work_comes_after_earlier_ones_only() -> None:
    with pytest.raises(ValueError, match="is no earlier one"):
        schedule([Timed("one", "bus", 1, (0,))])
