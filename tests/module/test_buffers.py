"""Buffers of a module without DDP around it are those of one rank, in training and after each step, as under DDP.

DDP gives all ranks rank 0's buffers before a forward; here they have them after each step too. So what is compared is
params on all ranks, and every rank's buffers with those of DDP's rank 0.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardopt
from shardopt import CommunicationError, ShardedSGD, ShardoptError, Tuning
from tests.support.comparing import equal_on_ranks
from tests.support.ranks import Pool
from tests.support.training import close_to, raises, raw

SGD = {"lr": 0.125, "momentum": 0.5}
SETTINGS = ((0, True), (1, False), (2, True), (3, True), (3, False))


class Net(nn.Module):
    """Its buffers follow the data, the output follows them; one is assigned anew by each forward."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.out = nn.Linear(6, 31), nn.BatchNorm1d(31), nn.Linear(31, 5)
        self.register_buffer("centre", torch.zeros(31))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("large", torch.zeros(3, 2, dtype=torch.bool).t())  # not contiguous
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("none", None)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training and torch._C._current_graph_task_id() == -1:
            with torch.no_grad():
                self.centre.lerp_(h.mean(0), 0.25)
                self.seen = self.seen + len(x) + dist.get_rank()
                self.large.copy_((h[:2, :3] > 0).reshape(2, 3))
                self.coarse.add_(h[0, :3].bfloat16())
        h = self.norm(h - self.centre.clone())
        return self.out(checkpoint(torch.tanh, h, use_reentrant=False) if self.checkpointed else torch.tanh(h))


def inputs(number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def plain(model: nn.Module, numbers: Iterator[int], _: Any) -> None:
    model(inputs(next(numbers))).square().mean().backward()


def accumulated(model: nn.Module, numbers: Iterator[int], no_sync: Callable[[], Any]) -> None:
    for micro in range(3):
        with no_sync() if micro < 2 else nullcontext():
            plain(model, numbers, no_sync)


def twice(model: nn.Module, numbers: Iterator[int], _: Any) -> None:
    (model(inputs(next(numbers))).square().mean() + model(inputs(next(numbers))).square().mean()).backward()


def alternating(model: nn.Module, numbers: Iterator[int], _: Any) -> None:
    for _step in range(2):
        plain(model, numbers, _)


WAYS = (plain, accumulated, twice, alternating)


def tuning(neighbours: bool, **more: Any) -> Tuning:
    return Tuning(neighbours=neighbours, bucket_bytes=500, keep_below=20, **more)


def check(ours: nn.Module, opt: ShardedSGD, theirs: nn.Module) -> None:
    with opt.unsharded():
        close_to(ours, theirs)
    for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        first = other.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, 0)
        torch.testing.assert_close(mine, first, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    equal_on_ranks(ours.buffers())


def evaluate(model: nn.Module) -> Tensor:
    """On one rank alone, with gradients or without, as scripts may forget the context."""
    model.eval()
    model(torch.ones(4, 6))
    with torch.no_grad():
        return model(torch.ones(4, 6))


def trains_as_under_ddp(stage: int, neighbours: bool) -> None:
    """Whatever the loop; rank 0's buffers count at binding too; any rank can evaluate alone between steps."""
    for number, way in enumerate(WAYS):
        ddp, ours = DistributedDataParallel(Net(checkpointed=number == 0)), Net(checkpointed=number == 0)
        ours.centre.add_(dist.get_rank())
        theirs, mine, other = ddp.module, itertools.count(), itertools.count()
        torch_opt = torch.optim.SGD(theirs.parameters(), **SGD)
        opt = ShardedSGD(ours, stage=stage, tuning=tuning(neighbours), **SGD)
        for step in range(3):
            way(ddp, other, ddp.no_sync)
            way(ours, mine, opt.no_sync)
            torch_opt.step()
            opt.step()
            torch_opt.zero_grad()
            opt.zero_grad()
            check(ours, opt, theirs)
            if step == 1:  # what rank 0 writes between two steps is every rank's in the next forward
                theirs.centre.add_(1.0)
                ours.centre.add_(1.0 - dist.get_rank())
        with opt.unsharded():
            alone = evaluate(ours if dist.get_rank() == 1 else theirs)
        found = [torch.empty_like(alone) for _ in range(2)]
        dist.all_gather(found, alone)
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
        opt.close()


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each broadcast within it."""
    found: list[int] = []
    broadcast = dist.broadcast

    def counting(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        found.append(tensor.nbytes)
        return broadcast(tensor, *arguments, **keywords)

    with patch.object(dist, "broadcast", counting):
        yield found


def alike(tensor: Tensor) -> bool:
    """Whether all ranks hold the same. Collective."""
    found = [torch.empty_like(tensor, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.double().contiguous())
    return all(torch.equal(each, found[0]) for each in found)


def messages(stage: int, neighbours: bool) -> None:
    """One before a forward in training and one after a step; none without buffers, or where the option says so."""

    def sent_by(model: nn.Module, **more: Any) -> list[int]:
        opts = [
            ShardedSGD(params, module=model, stage=stage, tuning=tuning(neighbours, **more), **SGD)
            for params in ([*model.parameters()][:2], [*model.parameters()][2:])
        ]
        for step in range(2):
            with counted() as sent:
                model.train()
                model(inputs(step)).square().mean().backward()
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
                if stage < 3 and dist.get_rank():
                    evaluate(model)
        for opt in opts:
            opt.close()
        return sent

    nbytes = sum(each.nbytes for each in Net().buffers())
    assert sent_by(Net()) == [nbytes] * 2
    assert sent_by(nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 5))) == []
    own = Net()
    own.centre.add_(dist.get_rank())
    assert sent_by(own, broadcast_buffers=False) == []
    assert not alike(own.centre)
    listed = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(listed, ["centre", "norm.running_mean"])
    listed.centre.add_(dist.get_rank())
    assert sent_by(listed) == [nbytes - 2 * 31 * 4] * 2
    apart = [name for name, each in listed.named_buffers() if each.numel() and not alike(each)]
    assert apart == ["centre", "norm.running_mean"], apart


def goes_on_after_an_error(stage: int, neighbours: bool) -> None:
    """On one rank, in a forward or after it: its next batch then goes with the others' present one."""
    model = Net()
    opt = ShardedSGD(model, stage=stage, tuning=tuning(neighbours, timeout=60), **SGD)
    for where in ("nowhere", "forward", "loss", "nowhere"):
        opt.zero_grad()
        if dist.get_rank() == 1 and where != "nowhere":
            with raises(ValueError):
                if where == "forward":
                    with patch.object(model.out, "forward", side_effect=ValueError):
                        model(inputs(0))
                else:
                    model(inputs(0))
                    raise ValueError
            opt.zero_grad()
        model(inputs(1)).square().mean().backward()
        opt.step()
        with opt.unsharded():
            equal_on_ranks([*model.parameters(), *model.buffers()])
    # A closure that raises on one rank before its forward, or in it, is every rank's error.
    for breaks in ("before", "forward"):

        def closure(breaks: str = breaks) -> Tensor:
            opt.zero_grad()
            if dist.get_rank() == 1 and breaks == "before":
                raise ValueError
            with patch.object(model.out, "forward", side_effect=ValueError) if dist.get_rank() else nullcontext():
                loss = model(inputs(2)).square().mean()
            loss.backward()
            return loss

        with raises(ValueError if dist.get_rank() else ShardoptError):
            opt.step(closure)
        opt.zero_grad()
        model(inputs(3)).square().mean().backward()
        opt.step()
    with opt.unsharded():
        equal_on_ranks([*model.parameters(), *model.buffers()])
    opt.close()


def test_buffers_are_those_of_one_rank(ranks: Pool) -> None:
    for setting in SETTINGS:
        ranks.run(trains_as_under_ddp, *setting, world=2)
    for setting in SETTINGS[:-1]:  # where units travel, a forward that raises leaves its gathers to the others
        ranks.run(goes_on_after_an_error, *setting, world=2)
    for setting in SETTINGS[1::2]:
        ranks.run(messages, *setting, world=2)


def soon() -> Any:
    """A group whose waits end, on a rank that is only slow too: with the error that is asked for."""
    return dist.new_group([0, 1], timeout=timedelta(seconds=5))


def hurry(group: Any) -> None:
    """Behind the first step, which compiles: from now on waits end soon."""
    dist.barrier()
    distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)


def runs_other_forwards(stage: int, neighbours: bool, odd: int) -> None:
    """One rank runs a forward more than the other."""
    model, group = Net(), soon()
    opt = ShardedSGD(model, stage=stage, process_group=group, tuning=tuning(neighbours), **SGD)
    with raises(CommunicationError):
        for step in range(4):
            if step == 1:
                hurry(group)
            if dist.get_rank() == odd and step == 1:
                model(inputs(9))
            model(inputs(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()


def holds_other_buffers(on_all: bool) -> None:
    """A buffer that grows on all ranks travels as it is; one that grows on one rank is an error on all."""
    model, group = Net(), None if on_all else soon()
    opt = ShardedSGD(model, stage=2, process_group=group, tuning=tuning(True), **SGD)
    with nullcontext() if on_all else raises(CommunicationError):
        for size in (3, 4):
            if size == 4 and not on_all:
                hurry(group)
            if size == 3 or on_all or dist.get_rank():
                model.register_buffer("grows", torch.full((size,), 1.0 + dist.get_rank()))
            model(inputs(size)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            assert model.grows.tolist() == [1.0] * size


def test_ranks_that_differ(ranks: Pool) -> None:
    for odd, setting in enumerate(((1, True), (2, False))):
        ranks.run(runs_other_forwards, *setting, odd, world=2)
    for on_all in (True, False):
        ranks.run(holds_other_buffers, on_all, world=2)


class Experts(nn.Module):
    """Rank 0 and 2 share one expert, rank 1 and 3 another one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.expert = Net(), nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.body(x))


def experts_have_their_own(stage: int) -> None:
    torch.manual_seed(dist.get_rank() % 2)
    model = Experts()
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    own = groups[dist.get_rank() % 2]
    params = [
        {"params": [*model.body.parameters()]},
        {"params": [*model.expert.parameters()], "process_group": own},
    ]
    opt = ShardedSGD(params, module=model, stage=stage, tuning=tuning(False), **SGD)
    for step in range(2):
        model(inputs(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    equal_on_ranks(model.body.buffers())
    means = [torch.empty(40) for _ in range(4)]
    dist.all_gather(means, model.expert[1].running_mean)
    assert raw(means[0]) == raw(means[2]) != raw(means[1]) == raw(means[3])
    opt.close()


def hybrid_and_pipelines(stage: int) -> None:
    """All copies and all shards have one rank's buffers; each stage of a pipeline shares its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    opt = ShardedSGD(model, stage=stage, process_group=mesh, tuning=tuning(False), **SGD)
    for step in range(2):
        model(inputs(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    equal_on_ranks(model.buffers())
    opt.close()
    stages = nn.ModuleList([Net(), nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))])
    opt = ShardedSGD(stages, stage=stage, tuning=tuning(False), **SGD)
    for step in range(2):
        for micro in range(2):
            stages[1](stages[0](inputs(10 * step + micro))).square().mean().backward()
        opt.step()
        opt.zero_grad()
    equal_on_ranks(stages.buffers())
    opt.close()


def test_composed(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(experts_have_their_own, stage, world=4)
        ranks.run(hybrid_and_pipelines, stage, world=4)


def resumes(folder: str) -> None:
    """What a checkpoint holds is what every rank had."""
    model = Net()
    opt = ShardedSGD(model, stage=2, tuning=tuning(True), **SGD)
    for step in range(4):
        if step == 2:
            shardopt.save_checkpoint(folder, model, opt)
            kept = copy.deepcopy(dict(model.named_buffers()))
        model(inputs(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    again = Net()
    other = ShardedSGD(again, stage=2, tuning=tuning(True), **SGD)
    shardopt.load_checkpoint(folder, again, other)
    for name, each in again.named_buffers():
        if name != "coarse":  # not persistent
            assert raw(each) == raw(kept[name]), name
    again.coarse.copy_(kept["coarse"])
    for step in (2, 3):
        again(inputs(step)).square().mean().backward()
        other.step()
        other.zero_grad()
    for one, two in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert raw(one) == raw(two)


def test_a_resume_changes_no_buffer(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(resumes, str(tmp_path / "run"), world=2)
