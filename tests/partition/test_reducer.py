"""Gradients summed while backward runs: exact whatever the graphs hold, and a typed error on all ranks if one fails.

Every gradient is made of integers, other ones on every rank and step, so that its sum is exact in any order, and every
rate is a power of two: what three ranks make of them must be, bit for bit, what torch.optim makes of their mean.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from shardopt import (
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    Tuning,
)
from shardopt.partition.comm.reduce_scatter_p2p import P2PReduceScatter
from shardopt.partition.comm.reduce_scatter_peer import PeerReduceScatter
from tests.support.absence import LATER, Roll, given_up
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep_at_once
from tests.support.training import raw

SETTINGS = tuple((stage, neighbours) for stage in (1, 2, 3) for neighbours in (True, False))
# Several buckets, and at stage 3 params that are sharded beside params that are not.
SMALL = {"bucket_bytes": 3000, "keep_below": 100}
# Powers of two, so that no product rounds: ours and torch's agree to the bit.
RATES = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}
SHAPES: tuple[tuple[int, ...], ...] = ((300,), (1,), (257,), (), (16, 33), (0, 3), (2, 128), (7,), (513,))
FIRST, LAST = 0, len(SHAPES) - 1
ALL = tuple(range(len(SHAPES)))
SPARE = 6  # in no graph unless a case puts it there

Body = Callable[["Chain"], Tensor]
Case = Callable[["Chain", int, int], None]  # model, rank, step
Trouble = Callable[["Chain", ShardedOptimizer, int, Roll], None]  # model, optimizer, rank, who waits for it


class Link(nn.Module):
    """Adds to ``x`` the sum of its weight times integers, which are its gradient: others on every rank and step."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.salt = number, 0
        generator = torch.Generator().manual_seed(number)
        self.weight = Parameter(torch.randn(SHAPES[number], generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.salt + self.number)
        factors = torch.randint(-8, 9, self.weight.shape, generator=generator).float()
        return x + (self.weight * factors).sum()


class Chain(nn.Module):
    """Its forward does what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.links = nn.ModuleList(Link(number) for number in ALL)

    def forward(self, body: Body) -> Tensor:
        return body(self)

    def through(self, *numbers: int, x: Tensor | None = None) -> Tensor:
        x = torch.zeros((), requires_grad=True) if x is None else x
        for number in numbers:
            x = self.links[number](x)
        return x


def used(*numbers: int) -> Body:
    return lambda chain: chain.through(*numbers)


# -- what graphs may look like -----------------------------------------------------------------------------------------

# Each runs forwards and backwards of one rank and step. torch does it for all ranks in turn on a model of its own.


def plain(model: Chain, rank: int, step: int) -> None:
    model(used(*ALL)).backward()


def unused(model: Chain, rank: int, step: int) -> None:
    model(used(*(number for number in ALL if number != SPARE))).backward()


def several_times(model: Chain, rank: int, step: int) -> None:
    model(used(0, 4, 4, 2, 0, 0, 8)).backward()


def branches(model: Chain, rank: int, step: int) -> None:
    """Each rank goes its own way; a param that is on nobody's is left alone."""
    model(used(*(rank, 7) if step == 1 else [(0, 2, 4), (2, 8), (1, 2, SPARE)][rank])).backward()


def idle_rank(model: Chain, rank: int, step: int) -> None:
    """One rank has no gradient at all, another rank each time."""
    model(used(*ALL) if rank != step else lambda chain: 1 * chain.through()).backward()


def own_order(model: Chain, rank: int, step: int) -> None:
    order = torch.randperm(len(ALL), generator=torch.Generator().manual_seed(10 * step + rank))
    model(used(*order.tolist())).backward()


def more_and_more(model: Chain, rank: int, step: int) -> None:
    model(used(*ALL[: 3 * step + 2])).backward()


def checkpointed(reentrant: bool) -> Case:
    def run(model: Chain, rank: int, step: int) -> None:
        def body(chain: Chain) -> Tensor:
            x = chain.through(0, 1)
            x = checkpoint(lambda x: chain.through(2, 3, 4, x=x), x, use_reentrant=reentrant)
            # The same modules again, inside and outside: their gradients arrive when their buckets have left.
            x = checkpoint(lambda x: chain.through(8, 0, 2, x=x), x, use_reentrant=reentrant)
            x = chain.through(8, 7, x=x)
            return checkpoint(lambda x: chain.through(4, 0, x=x), x, use_reentrant=reentrant)

        model(body).backward()

    return run


def nested_checkpoints(model: Chain, rank: int, step: int) -> None:
    def inner(chain: Chain, x: Tensor) -> Tensor:
        return chain.through(2, x=checkpoint(lambda x: chain.through(4, 0, x=x), x, use_reentrant=True))

    def body(chain: Chain) -> Tensor:
        x = checkpoint(lambda x: inner(chain, x), chain.through(1, 4), use_reentrant=True)
        return checkpoint(lambda x: inner(chain, x), chain.through(8, x=x), use_reentrant=True)

    model(body).backward()


def all_checkpointed(model: Chain, rank: int, step: int) -> None:
    model(
        lambda chain: checkpoint(
            lambda x: chain.through(*ALL, x=x), torch.zeros((), requires_grad=True), use_reentrant=True
        )
    ).backward()


def same_graph_twice(model: Chain, rank: int, step: int) -> None:
    loss = model(used(0, 2, 4, 7))
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(model: Chain, rank: int, step: int) -> None:
    """Other params in each of three backwards."""
    for numbers in ((0, 2, 4), (4, 8), (1, 2, 7)):
        model(used(*numbers)).backward()


def accumulated_out_of_step(model: Chain, rank: int, step: int) -> None:
    """Other params on each rank in each backward: one rank holds a gradient that another has just got."""
    for turn in range(3):
        model(used(*[(0, 2, 4), (4, 8), (1, 2, 7)][(turn + rank) % 3])).backward()


def one_sum(model: Chain, rank: int, step: int) -> None:
    (model(used(0, 2, 4)) + 2 * model(used(4, 8))).backward()


def two_forwards(model: Chain, rank: int, step: int) -> None:
    first, second = model(used(0, 2, 4)), model(used(4, 8))
    (second if step % 2 else first).backward()
    (first if step % 2 else second).backward()


def looks_at_gradients(model: Chain, rank: int, step: int) -> None:
    """torch.autograd.grad leaves param.grad alone, before, between and behind backwards."""
    x = torch.ones((), requires_grad=True)
    loss = model(lambda chain: chain.through(0, 2, 4, x=x * x))
    assert torch.autograd.grad(loss, x, retain_graph=True)[0] == 2
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


def evaluates(model: Chain, rank: int, step: int) -> None:
    with torch.no_grad():
        model(used(*ALL))
    loss = model(used(0, 2))
    with torch.no_grad():
        model(used(*ALL))
    loss.backward()


def output_left_aside(model: Chain, rank: int, step: int) -> None:
    """The loss is made of what the forward kept, not of what it returned."""
    kept = []
    model(lambda chain: (kept.append(chain.through(0, 2)), chain.through(4))[1])
    kept[0].backward()


CASES: dict[str, Case] = {
    "plain": plain,
    "unused": unused,
    "several times": several_times,
    "branches": branches,
    "idle rank": idle_rank,
    "own order": own_order,
    "more and more": more_and_more,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
    "nested checkpoints": nested_checkpoints,
    "all checkpointed": all_checkpointed,
    "same graph twice": same_graph_twice,
    "accumulated": accumulated,
    "accumulated out of step": accumulated_out_of_step,
    "one sum": one_sum,
    "two forwards": two_forwards,
    "autograd.grad": looks_at_gradients,
    "evaluates": evaluates,
    "output left aside": output_left_aside,
}


def run_case(case: Case, model: Chain, rank: int, step: int) -> None:
    for link in model.links:
        link.salt = 10 * step + rank
    case(model, rank, step)


class Reference:
    """torch, with the mean of all ranks' gradients made in one process."""

    def __init__(self, case: Case, world: int, kind: Any = torch.optim.SGD, **rates: float):
        self.model, self.case, self.world = Chain(), case, world
        self.optimizer = kind(self.model.parameters(), **(rates or RATES))

    def step(self, step: int) -> None:
        sums: dict[Parameter, Tensor] = {}
        for rank in range(self.world):
            self.model.zero_grad()
            run_case(self.case, self.model, rank, step)
            for param in self.model.parameters():
                if param.grad is not None:
                    sums[param] = sums[param] + param.grad if param in sums else param.grad.clone()
        for param in self.model.parameters():
            param.grad = sums[param] / self.world if param in sums else None
        self.optimizer.step()


def check_same(ours: nn.Module, theirs: nn.Module, opts: Sequence[ShardedOptimizer], what: str) -> None:
    with ExitStack() as whole:
        for opt in opts:
            whole.enter_context(opt.unsharded())
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert raw(mine) == raw(other), f"{what}: {name}"


# At stage 3 ranks use units in one order, and over messages they run as many forwards; see test_ranks_apart.
OTHER_ORDERS = ("own order", "accumulated out of step")
OTHER_FORWARDS = (*OTHER_ORDERS, "idle rank")


def makes_sense(name: str, stage: int, neighbours: bool, world: int) -> bool:
    return stage < 3 or name not in (OTHER_ORDERS if neighbours else OTHER_FORWARDS)


AXES = {"name": tuple(CASES), "stage": (1, 2, 3), "neighbours": (True, False), "world": (2, 3)}


def sums_are_exact(rows: Sequence[Row]) -> None:
    for name, stage, neighbours, _ in rows:
        case = CASES[name]
        for count in (1, 2) if name in ("plain", "own order") else (1,):
            reference, model = Reference(case, dist.get_world_size()), Chain()
            tuning, params = Tuning(neighbours=neighbours, **SMALL), list(model.parameters())
            opts = [
                ShardedSGD(params[first::count], module=model, **RATES, stage=stage, tuning=tuning)
                for first in range(count)
            ]
            for step in range(3):
                for opt in opts:
                    opt.zero_grad()
                run_case(case, model, dist.get_rank(), step)
                for opt in opts:
                    opt.step()
                reference.step(step)
                what = f"{name}, {count} optimizers, stage {stage}, neighbours {neighbours}, step {step}"
                check_same(model, reference.model, opts, what)


def absent_params_are_skipped() -> None:
    """No decay, no step counted: as torch."""
    reference, model = Reference(branches, dist.get_world_size(), torch.optim.AdamW, lr=0.01), Chain()
    opt = ShardedAdamW(model, lr=0.01, stage=2, tuning=Tuning(**SMALL))
    for step in range(3):
        opt.zero_grad()
        run_case(branches, model, dist.get_rank(), step)
        opt.step()
        reference.step(step)
    counts = []
    for mine, other in zip(model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-7, rtol=2e-6)
        counts.append(float(reference.optimizer.state[other]["step"]) if reference.optimizer.state[other] else 0.0)
        assert float(opt.state[mine].get("step", 0.0)) == counts[-1]
    assert set(counts) == {0.0, 1.0, 2.0, 3.0}


def nothing_travels_twice(stage: int, neighbours: bool) -> None:
    """Whatever came before, a plain backward sends every bucket once."""
    for name in ("autograd.grad", "more and more", "checkpointed, reentrant"):
        model = Chain()
        opt = ShardedSGD(model, lr=0.5, stage=stage, tuning=Tuning(neighbours=neighbours, **SMALL))
        for step, case in enumerate([CASES[name], CASES[name], plain, plain, plain]):
            before = 0 if opt.engine.domain is None else opt.engine.domain.transport.traffic.gradients
            opt.zero_grad()
            run_case(case, model, dist.get_rank(), step)
            opt.step()
        slices = [bucket.sink.total.numel() for bucket in opt.engine.domain.reducer.buckets]
        assert opt.engine.domain.transport.traffic.gradients - before == (dist.get_world_size() - 1) * 4 * sum(slices)


def small_buckets_wait_for_nobody() -> None:
    """Neither for the next buffer nor for a place under way: that costs more than their memory."""
    model = Chain()
    opt = ShardedSGD(model, lr=0.5, stage=2, tuning=Tuning(**SMALL))
    with patch.object(PeerReduceScatter, "drain", fail):
        for step in range(3):
            opt.zero_grad()
            run_case(plain, model, dist.get_rank(), step)
            opt.step()
    assert len(opt.engine.domain.reducer.buckets) > 3


@sweep_at_once(AXES, allowed=makes_sense)
def test_sums_are_exact(ranks: Pool, rows: Sequence[Row]) -> None:
    """Every graph at every stage, with messages and without, on two ranks and on three."""
    for world in AXES["world"]:
        ranks.run(sums_are_exact, [row for row in rows if row[-1] == world], world=world)


def test_absent_params_and_repeats(ranks: Pool) -> None:
    ranks.run(absent_params_are_skipped, world=3)
    for neighbours in (True, False):
        ranks.run(nothing_travels_twice, 2, neighbours, world=2)
    ranks.run(small_buckets_wait_for_nobody, world=2)


# -- what can go wrong on one rank -------------------------------------------------------------------------------------

ODD = 1


class Told(Exception):
    """By the test."""


def fail(*_: Any) -> None:
    raise Told("to fail here")


@contextmanager
def failing(model: Chain, *numbers: int) -> Iterator[None]:
    """The gradients of these links raise."""
    hooks = [model.links[number].weight.register_hook(fail) for number in numbers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fails_at(*numbers: int) -> Trouble:
    def trouble(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
        with failing(model, *numbers if rank == ODD else ()):
            run_case(plain, model, rank, 7)

    return trouble


def fails_behind_the_last_gradient(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    """When this rank has nothing to wait for any more, and the others only wait for it to say so."""
    x = torch.zeros((), requires_grad=True)
    with pytest.MonkeyPatch.context() as patched:
        for name, point in (("finish", "has filled its bucket"), ("_barrier", "has its sum")):
            patched.setattr(PeerReduceScatter, name, saying(roll, point, getattr(PeerReduceScatter, name)))
        if rank == ODD:
            # So it finds the others' gradients there, and need not look for them again.
            model.links[0].weight.register_hook(lambda _: roll.wait("has filled its bucket"))
            x.register_hook(lambda _: (roll.wait("has its sum"), fail()))
        model(lambda chain: chain.through(*ALL, x=1 * x)).backward()


def saying(roll: Roll, point: str, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(self: Any) -> Any:
        roll.say(point)
        return method(self)

    return call


def fails_in_forward(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    model(lambda chain: fail() if rank == ODD else chain.through(*ALL)).backward()


def fails_everywhere(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    with failing(model, 4):
        run_case(plain, model, rank, 7)


def fails_in_other_places(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    with failing(model, (8, 4, 0)[rank]):
        run_case(plain, model, rank, 7)


def one_backward_more(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    if rank == ODD:
        run_case(plain, model, rank, 7)
    opt.step()


def one_backward_less(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    if rank != ODD:
        run_case(plain, model, rank, 7)
    opt.step()


def one_step_less(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    if rank == ODD:
        opt.zero_grad()
        run_case(plain, model, rank, 8)
    opt.step()


def zeroed_on_one(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    run_case(plain, model, rank, 7)
    if rank == ODD:
        opt.zero_grad()
    run_case(plain, model, rank, 8)


def steps_on_half_of_it(model: Chain, opt: ShardedOptimizer, rank: int, roll: Roll) -> None:
    with suppress(Told, ShardoptError), failing(model, *(4,) if rank == ODD else ()):
        run_case(plain, model, rank, 7)
    opt.step()


Settings = tuple[tuple[int, bool], ...]  # stage, neighbours


@dataclass(frozen=True)
class Row:
    """One kind of trouble, where it is tried, and what it ends in.

    Attributes:
        odd, others: type of the error on the odd rank and on all others.
        words: in what the others say.
        waits: whether a rank has to wait for another one in vain.
        mends: whether training goes on after zero_grad() on every rank. A message that never comes ends the group.
        begins: whether the trouble comes after a backward that all ranks finished.
    """

    trouble: Trouble
    where: Settings
    odd: str
    others: str
    words: str
    waits: bool = True
    mends: bool = True
    begins: bool = False
    tuning: dict[str, int] = field(default_factory=lambda: SMALL)


# Every stage once, with neighbours and without.
TURNS = tuple(tuple(each for each in SETTINGS if sum(each) % 2 == turn) for turn in range(2))
TOLD, LOST, DIFFER, HALF = "Told", "CommunicationError", "DisagreementError", "ShardoptError"
LARGE = {"bucket_bytes": 1 << 20, "keep_below": 100}
ROWS = {
    "in backward": Row(fails_at(4), ((2, True), (3, True)), TOLD, LOST, "rank 1"),
    "in backward, no neighbours": Row(fails_at(4), ((1, False), (2, False)), TOLD, LOST, "rank 1", mends=False),
    "before the first gradient": Row(fails_at(8), ((1, True),), TOLD, LOST, "rank 1"),
    "behind the last gradient": Row(fails_behind_the_last_gradient, ((2, True),), TOLD, LOST, "rank 1", tuning=LARGE),
    "in forward": Row(fails_in_forward, ((1, True), (3, True)), TOLD, LOST, "rank 1"),
    "in forward, no neighbours": Row(fails_in_forward, ((3, False),), TOLD, LOST, "rank 1", mends=False),
    "on all ranks": Row(fails_everywhere, TURNS[0], TOLD, TOLD, "", waits=False),
    "in other places": Row(fails_in_other_places, ((2, True),), TOLD, f"{TOLD}|{LOST}", ""),
    "zeroed on one": Row(zeroed_on_one, TURNS[1], DIFFER, DIFFER, "earlier backward", waits=False),
    "half": Row(steps_on_half_of_it, ((1, True), (2, True)), HALF, HALF, "part of a backward only", waits=False),
    "one backward more": Row(one_backward_more, ((2, True), (2, False)), LOST, LOST, "step", mends=False, begins=True),
    "one backward less": Row(one_backward_less, ((1, True),), LOST, LOST, "rank 1", mends=False),
    "one step less": Row(one_step_less, ((3, True),), LOST, LOST, "step", mends=False, begins=True),
}


@dataclass(frozen=True)
class Outcome:
    """What a rank saw."""

    error: str
    message: str
    unchanged: bool
    afterwards: str  # the error of what came next, or ""


def held(opt: ShardedOptimizer) -> list[bytes]:
    """This rank's bits of params and states; at stage 3 its slices, whatever else is gathered."""
    assert opt.engine.domain is not None
    shards = opt.engine.domain.shards
    whole = [param for shard in shards if shard.gathered is None for param in shard.bucket.params]
    return [
        raw(each)
        for each in (*whole, *(each for shard in shards for each in (shard.param, *map(shard.whole, shard.states))))
    ]


def outcome(call: Callable[[], None]) -> tuple[str, str]:
    try:
        call()
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "", ""


class Training:
    """A plain training and its reference, perhaps in a group of its own. No wait of it ends by itself."""

    def __init__(self, stage: int, neighbours: bool, group: Any = None, **tuning: int):
        self.opt: ShardedOptimizer
        self.model, self.rank = Chain(), dist.get_rank(group)
        self.reference = Reference(plain, dist.get_world_size(group))
        tuned = Tuning(neighbours=neighbours, timeout=LATER, **tuning)
        self.opt = ShardedSGD(self.model, **RATES, stage=stage, process_group=group, tuning=tuned)

    def step(self, step: int) -> None:
        self.opt.zero_grad()
        run_case(plain, self.model, self.rank, step)
        self.opt.step()
        self.reference.step(step)
        check_same(self.model, self.reference.model, [self.opt], f"step {step}")


def disturbed(row: Row, stage: int, neighbours: bool, moments: Moments, name: str) -> Outcome:
    rank, world = dist.get_rank(), dist.get_world_size()
    training = Training(stage, neighbours, dist.new_group(timeout=timedelta(seconds=LATER)), **row.tuning)
    opt = training.opt
    training.step(0)
    if row.begins:
        run_case(plain, training.model, rank, 7)
    before = held(opt)
    roll = Roll(moments, name, rank, world)
    absent = frozenset() if not row.waits else {ODD} if rank != ODD else roll.others if row.odd == LOST else frozenset()
    with given_up(absent, roll):
        error, message = outcome(lambda: row.trouble(training.model, opt, rank, roll))
    roll.say()
    unchanged = before == held(opt)
    dist.barrier()
    opt.zero_grad()

    def goes_on() -> None:
        training.step(1)
        training.step(2)

    roll = Roll(moments, f"{name}, afterwards", rank, world)
    with given_up(() if row.mends else roll.others, roll):
        afterwards = outcome(goes_on)
    roll.say()
    return Outcome(error, message, unchanged, " ".join(afterwards))


def all_rows(stage: int, neighbours: bool, folder: Path) -> dict[str, Outcome]:
    moments = Moments(folder)
    return {
        name: disturbed(row, stage, neighbours, moments, name)
        for name, row in ROWS.items()
        if (stage, neighbours) in row.where
    }


def test_trouble_on_one_rank(ranks: Pool, tmp_path: Path) -> None:
    """No wait ends too late: one that the deadline should end, and any that a notice should, would outlast the job."""
    wrong, count = [], 0
    for stage, neighbours in SETTINGS:
        found_by_rank = ranks.run(all_rows, stage, neighbours, tmp_path / f"{stage}{neighbours}", world=3)
        for rank, outcomes in enumerate(found_by_rank):
            for name, found in outcomes.items():
                row, count = ROWS[name], count + 1
                kind = row.odd if rank == ODD else row.others
                typed = found.error in kind.split("|") and (rank == ODD or row.words in found.message)
                ends = "" if row.mends else LOST
                if not (typed and found.unchanged and found.afterwards.partition(" ")[0] == ends):
                    wrong.append(f"{name} at stage {stage}, neighbours {neighbours}, rank {rank}: {found}")
    assert not wrong, "\n".join(wrong)
    assert count == 3 * sum(len(row.where) for row in ROWS.values())


def gives_up_and_goes_on(stage: int, folder: Path) -> tuple[str, str]:
    """One rank fails and tries again at once; the others notice in their own time. No barrier between them."""
    training = Training(stage, True, **SMALL)
    training.step(0)
    roll = Roll(Moments(folder), "gives up", training.rank, dist.get_world_size())
    found = outcome(lambda: fails_at(2)(training.model, training.opt, training.rank, roll))
    training.step(1)
    training.step(2)
    return found


def test_giving_up_is_noticed(ranks: Pool, tmp_path: Path) -> None:
    for stage in (2, 3):
        found = ranks.run(gives_up_and_goes_on, stage, tmp_path, world=3)
        for rank, (error, message) in enumerate(found):
            assert error == (TOLD if rank == ODD else LOST)
            assert rank == ODD or "gave up this backward" in message
        told = [message for rank, (_, message) in enumerate(found) if rank != ODD]
        assert any("rank 1 gave up" in message for message in told)  # the rest heard of one that gave up for its sake


# -- a rank that dies or stalls ----------------------------------------------------------------------------------------

DOOMED = 2


def live_or_die(neighbours: bool, which: signal.Signals, folder: Path) -> Outcome:
    """The doomed rank ends in mid-backward, when the others have nothing left to do but to wait for it."""
    training = Training(2, neighbours, **SMALL)
    training.opt.bind()
    assert training.opt.engine.domain is not None
    before, roll = held(training.opt), Roll(Moments(folder), "backward", training.rank, dist.get_world_size())

    def ends(_: Tensor) -> None:
        roll.wait("has reduced all it can")
        roll.say()
        os.kill(os.getpid(), which)

    if training.rank == DOOMED:
        training.model.links[4].weight.register_hook(ends)
    kind = PeerReduceScatter if neighbours else P2PReduceScatter
    finish = kind.finish

    def finishes(scatter: Any) -> Any:
        roll.say("has reduced all it can")
        roll.wait("has reduced all it can")
        return finish(scatter)

    # A stopped process gives no sign: the deadline ends the wait. A death is seen, by survivors that have no deadline.
    absent = (DOOMED,) if which == signal.SIGSTOP else ()
    with pytest.MonkeyPatch.context() as patched, given_up(absent, roll):
        patched.setattr(kind, "finish", finishes)
        error, message = outcome(lambda: training.step(0))
    return Outcome(error, message, before == held(training.opt), "")


def dies_before_one_begins(folder: Path) -> Outcome:
    """Rank 0 begins its backward when one rank is dead, and another has given the round up and does not come again.

    Rank 0 has given that batch up, too, in its forward: it waits for the rank that does not come again.
    """
    training, moments = Training(2, True, **SMALL), Moments(folder)
    training.opt.bind()
    before = held(training.opt)
    moments.say(f"bound {training.rank}")
    if training.rank == DOOMED:
        moments.wait("bound 0", "bound 1")
        os.kill(os.getpid(), signal.SIGKILL)
    if training.rank == 0:
        moments.wait("given up")
        assert outcome(lambda: training.model(lambda _: fail())) == outcome(fail)
    error, message = outcome(lambda: training.step(0))
    if training.rank == 1:
        moments.say("given up")
        moments.wait("raised")
    moments.say("raised")
    return Outcome(error, message, before == held(training.opt), "")


def test_a_rank_that_dies_or_stalls(tmp_path: Path) -> None:
    """The survivors say who is missing, and nothing changed."""
    pool = Pool()  # of its own: the processes of the others keep what they have compiled
    try:
        for neighbours, which in ((True, signal.SIGKILL), (True, signal.SIGSTOP), (False, signal.SIGKILL)):
            folder = tmp_path / f"{which.name}{neighbours}"
            *survivors, _ = pool.run(live_or_die, neighbours, which, folder, world=3, doomed=(DOOMED,))
            for found in survivors:
                assert found.error == LOST and found.unchanged and "rank 2" in found.message, survivors
            by_deadline = any("did not come within" in found.message for found in survivors)
            assert by_deadline == (which == signal.SIGSTOP), survivors
        *survivors, _ = pool.run(dies_before_one_begins, tmp_path / "late", world=3, doomed=(DOOMED,))
        for found in survivors:
            assert found.error == LOST and found.unchanged and "It is rank 2;" in found.message, survivors
    finally:
        pool.close()


def two_nans() -> list[int]:
    """Bits of a param after the step of which each rank has another NaN in its gradient."""
    param = nn.Parameter(torch.zeros(64))
    module = nn.Module()
    module.register_parameter("param", param)
    module.forward = lambda values: (param * values).sum()
    options: dict[str, Any] = {"stage": 0, "release_gradients": True, "tuning": Tuning(nonfinite="propagate")}
    opt = ShardedSGD(module, lr=1.0, **options)
    bits = 0x7FC00001 if dist.get_rank() == 0 else 0xFFC00002 - (1 << 32)
    module(torch.full((64,), bits, dtype=torch.int32).view(torch.float32)).backward()
    opt.step()
    found: list[int] = param.detach().view(torch.int32).tolist()
    opt.close()
    return found


def test_ranks_that_sum_all_of_a_bucket_sum_in_one_order(ranks: Pool) -> None:
    """A sum of two NaNs has the bits of the first: replicas of a param would differ."""
    one, other = ranks.run(two_nans, world=2)
    assert one == other
