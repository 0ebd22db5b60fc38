"""Gradients summed while backward runs: exact whatever the graphs hold, and a typed error on all ranks if one fails."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks import Pool
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from training import raw

from shardopt import ShardedOptimizer, ShardedSGD, Tuning

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


def plain(model: nn.Module, rank: int, step: int) -> None:
    model(used(*ALL)).backward()


def unused(model: nn.Module, rank: int, step: int) -> None:
    model(used(*(number for number in ALL if number != SPARE))).backward()


def several_times(model: nn.Module, rank: int, step: int) -> None:
    model(used(0, 4, 4, 2, 0, 0, 8)).backward()


def branches(model: nn.Module, rank: int, step: int) -> None:
    """Each rank goes its own way; a param that is on nobody's is left alone."""
    model(used(*(rank, 7) if step == 1 else [(0, 2, 4), (2, 8), (1, 2, SPARE)][rank])).backward()


def idle_rank(model: nn.Module, rank: int, step: int) -> None:
    """One rank has no gradient at all, another rank each time."""
    model(used(*ALL) if rank != step else lambda chain: 1 * chain.through()).backward()


def own_order(model: nn.Module, rank: int, step: int) -> None:
    order = torch.randperm(len(ALL), generator=torch.Generator().manual_seed(10 * step + rank))
    model(used(*order.tolist())).backward()


def more_and_more(model: nn.Module, rank: int, step: int) -> None:
    model(used(*ALL[: 3 * step + 2])).backward()


def checkpointed(reentrant: bool) -> Callable[[nn.Module, int, int], None]:
    def run(model: nn.Module, rank: int, step: int) -> None:
        def body(chain: Chain) -> Tensor:
            x = chain.through(0, 1)
            x = checkpoint(lambda x: chain.through(2, 3, 4, x=x), x, use_reentrant=reentrant)
            # The same modules again, inside and outside: their gradients arrive when their buckets have left.
            x = checkpoint(lambda x: chain.through(8, 0, 2, x=x), x, use_reentrant=reentrant)
            x = chain.through(8, 7, x=x)
            return checkpoint(lambda x: chain.through(4, 0, x=x), x, use_reentrant=reentrant)

        model(body).backward()

    return run


def nested_checkpoints(model: nn.Module, rank: int, step: int) -> None:
    def inner(chain: Chain, x: Tensor) -> Tensor:
        return chain.through(2, x=checkpoint(lambda x: chain.through(4, 0, x=x), x, use_reentrant=True))

    def body(chain: Chain) -> Tensor:
        x = checkpoint(lambda x: inner(chain, x), chain.through(1, 4), use_reentrant=True)
        return checkpoint(lambda x: inner(chain, x), chain.through(8, x=x), use_reentrant=True)

    model(body).backward()


def all_checkpointed(model: nn.Module, rank: int, step: int) -> None:
    model(
        lambda chain: checkpoint(
            lambda x: chain.through(*ALL, x=x), torch.zeros((), requires_grad=True), use_reentrant=True
        )
    ).backward()


def same_graph_twice(model: nn.Module, rank: int, step: int) -> None:
    loss = model(used(0, 2, 4, 7))
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(model: nn.Module, rank: int, step: int) -> None:
    """Other params in each of three backwards."""
    for numbers in ((0, 2, 4), (4, 8), (1, 2, 7)):
        model(used(*numbers)).backward()


def accumulated_out_of_step(model: nn.Module, rank: int, step: int) -> None:
    """Other params on each rank in each backward: one rank holds a gradient that another has just got."""
    for turn in range(3):
        model(used(*[(0, 2, 4), (4, 8), (1, 2, 7)][(turn + rank) % 3])).backward()


def one_sum(model: nn.Module, rank: int, step: int) -> None:
    (model(used(0, 2, 4)) + 2 * model(used(4, 8))).backward()


def two_forwards(model: nn.Module, rank: int, step: int) -> None:
    first, second = model(used(0, 2, 4)), model(used(4, 8))
    (second if step % 2 else first).backward()
    (first if step % 2 else second).backward()


def looks_at_gradients(model: nn.Module, rank: int, step: int) -> None:
    """torch.autograd.grad leaves param.grad alone, before, between and behind backwards."""
    x = torch.ones((), requires_grad=True)
    loss = model(lambda chain: chain.through(0, 2, 4, x=x * x))
    assert torch.autograd.grad(loss, x, retain_graph=True)[0] == 2
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


def evaluates(model: nn.Module, rank: int, step: int) -> None:
    with torch.no_grad():
        model(used(*ALL))
    loss = model(used(0, 2))
    with torch.no_grad():
        model(used(*ALL))
    loss.backward()


def output_left_aside(model: nn.Module, rank: int, step: int) -> None:
    """The loss is made of what the forward kept, not of what it returned."""
    kept = []
    model(lambda chain: (kept.append(chain.through(0, 2)), chain.through(4))[1])
    kept[0].backward()


CASES = {
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


def run_case(case: Any, model: nn.Module, rank: int, step: int) -> None:
    for link in model.links:  # type: ignore[union-attr]
        link.salt = 10 * step + rank
    case(model, rank, step)


class Reference:
    """torch, with the mean of all ranks' gradients made in one process."""

    def __init__(self, case: Any, world: int):
        self.model, self.case, self.world = Chain(), case, world
        self.optimizer = torch.optim.SGD(self.model.parameters(), **RATES)

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


def check_same(ours: nn.Module, theirs: nn.Module, opt: ShardedOptimizer, what: str) -> None:
    with opt.unsharded():
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert raw(mine) == raw(other), f"{what}: {name}"


def sums_are_exact(stage: int, neighbours: bool) -> None:
    for name, case in CASES.items():
        reference = Reference(case, dist.get_world_size())
        model = Chain()
        opt = ShardedSGD(model, **RATES, stage=stage, tuning=Tuning(neighbours=neighbours, **SMALL))
        for step in range(4):
            opt.zero_grad()
            run_case(case, model, dist.get_rank(), step)
            opt.step()
            reference.step(step)
            check_same(model, reference.model, opt, f"{name}, stage {stage}, neighbours {neighbours}, step {step}")


def test_sums_are_exact(ranks: Pool) -> None:
    for setting in SETTINGS:
        ranks.run(sums_are_exact, *setting, world=3)
