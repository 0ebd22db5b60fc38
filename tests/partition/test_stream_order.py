"""Promise: on a GPU, streams, events and collectives are in order, at every stage and tier, in every way to step.

Nothing here runs on a GPU: see ``tests/support/streams``. Two uses of the same memory that nothing orders are a race,
whether or not a GPU would let them meet.
"""

import pytest
import torch

from tests.support.streams import Machine
from tests.support.streams.scenarios import Scenario, scenarios


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_no_race(scenario: Scenario) -> None:
    assert scenario.run().races == []


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
