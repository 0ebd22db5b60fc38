"""Ranks that use other units, or in another order, at stage 3, on every connection.

A rank that skips a unit joins its gather later. Another order is an error on all ranks before a step, and the next
right step gives the bits of stage 1."""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardopt import CommunicationError, DisagreementError, Offload, ShardedSGD, ShardoptError
from shardopt.partition.comm.group import Pending, Ranks
from shardopt.partition.comm.messages import book_of
from shardopt.units.unit_orders import UnitOrders
from tests.partition.test_collective_wire import collectives
from tests.support.absence import LATER, SOON, in_no_hurry
from tests.support.comparing import snapshot
from tests.support.modules import RATES, Block, W, data, poisoned, small
from tests.support.ranks import Pool

CONNECTIONS = ("memory", "messages", "collectives")


class Drops(nn.Module):
    """Blocks that run in an order that is given for each forward; some may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(W, W), nn.ModuleList(Block() for _ in range(4)), nn.Linear(W, W)

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x)
        return self.last(x)


def connected(kind: str) -> AbstractContextManager[Any]:
    return collectives() if kind == "collectives" else nullcontext()


def made(stage: int, kind: str = "memory", **tuning: Any) -> tuple[Drops, ShardedSGD]:
    torch.manual_seed(0)
    model = Drops()
    tuning = {"neighbours": kind == "memory", "live_bytes": None, "timeout": 60, **tuning}
    # A group of its own: what ranks that went apart left in it meets nobody else.
    return model, ShardedSGD(model, **RATES, stage=stage, process_group=dist.new_group(), tuning=small(**tuning))


def trained(model: Drops, opt: ShardedSGD, orders: Sequence[Sequence[int]]) -> list[bytes]:
    """One step for each order."""
    for step, order in enumerate(orders):
        opt.zero_grad()
        model(data(step, 4, W), order).square().mean().backward()
        opt.step()
    return snapshot(model, opt)


def dropping() -> list[tuple[int, ...]]:
    """Every rank skips other blocks, in the first step too; rank 0 skips the same ones in the end."""
    rank = dist.get_rank()
    return [tuple(number for number in range(4) if (number + rank + step) % 3) for step in range(4)] + [(0, 1)]


def drops_layers(kind: str) -> None:
    expected = trained(*made(1), dropping())
    with connected(kind), poisoned():
        for live_bytes in (None, 0):
            found = made(3, kind, live_bytes=live_bytes)
            assert trained(*found, dropping()) == expected
            assert str(found[1].engine.domain.gatherer.orders.schedule).count("blocks.") > 4


def test_a_rank_that_skips_a_unit_joins_its_gather(ranks: Pool) -> None:
    for kind in CONNECTIONS:
        ranks.run(drops_layers, kind, world=2)


def uses_new_units(offload: Any, options: dict[str, Any], tuning: dict[str, Any], copies: int = 1) -> None:
    """No rank uses blocks 0 and 2 at first. Then some do, others do not: in turn, and the same one twice."""
    rank = dist.get_rank()
    ways = [(1, 3)] * 2 + [(0, 1, 3) if rank == 0 else (1, 3)] + [(1, 2, 2, 3) if rank else (0, 1)] * 2 + [(1, 3)]
    torch.manual_seed(0)
    whole = Drops()
    results = []
    for adopt in (lambda *_: None, UnitOrders.adopt):  # the first keeps all units in the schedule
        model = Drops()
        model.load_state_dict(whole.state_dict())
        found = small(**{"neighbours": False, "live_bytes": None, "timeout": 120, **tuning})
        group: Any = dist.new_group()
        if copies > 1:
            group = init_device_mesh("cpu", (copies, dist.get_world_size() // copies))
        opt = ShardedSGD(model, **RATES, stage=3, process_group=group, tuning=found, offload=offload, **options)
        opt.bind()
        # One that comes later answers for its own units alone.
        other = ShardedSGD(Drops(), **RATES, stage=3, process_group=group, tuning=found)
        other.bind()
        with patch.object(UnitOrders, "adopt", adopt):
            results.append(trained(model, opt, ways))
        opt.close()
        other.close()
    assert results[0] == results[1]


def test_a_unit_that_is_new_to_the_schedule_is_used_by_some_ranks(ranks: Pool, tmp_path: Path) -> None:
    """Over messages, ranks that skip it complete its gather with their slices, in the form in which these travel."""
    ranks.run(uses_new_units, None, {}, {}, world=3)
    ranks.run(uses_new_units, str(tmp_path), {}, {"prefetch": 0}, world=2)
    ranks.run(uses_new_units, None, {"gather_dtype": "int8"}, {"reshard_after_forward": False}, world=2)
    ranks.run(uses_new_units, None, {"gather_dtype": "int8"}, {"reshard_after_forward": 2}, world=4)
    ranks.run(uses_new_units, None, {}, {}, 2, world=4)


def test_a_new_unit_travels_beside_sums_in_memory(ranks: Pool) -> None:
    """Ranks that read each other's sums wait at a board in memory, and say so to who asks."""
    ranks.run(uses_new_units, None, {"gather_dtype": "int8"}, {"neighbours": True}, world=3)
    ranks.run(uses_new_units, Offload(params="cpu"), {}, {"neighbours": True}, world=2)


class Tied(nn.Module):
    """The weight of its ends is one, and each rank may leave either end out."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.blocks, self.end = nn.Linear(W, W, bias=False), Drops().blocks, nn.Linear(W, W, bias=False)
        self.end.weight = self.begin.weight

    def forward(self, x: Tensor, ends: str) -> Tensor:
        x = self.begin(x) if "begin" in ends else x
        for block in self.blocks:
            x = block(x)
        return self.end(x) if "end" in ends else x


# By step, what each rank uses. The schedule is made of the first step, and keeps what was used.
TIED = {
    "its first use is new": [("end", "end")] * 2 + [("begin end", "end")] * 2 + [("begin", "begin end")],
    "its last use is new": [("begin", "begin")] * 2 + [("begin", "end")] * 2 + [("end", "end")],
    "all of it is new": [("", "")] * 2 + [("begin", ""), ("", "end"), ("begin end", "")],
    "some skip a use": [("end", "begin", "begin end")] * 3 + [("begin end", "end", "begin")],
}


def uses_an_end(kind: str, name: str) -> None:
    results = []
    for stage in (1, 3):
        torch.manual_seed(0)
        model = Tied()
        tuning = small(neighbours=kind == "memory", live_bytes=None, timeout=120)
        opt = ShardedSGD(model, **RATES, stage=stage, process_group=dist.new_group(), tuning=tuning)
        for step, ends in enumerate(TIED[name]):
            opt.zero_grad()
            model(data(step, 4, W), ends[dist.get_rank()]).square().mean().backward()
            opt.step()
        results.append(snapshot(model, opt))
        opt.close()
    assert results[1] == results[0]


def test_a_use_of_a_tied_weight_is_new_to_the_schedule(ranks: Pool) -> None:
    """What is gathered on demand does not take the messages of what others gather by the schedule.

    A use that a rank skips does not end its gradient, if another one follows: it would be summed in two parts.
    """
    for kind in ("memory", "messages"):
        for name, ways in TIED.items():
            ranks.run(uses_an_end, kind, name, world=len(ways[0]))


class Leaves(nn.Module):
    """Its output is that of a block on a rank that leaves in the middle, and skips the end of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(5)), nn.Linear(W, 50 * W)

    def forward(self, x: Tensor, stop: int) -> Tensor:
        for block in self.blocks[:stop]:
            x = block(x)
        return x if stop < len(self.blocks) else self.last(x)


def leaves_early(kind: str) -> None:
    results = []
    for stage in (1, 3):
        torch.manual_seed(0)
        model = Leaves()
        nbytes = sum(param.nbytes for param in model.blocks.parameters())
        tuning = small(neighbours=kind == "memory", live_bytes=nbytes * 3 // 5, timeout=120)
        opt = ShardedSGD(model, **RATES, stage=stage, process_group=dist.new_group(), tuning=tuning)
        for step in range(4):
            opt.zero_grad()
            model(data(step, 4, W), 2 if step and dist.get_rank() else 5).square().mean().backward()
            opt.step()
        results.append(snapshot(model, opt))
    assert results[1] == results[0]


def test_a_rank_that_skips_the_end_of_the_model(ranks: Pool) -> None:
    """It neither waits for a gather of the others nor they for its gradients: all reductions of what it skips begin."""
    for kind in ("memory", "messages"):
        ranks.run(leaves_early, kind, world=2)


def goes_another_way(kind: str) -> None:
    """Three steps in one order, one in which rank 1 goes another way, and three more."""
    rank, usual = dist.get_rank(), [(0, 1, 2, 3)] * 3
    same = made(1)
    expected = [trained(*same, usual) for _ in range(2)]
    with connected(kind):
        model, opt = made(3, kind, timeout=LATER)
        assert trained(model, opt, usual) == expected[0]
        opt.zero_grad()
        error: Exception | None = None
        try:
            model(data(9, 4, W), (0, 2, 1, 3) if rank else usual[0]).square().mean().backward()
            opt.step()
        except ShardoptError as raised:
            error = raised
        assert isinstance(error, DisagreementError) and "order" in str(error), error
        opt.zero_grad()
        assert snapshot(model, opt) == expected[0]
        assert trained(model, opt, usual) == expected[1]


def test_another_order_is_an_error_on_all_ranks(ranks: Pool) -> None:
    for kind in ("memory", "messages"):  # test_collective_wire has the third
        ranks.run(goes_another_way, kind, world=2)


def all_go_another_way() -> None:
    """A use that the schedule does not have is gathered on demand, and makes a new schedule."""
    ways = [(0, 1, 2, 3)] * 2 + [(3, 1, 2, 0, 1)] * 3 + [(1, 0, 2)] * 2
    expected = trained(*made(1), ways)
    for kind in CONNECTIONS:
        with connected(kind), poisoned():
            model, opt = made(3, kind)
            assert trained(model, opt, ways) == expected, kind
            forward, backward = opt.engine.domain.gatherer.orders.schedule.orders
            assert forward[1:-1] == ("blocks.1", "blocks.0", "blocks.2") == backward[-2:0:-1], kind


def test_all_ranks_may_change_the_order(ranks: Pool) -> None:
    ranks.run(all_go_another_way, world=2)


def one_rank_alone(timeout: float | None) -> None:
    """Whoever waits is told for which unit, for whom, and what to do."""
    store = dist.distributed_c10d._get_default_store()
    with in_no_hurry():
        model, opt = made(3, "messages", timeout=timeout)
        trained(model, opt, [(0, 1)])
    if dist.get_rank() == 0:
        try:
            for unit in opt.engine.domain.gatherer.units.values():
                unit.all_gathers.clear()  # they are made anew, with this deadline
            with torch.no_grad(), patch("shardopt.units.gathered.GATHER_TIMEOUT", timedelta(seconds=SOON)):
                model(data(0, 4, W), (0, 1))
        except CommunicationError as error:
            assert all(words in str(error) for words in ("gathering first", "rank 1", "optimizer.unsharded()")), error
        else:
            raise AssertionError("rank 0 went on alone")
        store.set("told", "")
    else:
        store.wait(["told"], timedelta(seconds=LATER))  # for no rank: it may still come, as far as rank 0 can know


def test_a_gather_that_a_rank_never_joins(ranks: Pool) -> None:
    """The deadline is the user's, or else the gatherer's own, which is far shorter here than the process group's."""
    for timeout in (SOON, None):
        ranks.run(one_rank_alone, timeout, world=2)


def runs_frozen_module_alone() -> None:
    torch.manual_seed(0)
    model = Drops().requires_grad_(False)
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small(neighbours=True, live_bytes=None, timeout=20))
    for turn in range(3):
        if turn == 0 or dist.get_rank() == 0:
            x = torch.ones(2, W, requires_grad=True)
            model(x, (0, 1)).sum().backward()
            assert x.grad is not None and x.grad.any()
    dist.barrier()
    opt.close()


def test_one_rank_runs_a_frozen_module(ranks: Pool) -> None:
    """A reference model, of which gradients go through to its input: no backward of it is a round."""
    ranks.run(runs_frozen_module_alone, world=2)


def leaves_nothing_to_its_group() -> None:
    group = dist.new_group()
    assert group is not None
    book, ranks = book_of(group), Ranks(group, None)
    for stage in (1, 2):
        model = nn.Linear(W, W)
        opt = ShardedSGD(model, lr=0.1, stage=stage, process_group=group, tuning=small(neighbours=True))
        model(data(0, 4, W)).sum().backward()
        opt.step()
        assert min(book.counts) < 0  # its notice board has numbers there
        opt.close()
        del model, opt
        gc.collect()
        assert not book.counts, stage
    asking = ranks.asking(Pending("a test", (), (1 - ranks.rank,), True, 5), 8, True)
    assert book.asking
    ranks.give_up("another test")
    with pytest.raises(CommunicationError, match="another test"):
        ranks.wait(asking)
    assert not book.asking


def test_what_is_over_leaves_nothing_to_its_group(ranks: Pool) -> None:
    """A closed optimizer, and a gather that asks in a group that is given up."""
    ranks.run(leaves_nothing_to_its_group, world=2)
