"""Promise: host memory is registered with the GPU once: steps register none, nor do states that move there again.

Registering takes longer than the bus. What states leave when they go back to the device waits for them, and shows in
``opt.memory()``; closing gives it back. Nothing that a script still holds is written over.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import Parameter

from shardopt import Offload, ShardedAdamW, Tuning
from tests.offload.test_pinned import Runtime, on_a_gpu
from tests.support.streams import Machine
from tests.support.streams.counts import BLOCKING_COPIES, COPIES, HOST_WAITS, KERNELS, PINNINGS
from tests.support.streams.record import HOST, TO_DEVICE, TO_HOST
from tests.support.streams.scenarios import TIERS, Scenario, once
from tests.support.timeline.hardware import GB, MACHINES, Hardware, durations
from tests.support.timeline.schedule import schedule
from tests.support.training import one_thread, raw

NUMEL = 1 << 16


def advance(param: Parameter, optimizer: ShardedAdamW, value: float) -> None:
    param.grad = torch.full_like(param, value)
    optimizer.step()


def registrations(runtime: Runtime) -> int:
    return sum(call == "register" for call, *_ in runtime.calls)


def test_states_that_move_again_find_their_memory() -> None:
    runtime, param, other = Runtime(refuses=False), Parameter(torch.zeros(NUMEL)), Parameter(torch.zeros(NUMEL))
    still = ShardedAdamW([other])
    with on_a_gpu(runtime):
        optimizer = ShardedAdamW([param])
        advance(param, optimizer, 1.0)
        advance(other, still, 1.0)
        counts = []
        for number in range(3):
            optimizer.offload("cpu")
            counts.append(registrations(runtime))
            assert optimizer.memory()["state"] == {"host": 8 * NUMEL}
            assert optimizer.memory()["buffer"].get("host", 0) == 0
            optimizer.reload()
            advance(param, optimizer, -2.0 + number)  # the memory holds old states from here on
            advance(other, still, -2.0 + number)
            assert optimizer.memory()["buffer"]["host"] == 8 * NUMEL
        assert counts == [2, 2, 2] and len(runtime.registered) == 2  # exp_avg and exp_avg_sq
        assert raw(param) == raw(other)
        for name in ("exp_avg", "exp_avg_sq"):
            assert raw(optimizer.state[param][name]) == raw(still.state[other][name])
        optimizer.close()
    assert not runtime.registered


def test_what_a_script_holds_is_not_written_over() -> None:
    runtime, param = Runtime(refuses=False), Parameter(torch.zeros(NUMEL))
    with on_a_gpu(runtime):
        optimizer = ShardedAdamW([param])
        advance(param, optimizer, 1.0)
        optimizer.offload("cpu")
        storage = optimizer.engine.domains[0].shards[0].home
        held = storage.read("exp_avg", 0, NUMEL)
        before = raw(held)
        optimizer.reload()
        advance(param, optimizer, 3.0)
        optimizer.offload("cpu")
        assert raw(held) == before and registrations(runtime) == 3 and len(runtime.registered) == 2
        optimizer.close()


def test_memory_of_a_move_that_failed_is_given_back() -> None:
    runtime, param = Runtime(refuses=False), Parameter(torch.zeros(NUMEL))
    with on_a_gpu(runtime):
        optimizer = ShardedAdamW([param])
        advance(param, optimizer, 1.0)
        optimizer.offload("cpu")
        optimizer.reload()
        assert len(runtime.registered) == 2
        with pytest.raises(Exception, match="directory"):
            optimizer.offload(__file__)
        assert not runtime.registered
        optimizer.close()


def test_both_ways_are_tried_once_however_often_states_move() -> None:
    """``step="auto"``: which way takes less time is known from then on."""
    runtime, param = Runtime(refuses=False), Parameter(torch.zeros(NUMEL))
    with on_a_gpu(runtime):
        optimizer = ShardedAdamW([param])
        advance(param, optimizer, 1.0)
        optimizer.offload("cpu")
        for _ in range(7):
            advance(param, optimizer, 1.0)
        note = optimizer.timings().note
        assert note is not None and "fastest of 3 steps" in note
        optimizer.reload()
        optimizer.offload("cpu")
        before = registrations(runtime)
        assert optimizer.timings().note == note
        advance(param, optimizer, 1.0)
        advance(param, optimizer, 1.0)
        assert registrations(runtime) - before <= 4  # a way's own buffers, if it has any, and these once
        optimizer.close()


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "memory"])
@pytest.mark.parametrize("world", [1, 8])
def test_a_step_registers_nothing_and_copies_without_blocking(tier: str, world: int) -> None:
    """Nor do forward and backward, which read params that are kept in host memory."""
    scenario = Scenario(3 if "params" in tier else 2, tier, way="once", world=world)
    with one_thread(), scenario.machine() as machine:
        training = scenario.start(machine)
        once(training)
        once(training)
        machine.counts.forget()
        once(training)
        step = machine.counts.by_phase["step"]
        # With early updates it waits once: whether a script wrote to the params since decides what it launches.
        assert step and step[BLOCKING_COPIES] == ("early" in tier)
        waits = {phase: [where for kind, where in of if kind in _WAITS] for phase, of in machine.counts.sites.items()}
        assert not waits.get("forward") and not [each for each in waits["backward"] if each.startswith("offload/host")]
        assert not sum(each[PINNINGS] for each in machine.counts.by_phase.values())
        training.optimizer.close()


@contextmanager
def four_buckets(numel: int) -> Iterator[tuple[Machine, ShardedAdamW]]:
    """An optimizer that has stepped, on a stand-in of a GPU: 8 states of so many elements, fp32."""
    with one_thread(), Machine(world=1) as machine:
        params = [Parameter(machine.tensor(torch.ones(numel))) for _ in range(4)]
        for each in params:
            each.grad = machine.tensor(torch.ones(numel))
        optimizer = ShardedAdamW(params, tuning=Tuning(bucket_bytes=4 * numel, nonfinite="propagate"))
        optimizer.step()
        yield machine, optimizer
        optimizer.close()


def test_a_move_to_the_host_waits_once_and_pins_while_it_copies() -> None:
    with four_buckets(1 << 14) as (machine, optimizer):
        with machine.recording() as first, machine.during("first"):
            optimizer.offload("cpu")
        optimizer.reload()
        with machine.during("again"):
            optimizer.offload("cpu")
        counts = machine.counts.by_phase
        assert [counts[phase][BLOCKING_COPIES] for phase in counts] == [0, 0]
        assert [counts[phase][HOST_WAITS] for phase in counts] == [1, 1]
        assert [counts[phase][PINNINGS] for phase in counts] == [8, 0]
        timed = durations(first.works, Hardware("one rate", *[GB] * 6, pinning=GB, gap=0.0, latency=0.0))
        plan = schedule(timed)
        busy = plan.busy()
        assert plan.makespan <= busy[HOST] + busy[TO_HOST] / 7  # all copies but the last one


@pytest.mark.parametrize("move", ["offload", "reload"])
def test_one_stream_keeps_the_bus_busy_in_a_move(move: str) -> None:
    """Of states whose memory is pinned, predicted with the rates of an H100: 64M elements, as ``bench/offload.py``."""
    larger, hardware = 32, MACHINES["h100-pcie5"]
    with four_buckets((1 << 24) // larger**2) as (machine, optimizer):
        optimizer.offload("cpu")
        optimizer.reload()
        if move == "reload":
            optimizer.offload("cpu")
        with machine.recording(larger) as found, machine.during(move):
            optimizer.offload("cpu") if move == "offload" else optimizer.reload()
    counts = machine.counts.by_phase[move]
    assert (counts[BLOCKING_COPIES], counts[HOST_WAITS], counts[PINNINGS], counts[COPIES]) == (0, 1, 0, 8)
    assert not counts[KERNELS]  # memory that is copied to is not zeroed before
    carried = sum(each.cost.nbytes for each in found.works if each.cost.engine in (TO_HOST, TO_DEVICE))
    assert carried == 8 * 4 << 24
    assert carried / schedule(durations(found.works, hardware)).makespan >= 0.98 * hardware.bus / GB  # bytes a ns


def test_the_stand_in_counts_what_is_registered() -> None:
    """So that the test above can fail: the first step of a tier registers its memory."""
    scenario = Scenario(2, "CPU step", way="once", world=1)
    with one_thread(), scenario.machine() as machine:
        training = scenario.start(machine)
        once(training)
        assert machine.counts.by_phase["step"][PINNINGS] > 0
        training.optimizer.close()


_ = (Offload, Tuning)
_WAITS = (BLOCKING_COPIES, HOST_WAITS)
