"""Machines as a few numbers, and how long a work takes on one.

What the H100 measured here (``bench/results``: the bus and the kernels) is taken from there; all else is public: a
vendor's number, times the share of it that copies and products of matrices usually reach. Nothing of a machine comes
from a training step or a move of states: these are what the timeline is held to.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.support.streams.record import COMPUTE, DISK, HOST, LINK, TO_DEVICE, TO_HOST, WORKERS, Work

from .schedule import Timed

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """Rates in bytes or operations a second, times in nanoseconds.

    Attributes:
        memory: of the device, bytes that a copy reads and writes.
        flops: of products of matrices in bf16.
        bus: each direction, while the other one is busy too.
        host_memory: bytes that threads of the CPU read and write.
        link: to the other ranks, each direction.
        disk: reads and writes together.
        pinning: bytes of host memory that are registered.
        launch: the host's time to give the device one operation of torch.
        call: the host's time for another call: a wait, an operation on host memory.
        gap: the device's time from one kernel to the next.
        latency: of a copy over the bus or a transfer of a disk.
        link_latency: of a collective.
        host: its host's time for a phase of a training, over that on the machine where it was measured.
    """

    name: str
    memory: float
    flops: float
    bus: float
    host_memory: float
    link: float
    disk: float = 5 * GB
    pinning: float = 6 * GB
    launch: float = 0.0
    call: float = 0.0
    gap: float = 1500.0
    latency: float = 5000.0
    link_latency: float = 20_000.0
    host: float = 1.0


# From bench/results of 2026-11-26: a copy in device memory, copies both ways over the bus (of their sum each way gets a
# half), a copy in host memory, and torch's AdamW in a loop over 64 params, 8 launches each, which the host bounds.
_H100 = Hardware(
    "h100-pcie5",
    memory=3001.83 * GB,
    flops=650e12,  # of 989: what large products reach in public measurements
    bus=91.2844 / 2 * GB,
    host_memory=80.9922 * GB,
    link=40 * GB,  # PCIe 5 x16
    launch=0.00417901e9 / (64 * 8),
    call=1000.0,
)

MACHINES = {
    each.name: each
    for each in (
        _H100,
        replace(_H100, name="h100-nvlink", link=360 * GB),  # of 450: what all-gathers of NCCL reach
        replace(_H100, name="h200", memory=4300 * GB, link=360 * GB),  # of 4800
        replace(
            _H100, name="a100", memory=1700 * GB, flops=240e12, bus=23 * GB, link=235 * GB
        ),  # of 2039, 312, 32, 300
        replace(_H100, name="4090", memory=930 * GB, flops=150e12, bus=23 * GB, link=20 * GB),  # of 1008, 165, 32
    )
}


def durations(works: Iterable[Work], machine: Hardware) -> list[Timed]:
    """Returns the works with the time that each takes on a machine."""
    return [Timed(_name(each), each.cost.engine, _time_of(each, machine), each.after) for each in works]


def _name(work: Work) -> str:
    return work.what if work.where is None else f"{work.what} ({work.where.split(':')[0]})"


def _time_of(work: Work, machine: Hardware) -> int:
    cost = work.cost
    if cost.engine == HOST:
        return math.ceil(_call(work, machine) + work.pinned / machine.pinning * 1e9)
    rate, fixed = {
        COMPUTE: (machine.memory, machine.gap),
        TO_DEVICE: (machine.bus, machine.latency),
        TO_HOST: (machine.bus, machine.latency),
        LINK: (machine.link, machine.link_latency),
        WORKERS: (machine.host_memory, machine.latency),
        DISK: (machine.disk, machine.latency),
    }[cost.engine]
    seconds = max(cost.nbytes / rate, cost.flops / machine.flops)
    return math.ceil(fixed + seconds * 1e9) if cost.nbytes else 0


def _call(work: Work, machine: Hardware) -> float:
    return machine.launch if work.what.startswith("launch of ") else machine.call
