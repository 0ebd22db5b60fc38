"""Ranks with unequal numbers of batches at stage 3, on every connection: a rank that has run out joins the gathers of
the others' forwards, backwards and evaluations, with the bits of stage 1; and what it cannot join is told to all."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardopt import DisagreementError, ShardedSGD
from tests.partition.test_ranks_apart import CONNECTIONS, Drops, connected, made
from tests.support.comparing import snapshot
from tests.support.modules import W, data, poisoned
from tests.support.ranks import Pool
from tests.support.training import raises

USUAL = (0, 1, 2, 3)
# Of each context, the blocks that each step uses, by rank. Rank 0 has no batch in the first; then ranks skip blocks.
CONTEXTS: Sequence[Sequence[Sequence[Sequence[int]]]] = (
    ([], [USUAL, USUAL, USUAL]),
    ([USUAL, (0, 1, 3), (1, 2)], [(0, 2, 3)]),
    ([(2, 3)], [(0, 1), USUAL]),
)


def trained(model: Drops, opt: ShardedSGD, by_all: bool) -> list[bytes]:
    """Two rounds in each step, evaluations between a forward and its backward and after the step."""
    for number, orders in enumerate(CONTEXTS):
        with opt.join(by_all):
            for step, order in enumerate(orders[dist.get_rank()]):
                opt.zero_grad()
                for micro in range(2):
                    x = data(10 * number + 2 * step + micro, 4, W)
                    loss = model(x, order).square().mean()
                    if micro:
                        with torch.no_grad():
                            model(x, USUAL[::-1])
                    loss.backward()
                opt.step()
                with torch.no_grad():
                    assert bool(model(model.first(x), USUAL).isfinite().all())
    return snapshot(model, opt)


def trains_as_stage_1(kind: str) -> None:
    for by_all, live_bytes in ((True, None), (False, 0)):
        expected = trained(*made(1), by_all)
        with connected(kind), poisoned():
            model, opt = made(3, kind, live_bytes=live_bytes)
            assert trained(model, opt, by_all) == expected
            assert "blocks.3" in str(opt.schedule())


def test_gathers_are_joined(ranks: Pool) -> None:
    for kind in CONNECTIONS:
        ranks.run(trains_as_stage_1, kind, world=2)


def goes_on(model: Drops, opt: ShardedSGD) -> None:
    """With all ranks, then without the first one."""
    updates = opt.updates
    with opt.join():
        for step in range(1 + dist.get_rank()):
            opt.zero_grad()
            model(data(step, 4, W), USUAL).square().mean().backward()
            opt.step()
    assert opt.updates == updates + dist.get_world_size()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, snapshot(model, opt))
    assert all(each == found[0] for each in found)


def cannot_be_joined() -> None:
    """Rank 0 has run out: it and the others hear of it, and can go on."""
    rank, (model, opt) = dist.get_rank(), made(3, "messages")
    x = data(0, 4, W)
    for order in ((3, 2, 1, 0, 3, 1), (1, 0, 2, 3)):  # not that of the modules, and not that of the steps before
        with raises(DisagreementError, "another order"), opt.join():
            if rank:
                model(x, order)
        opt.zero_grad()
        goes_on(model, opt)
    with raises(DisagreementError, "autograd.grad"), opt.join():
        if rank:
            torch.autograd.grad(model(x, USUAL).sum(), list(model.parameters()))
    opt.zero_grad()
    goes_on(model, opt)
    with raises(DisagreementError, "reshard"), opt.join():
        if rank:
            opt.units["blocks.2"].unshard()
            model(x, USUAL)
    if rank:
        opt.units["blocks.2"].reshard()
    goes_on(model, opt)


def test_what_cannot_be_joined_is_told(ranks: Pool) -> None:
    ranks.run(cannot_be_joined, world=2)


def fails_in_its_forward(kind: str) -> None:
    """Rank 0 has run out, rank 1 fails in the middle of its forward, rank 2 waits for both."""
    rank, (model, opt) = dist.get_rank(), made(3, kind)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(data(9, 4, W), (0, 9) if rank == 1 else USUAL).square().mean()
        loss.backward()
        return loss

    goes_on(model, opt)
    for has_closure in (False, True):
        with raises(IndexError if rank == 1 else DisagreementError, "out of range"), opt.join():
            if rank and has_closure:
                opt.step(closure)
            elif rank:
                closure()
        opt.zero_grad()
        goes_on(model, opt)


def test_what_fails_in_a_forward_is_told(ranks: Pool) -> None:
    for kind in ("memory", "messages"):
        ranks.run(fails_in_its_forward, kind, world=3)
