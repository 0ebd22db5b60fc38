"""Stage 3 over the backend's own collectives, NCCL's path: the bits of stage 1, and ranks that go apart are told.

gloo has the same collectives; that shardopt prefers messages there is the only thing that is patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from shardopt import BindingError, ShardedSGD, ShardoptError, Tuning
from shardopt.partition.comm import all_gather, reduce_scatter_collective, transport
from shardopt.partition.comm import collectives as torch_collectives
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.transport import Transport
from tests.partition.test_gather import CASES, trained
from tests.support.modules import poisoned
from tests.support.ranks import Pool
from tests.support.through_host import through_host
from tests.support.training import raw

# Two ranks' sums have the same bits in either order, so that all ways of summing can be compared.
WORLD = 2
PLENTY = 1 << 20
ROOMS = {  # models of test_gather.py, and bytes that may stay gathered
    "skipping": 8000,
    "curved": 0,
    "Owner, plain": 0,
    "Tied, accumulated": 8000,
    "Product, joined": PLENTY,
    "Odd, plain": 8000,
    "checkpointed, reentrant True, whole False": 8000,
    "checkpointed, reentrant False, whole True": PLENTY,
}


@contextmanager
def collectives() -> Iterator[None]:
    """Within, gloo's collectives carry gradients and params, as NCCL's do on GPUs."""
    with (
        patch.object(Ranks, "has_collectives", lambda self, device: self.group is not None),
        patch.object(transport, "by_collectives", wraps=transport.by_collectives) as wire,
    ):
        yield
    assert wire.called


def trains_as_stage_1() -> None:
    """Losses, params and states. Memory that was given back is NaN."""
    for name, room in ROOMS.items():
        make, run, _ = CASES[name]
        expected = trained(make, run, 1)
        with collectives(), poisoned():
            found = trained(make, run, 3, neighbours=False, live_bytes=room)
        for kind, mine, theirs in zip(("losses", "params", "states"), found, expected, strict=True):
            assert mine == theirs, f"{name}: {kind}"


def test_trains_as_stage_1(ranks: Pool) -> None:
    ranks.run(trains_as_stage_1, world=WORLD)


class Watched:
    """A collective under way, which notes the deadlines that it is awaited with."""

    def __init__(self, work: Any, deadlines: list[Any]):
        self._work, self._deadlines = work, deadlines

    def wait(self, *deadline: Any) -> Any:
        self._deadlines.extend(deadline or (None,))
        return self._work.wait(*deadline)


def waits_without_deadline() -> None:
    deadlines: list[Any] = []

    def watched(collective: Any) -> Any:
        return lambda *arguments, **keywords: Watched(collective(*arguments, **keywords), deadlines)

    scatter = watched(torch_collectives.reduce_scatter)
    with (
        patch.object(all_gather, "collectives", SimpleNamespace(all_gather=watched(torch_collectives.all_gather))),
        patch.object(reduce_scatter_collective, "collectives", SimpleNamespace(reduce_scatter=scatter)),
        collectives(),
    ):
        make, run, _ = CASES["Odd, plain"]
        trained(make, run, 3, neighbours=False, timeout=60)
    assert len(deadlines) > 10 and set(deadlines) == {None}


def test_deadlines_do_not_make_the_host_wait(ranks: Pool) -> None:
    """With a deadline, the host polls for the end of one of NCCL's collectives, where else only its stream waits."""
    ranks.run(waits_without_deadline, world=WORLD)


def tells_what_carries() -> None:
    """``repr`` names the transport that is used, not another one."""
    for neighbours, name in ((True, "neighbours"), (False, "messages"), (False, "collectives")):
        model = nn.Linear(300, 40)
        opt = ShardedSGD(model, stage=2, tuning=Tuning(neighbours=neighbours))
        with collectives() if name == "collectives" else nullcontext():
            model(torch.ones(2, 300)).sum().backward()
            opt.step()
            assert f"transport={name})" in repr(opt), repr(opt)


def test_tells_what_carries(ranks: Pool) -> None:
    ranks.run(tells_what_carries, world=WORLD)


def refuses_gpus_over_gloo() -> None:
    """On every rank, before anything is sent."""
    with pytest.raises(BindingError, match=r"init_process_group.* cuda.*2 ranks"):
        Transport.of(Ranks(None, None), torch.device("cuda"), True)
    assert Transport.of(Ranks.alone(), torch.device("cuda"), True).name == "none"


def test_refuses_gpus_over_gloo(ranks: Pool) -> None:
    ranks.run(refuses_gpus_over_gloo, world=WORLD)


def trains_through_host() -> None:
    """What tests on one GPU move shards by, here on the CPU: the bits of plain messages."""
    for stage in (1, 3):
        expected = trained(*CASES["Odd, plain"][:2], stage, neighbours=False)
        with through_host():
            assert trained(*CASES["Odd, plain"][:2], stage) == expected


def test_trains_through_host(ranks: Pool) -> None:
    ranks.run(trains_through_host, world=WORLD)


# -- ranks that go apart -----------------------------------------------------------------------------------------------


WIDTH = 32  # two blocks of a weight lie on each rank


class Door(nn.Module):
    """All of its weight is its number. Notes what it reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.weight = number, Parameter(torch.full((WIDTH, WIDTH), float(number)))
        self.read: set[float] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.read |= set(self.weight.flatten().tolist())
        return torch.tanh(x @ self.weight / WIDTH)


class Doors(nn.Module):
    """Modules of one size, called in an order that is given for each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.doors = nn.ModuleList(Door(number) for number in range(1, 4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            x = self.doors[number - 1](x)
        return x.sum()


@dataclass
class Told:
    """What became of a step on one rank."""

    error: str | None
    is_typed: bool
    misread: dict[int, list[float]]  # number of a door -> what it read beside its own weight
    is_unchanged: bool  # this rank's slices


def a_step_in_these_orders(orders: tuple[tuple[int, ...], ...], device: str = "cpu") -> Told:
    """Behind one in which all ranks follow the first order."""
    with collectives() if device == "cpu" else nullcontext():
        model = Doors().to(device)
        tuning = Tuning(bucket_bytes=1, keep_below=1, live_bytes=PLENTY, neighbours=False, timeout=60)
        # Of its own: what ranks that went apart left in it meets nobody else.
        group = dist.new_group()
        optimizer = ShardedSGD(model, lr=0.0, stage=3, process_group=group, tuning=tuning)
        model(torch.ones(2, WIDTH, device=device), orders[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1.0
        before = slices(optimizer)
        error: Exception | None = None
        try:
            model(torch.ones(2, WIDTH, device=device), orders[dist.get_rank()]).backward()
            optimizer.step()
        except Exception as raised:
            error = raised
        misread = {door.number: sorted(door.read - {door.number}) for door in model.doors}
        return Told(error and repr(error), isinstance(error, ShardoptError), misread, slices(optimizer) == before)


def slices(optimizer: Any) -> list[bytes]:
    return [raw(shard.param.cpu()) for shard in optimizer.engine.domain.shards]


def test_one_order_is_no_error(ranks: Pool) -> None:
    for told in ranks.run(a_step_in_these_orders, ((1, 2, 3), (1, 2, 3)), world=WORLD):
        assert told.error is None and not any(told.misread.values()) and not told.is_unchanged


def test_another_order_on_one_rank_is_an_error_on_all(ranks: Pool) -> None:
    for told in ranks.run(a_step_in_these_orders, ((1, 2, 3), (2, 1, 3)), world=WORLD):
        if told.error is None:
            pytest.fail(f"no error; doors, and the weights of others that they read: {told.misread}")
        assert told.is_typed and told.is_unchanged, told.error
