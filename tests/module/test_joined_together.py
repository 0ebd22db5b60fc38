"""Uneven inputs beside other joinables, in several contexts, and where something goes wrong inside: what PyTorch's own
tests of ``Join`` with ZeroRedundancyOptimizer have, with 0, 1 and 2 batches.

Whole numbers as in ``test_uneven.py``: bits are compared with those of DDP and ``torch.optim``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardopt import DisagreementError, ShardedSGD, ShardoptError, Tuning
from tests.module.test_uneven import WORLD, Net, batch, raw
from tests.support.ranks import Pool
from tests.support.training import raises

SGD = {"lr": 0.5}  # without a momentum: that of torch's optimizer differs between ranks once one of them has run out
TUNING = Tuning(bucket_bytes=1000, timeout=60)


def halves(model: nn.Module) -> list[list[nn.Parameter]]:
    params = list(model.parameters())
    return [params[:2], params[2:]]


def batches(epoch: int) -> range:
    """0, 1 and 2 of them, in every epoch on other ranks."""
    return range(3 * epoch, 3 * epoch + (dist.get_rank() + epoch) % WORLD)


def alike(*models: nn.Module) -> None:
    """On every rank, a rank that had no batch as well."""
    for params in zip(*(model.parameters() for model in models), strict=True):
        assert len({raw(param) for param in params}) == 1, params
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [raw(param) for param in models[0].parameters()])
    assert all(each == found[0] for each in found)


def steps(model: nn.Module, optimizers: list[Any], epoch: int) -> None:
    for step in batches(epoch):
        model.zero_grad()
        model(batch(step)).backward()
        for each in optimizers:
            each.step()


def with_closures(model: nn.Module, optimizers: list[Any], epoch: int) -> None:
    for step in batches(epoch):
        for number, each in enumerate(optimizers):

            def closure(step: int = step + 10 * number) -> Any:
                model.zero_grad()
                loss = model(batch(step))
                loss.backward()
                return loss

            each.step(closure)


def several_beside_ddp() -> None:
    """DDP and two optimizers at different stages, two contexts one after the other."""
    trainings: list[tuple[Callable[..., None], int]] = [(steps, 2), (with_closures, 1)]
    for train, count in trainings:
        theirs = DistributedDataParallel(Net())
        groups = halves(theirs.module)[:count]
        torchs = [torch.optim.SGD(each, **SGD) for each in groups]
        for epoch in range(2):
            with theirs.join():
                train(theirs, torchs, epoch)
        for torchs_own in (True, False):
            ours = DistributedDataParallel(Net())
            groups = halves(ours.module)[:count]
            opts = [ShardedSGD(each, stage=stage, tuning=TUNING, **SGD) for stage, each in enumerate(groups)]
            for epoch in range(2):
                with Join([ours, *opts]) if torchs_own else ours.join():
                    train(ours, opts, epoch)
                assert [opt.updates for opt in opts] == [2 + 2 * epoch] * count
            alike(ours.module, theirs.module)
            for opt in opts:
                opt.close()


def test_several_optimizers_beside_ddp(ranks: Pool) -> None:
    ranks.run(several_beside_ddp, world=WORLD)


def orders_and_ends() -> None:
    """Steps in another order than Join was given; a context that ends early; one in which nobody has a batch."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    first, second = (ShardedSGD([each], lr=0.5, tuning=TUNING) for each in model.parameters())
    with raises(DisagreementError, "in the order in which Join was given them"), Join([model, first, second]):
        for _ in range(rank):
            model(torch.ones(1, 8)).sum().backward()
            second.step()
            first.step()
    assert first.updates == second.updates == 0
    for each in (first, second):
        each.close()
    for torchs_own in (True, False):
        ours = DistributedDataParallel(Net())
        opt = ShardedSGD(ours.parameters(), tuning=TUNING, **SGD)
        keywords: dict[str, Any] = {"throw_on_early_termination": True}
        with raises(RuntimeError, "exhausted"), Join([ours, opt], **keywords) if torchs_own else ours.join(**keywords):
            for step in range(1 + rank):
                opt.zero_grad()
                ours(batch(step)).backward()
                opt.step()
        assert opt.updates == 1
        with Join([ours, opt]) if torchs_own else ours.join():
            pass
        assert opt.updates == 1
        with Join([ours, opt], enable=False) if torchs_own else ours.join(enable=False):
            opt.zero_grad()
            ours(batch(7)).backward()
            opt.step()
        alike(ours.module)
        opt.close()


def test_orders_and_ends(ranks: Pool) -> None:
    ranks.run(orders_and_ends, world=2)


def handed_over() -> None:
    """With the module: contexts in a row and one in another, an error on one rank, a disabled Join."""
    rank = dist.get_rank()
    for stage, neighbours in ((1, True), (2, False), (3, True), (3, False)):
        tuning = Tuning(bucket_bytes=1000, keep_below=20, timeout=60, neighbours=neighbours)
        theirs, ours = DistributedDataParallel(Net()), Net()
        torchs, opt = torch.optim.SGD(theirs.parameters(), **SGD), ShardedSGD(ours, stage=stage, tuning=tuning, **SGD)
        with opt.join():
            pass
        for epoch in range(2):
            with theirs.join():
                steps(theirs, [torchs], epoch)
            with opt.join():
                steps(ours, [opt], epoch)
        with opt.unsharded():
            alike(ours, theirs.module)
        with raises(ShardoptError, "before entering it again"), opt.join(), opt.join():
            raise AssertionError("not to be reached")
        # What fails on one rank between two backwards, while another one has run out and a third one waits for both;
        # ahead of its forward, and between its backward and its step.
        for late in (False, True):
            kind = ValueError if rank == 1 else DisagreementError
            updates = opt.updates
            with raises(kind, "a batch that is spoilt"), opt.join():
                for step in range(rank if rank < 2 else 3):
                    opt.zero_grad()
                    if rank == 1 and not late:
                        raise ValueError("a batch that is spoilt")
                    ours(batch(step)).backward()
                    if rank == 1 and late:
                        raise ValueError("a batch that is spoilt")
                    opt.step()
            assert opt.updates == updates
            opt.zero_grad()
        with raises(KeyError, "on every rank"), opt.join():
            raise KeyError("on every rank")
        with opt.join():
            steps(ours, [opt], 2)
        with theirs.join():
            steps(theirs, [torchs], 2)
        with opt.unsharded():
            alike(ours, theirs.module)
        with Join([opt], enable=False):
            opt.zero_grad()
            ours(batch(1)).backward()
            opt.step()
        with opt.unsharded():
            alike(ours)
        opt.close()
    for stage in (2, 3):
        with torch.device("meta"):
            built = nn.Linear(8, 8)
        opt = ShardedSGD(built, lr=0.5, stage=stage, tuning=Tuning(keep_below=20, neighbours=False, timeout=60))
        with opt.join():
            for _ in range(rank):
                opt.zero_grad()
                built(torch.ones(1, 8)).sum().backward()
                opt.step()
        assert opt.updates == 2
        with opt.unsharded():
            alike(built)
        opt.close()
    shared = Net()
    one, other = (ShardedSGD([{"params": each}], module=shared, **SGD) for each in halves(shared))
    with raises(ShardoptError, "several optimizers took the module over"), one.join(), other.join():
        raise AssertionError("not to be reached")


def test_handed_over(ranks: Pool) -> None:
    ranks.run(handed_over, world=WORLD)
