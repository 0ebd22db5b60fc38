"""A sum of messages is taken in mid-backward once they have come, bucket after bucket, and never before."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.partition.comm.group import Ranks, Traffic
from shardopt.partition.comm.reduce_scatter import Reduction
from shardopt.partition.comm.reduce_scatter_p2p import P2PReduceScatter
from tests.support.ranks import Pool

NUMEL, WORLD = 256, 3


class Wire:
    """Messages of the middle one of three ranks, which come when the test says so."""

    rank, size = 1, WORLD

    def __init__(self) -> None:
        self.rooms: list[Sequence[Tensor]] = []
        self.waited: list[int] = []

    def exchange_slices(self, own: Sequence[Tensor], others: Sequence[Tensor], tag: int, phase: str) -> int:
        self.rooms.append(others)
        return len(self.rooms) - 1

    def wait(self, number: int) -> None:
        self.waited.append(number)

    def deliver(self, number: int, rank: int, message: Tensor) -> None:
        self.rooms[number][rank].copy_(message)


def started(scatter: Any, count: int, rank: int, world: int) -> list[Reduction]:
    """Each rank's gradients are its number, and a thousand times that of the bucket."""
    found = []
    for number in range(count):
        buffer = torch.full((world * NUMEL,), 1000.0 * number + rank)
        found.append(Reduction(buffer, torch.full((NUMEL,), torch.nan), add=False))
        scatter.start(found[-1])
    return found


def test_sums_are_taken_as_their_messages_come() -> None:
    wire = Wire()
    scatter = P2PReduceScatter(wire, Traffic(), 0)  # type: ignore[arg-type]
    scatter.start_round(0)
    first, second, third = started(scatter, 3, wire.rank, WORLD)
    assert scatter.progress() == []
    wire.deliver(0, 0, torch.full((NUMEL,), 0.0))
    assert scatter.progress() == []  # the other rank's is missing
    for rank in (0, 2):
        wire.deliver(1, rank, torch.full((NUMEL,), 1000.0 + rank))
    assert scatter.progress() == []  # sums are taken in the order of the buckets
    assert wire.waited == [] and bool(second.target.isnan().all())
    wire.deliver(0, 2, torch.full((NUMEL,), 2.0))
    assert scatter.progress() == [first, second]  # both at once, and not the one of which nothing has come
    assert wire.waited == [0, 1]
    assert bool((first.target == 3.0).all()) and bool((second.target == 3003.0).all())
    assert bool(third.target.isnan().all())


def test_a_message_that_ends_as_an_absent_one_is_waited_for() -> None:
    """Its last bytes are those that its room had: it is taken for one that has not come, and never lost."""
    wire = Wire()
    scatter = P2PReduceScatter(wire, Traffic(), 0)  # type: ignore[arg-type]
    scatter.start_round(0)
    (reduction,) = started(scatter, 1, wire.rank, WORLD)
    message = torch.zeros(NUMEL)
    message[-1:].view(torch.int32).fill_(-1)
    wire.deliver(0, 0, message)
    wire.deliver(0, 2, torch.zeros(NUMEL))
    assert scatter.progress() == [] and wire.waited == []
    assert scatter.finish() == [reduction] and wire.waited == [0]
    assert bool((reduction.target[:-1] == 1.0).all()) and bool(reduction.target[-1].isnan())


def sums_without_a_wait() -> int:
    """The number of sums that a rank takes while it asks for no more than what has come."""
    rank, world = dist.get_rank(), dist.get_world_size()
    scatter = P2PReduceScatter(Ranks(None, None), Traffic(), 0)
    scatter.start_round(0)
    reductions, ended = started(scatter, 4, rank, world), list[Reduction]()
    dist.barrier()
    deadline = time.monotonic() + 60
    while len(ended) < 4 and time.monotonic() < deadline:
        ended += scatter.progress()
    assert ended == reductions[: len(ended)]
    for number, each in enumerate(ended):
        assert bool((each.target == 1000.0 * number * world + sum(range(world))).all())
    scatter.finish()
    return len(ended)


def test_sums_are_taken_without_a_wait(ranks: Pool) -> None:
    assert ranks.run(sums_without_a_wait, world=WORLD) == [4] * WORLD
