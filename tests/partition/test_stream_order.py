"""Promise: on a GPU, streams, events and collectives are in order, at every stage and tier, in every way to step.

Nothing here runs on a GPU: see ``tests/support/streams``. Two uses of the same memory that nothing orders are a race,
whether or not a GPU would let them meet.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.mutation.waits import RESULTS, found_by, sites
from tests.mutation.waits_unseen import UNSEEN
from tests.support.streams import Machine
from tests.support.streams.scenarios import TWO, Scenario, is_dear, scenarios
from tests.support.training import one_thread


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


REORDERED = Scenario(2, way="reordered", hidden=True, bucket_bytes=TWO, depth=9, leaf_streams=16)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, id=str(each), marks=pytest.mark.slow if is_dear(each) else ()) for each in scenarios()],
)
def test_no_race(scenario: Scenario) -> None:
    assert scenario.run().races == []


def test_a_forward_begins_before_all_params_have_arrived() -> None:
    scenario = Scenario(2, way="once", overlaps=True)
    with scenario.machine() as machine:
        training = scenario.start(machine)
        training.backward()
        before = machine.collectives_begun
        training.step()
        seen: list[tuple[int, int]] = []

        def note(*_: object) -> None:
            seen.append((machine.collectives_waited_for, machine.collectives_begun))

        for layer in training.model.layers:
            layer.register_forward_hook(note)
        training.backward()
        waited, begun = zip(*seen, strict=True)
    gathers = begun[0] - before
    assert set(begun) == {begun[0]} and gathers == len(training.model.layers)
    assert waited[0] < waited[2] < waited[-1] == begun[0]


# -- the stand-in sees what it has to see ------------------------------------------------------------------------------


def test_streams_that_nothing_orders_race() -> None:
    with Machine(world=1) as machine:
        values, side = machine.tensor(torch.zeros(8)), torch.cuda.Stream()
        values.add_(1)
        with torch.cuda.stream(side):
            values.add_(1)
        assert len(machine.races) == 1 and "add_ on stream 1 writes what add_ on the default stream" in machine.races[0]


def test_an_event_orders_streams() -> None:
    with Machine(world=1) as machine:
        values, side, event = machine.tensor(torch.zeros(8)), torch.cuda.Stream(), torch.cuda.Event()
        values.add_(1)
        event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            values[:4].add_(1)
        values[4:].add_(1)  # other bytes
        assert machine.races == []
        values.add_(1)
        assert len(machine.races) == 1


def test_memory_freed_under_a_stream_races() -> None:
    with Machine(world=1) as machine:
        side = torch.cuda.Stream()
        for is_told in (True, False):
            assert machine.races == []
            values = machine.tensor(torch.zeros(8))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                values.add_(1)
            if is_told:
                values.record_stream(side)
            del values
        assert len(machine.races) == 1 and "nothing tells its allocator" in machine.races[0]


def test_collectives_that_nobody_waits_for_race() -> None:
    with Machine(world=8) as machine:
        values = machine.tensor(torch.ones(8))
        for is_waited_for in (True, False):
            assert machine.races == []
            work = torch.distributed.all_reduce(values, group=machine.group, async_op=True)
            if is_waited_for:
                work.wait()
            values.add_(1)
        assert len(machine.races) == 1 and "what all_reduce on the process group's stream" in machine.races[0]
        assert float(values[0]) == 73


def test_host_memory_of_a_copy_under_way_races() -> None:
    with Machine(world=1) as machine:
        on_host, values, side = torch.zeros(8), machine.tensor(torch.zeros(8)), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.copy_(on_host, non_blocking=True)
        on_host.add_(1)
        assert len(machine.races) == 1
        side.synchronize()
        on_host.add_(1)
        assert len(machine.races) == 1


def test_the_device_is_no_host() -> None:
    """What a GPU refuses is refused."""
    with Machine(world=8) as machine:
        values = machine.tensor(torch.zeros(8))
        assert values.device == torch.device("cuda:0") and values.is_cuda and not torch.zeros(1).is_cuda
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
            values.numpy()
        with pytest.raises(RuntimeError, match="same device"):
            values.add(torch.zeros(8))
        with pytest.raises(RuntimeError, match="No backend type"):
            torch.distributed.all_reduce(torch.zeros(8), group=machine.group)
        assert torch.equal(values.cpu(), torch.zeros(8)) and values.cpu().device.type == "cpu"


# -- a wait that is taken away is found --------------------------------------------------------------------------------

# ``python -m tests.mutation.waits`` takes away all of them, one at a time.
EXAMPLES = (
    ("StreamUses._join_on", "stream.wait_event(event)", Scenario(2)),
    ("Reducer._start", "self._sums.join()", REORDERED),
    ("CollectiveReduceScatter._finish_first", "self._ranks.wait_on_stream(pending)", Scenario(1)),
    ("AllGather.finish", "end()", Scenario(3)),
    ("RingStore.fetch", "self._streams.wait(slot.mark)", Scenario(2, "ring")),
    ("CpuStepStore.fetch", "self._streams.synchronize(slot.mark)", Scenario(2, "CPU step")),
    ("HostLanding.acquire", "self._streams.wait(slot.mark)", Scenario(2, "ring, gradients at rest")),
    ("RemoteStates._slice", "self._written.wait()", Scenario(1, way="served")),
)


@pytest.mark.parametrize(("function", "text", "scenario"), EXAMPLES, ids=[each[0] for each in EXAMPLES])
def test_a_wait_that_is_gone_is_found(function: str, text: str, scenario: Scenario) -> None:
    (site,) = (each for each in sites() if each.function == function and each.text == text)
    assert found_by(site, [scenario]) is not None


def test_every_site_was_tried() -> None:
    """``python -m tests.mutation.waits`` writes the table anew. What no scenario finds has a reason there."""
    written = RESULTS.read_text()
    assert [str(each) for each in sites() if str(each) not in written] == []
    unseen = {line.split(" | ")[0].removeprefix("| ") for line in written.splitlines() if "**not found**" in line}
    assert unseen == UNSEEN.keys()
