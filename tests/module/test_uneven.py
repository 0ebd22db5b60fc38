"""Ranks with unequal numbers of batches train as under DDP's ``join()`` with ``torch.optim``; what cannot is refused.

Weights, inputs and what is done to gradients are whole numbers or powers of two, and sums of gradients can be divided
by 1, 2 and 3: nothing is rounded, so bits are compared, those of a rank that had no batch at all too.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from shardopt import (
    BindingError,
    DisagreementError,
    ShardedAdamW,
    ShardedSGD,
    ShardoptError,
    Tuning,
)
from tests.support.comparing import equal_on_ranks, snapshot
from tests.support.ranks import Pool
from tests.support.training import raises, raw

SGD = {"lr": 0.5, "momentum": 0.5}
WORLD = 3
BATCHES = (0, 2, 5)  # of each rank
# Stage, whether ranks read each other's memory, whether the module is one of DDP's.
SETTINGS = (
    *((1, True, True), (2, False, True), (2, True, False), (0, False, False)),
    *((3, True, True), (3, True, False), (3, False, False), (3, False, True)),
)


class Net(nn.Module):
    """Its gradients do not depend on its weights; a buffer counts what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(90, 7), nn.Linear(60, 5)
        self.register_buffer("seen", torch.zeros(3))
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randint(-9, 9, param.shape, generator=generator).float()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x[0, :3]
        return self.first(x).sum() + 2 * self.second(x[:, :60]).sum()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return 6.0 * torch.randint(-9, 9, (4, 90), generator=generator)


def train(model: nn.Module, opt: Any, pause: Any, accumulate: int, edit: Any, first: int = 0) -> None:
    """As many steps as this rank has batches; the first of several micro-batches of a step are not reduced."""
    for step in range(BATCHES[dist.get_rank()]):
        opt.zero_grad()
        for micro in range(accumulate):
            with pause() if micro < accumulate - 1 else nullcontext():
                model(batch(first + accumulate * step + micro)).backward()
        edit(model)
        opt.param_groups[0]["lr"] = 2.0 ** -(step % 3)
        opt.step()


def clamped(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 48.0)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


def as_it_is(model: nn.Module) -> None:
    pass


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def reference(by_all: bool, accumulate: int, edit: Any) -> tuple[nn.Module, dict[str, Any]]:
    """DDP and torch's optimizer; the state is that of a rank that had all batches."""
    model = DistributedDataParallel(Net())
    opt = torch.optim.SGD(model.parameters(), **SGD)
    with model.join(divide_by_initial_world_size=by_all):
        train(model, opt, model.no_sync, accumulate, edit)
    box = [opt.state_dict()["state"]]
    dist.broadcast_object_list(box, WORLD - 1)
    return model.module, box[0]


def check(ours: nn.Module, opt: ShardedSGD, theirs: nn.Module, state: dict[str, Any]) -> None:
    assert snapshot(ours, opt) == snapshot(theirs)
    assert raw(ours.seen) == raw(theirs.seen), (ours.seen, theirs.seen)
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        found = opt.state_dict()["state"]
        for index, own in state.items():
            assert raw(found[index]["momentum_buffer"]) == raw(own["momentum_buffer"])
        assert all(int(each["step"]) == max(BATCHES) for each in found.values() if "step" in each)


def trains_as_ddp_with_torch() -> None:
    for by_all in (True, False):
        for accumulate, edit in ((1, as_it_is), (2, clamped)):
            theirs, state = reference(by_all, accumulate, edit)
            for stage, neighbours, has_ddp in SETTINGS[accumulate - 1 :: 2]:
                tuning = Tuning(neighbours=neighbours, bucket_bytes=1000, keep_below=20, timeout=60)
                model: nn.Module = DistributedDataParallel(Net()) if has_ddp else Net()
                opt = ShardedSGD(model, stage=stage, tuning=tuning, **SGD)
                pause = opt.no_sync if stage < 2 else nullcontext
                with opt.join(by_all):
                    train(model, opt, pause, accumulate, edit)
                module = model.module if has_ddp else model
                check(module, opt, theirs, state)
                # Behind the context all ranks go on as ever.
                for _ in range(2):
                    opt.zero_grad()
                    model(torch.ones(4, 90)).backward()
                    opt.step()
                opt.close()


def trains_beside_ddp() -> None:
    """Without the module: DDP reduces."""
    for by_all in (True, False):
        theirs, state = reference(by_all, 1, clamped)
        for torchs_own in (False, True):
            model = DistributedDataParallel(Net())
            opt = ShardedSGD(model.parameters(), tuning=Tuning(bucket_bytes=1000, timeout=60), **SGD)
            keywords = {"divide_by_initial_world_size": by_all}
            with Join([model, opt], **keywords) if torchs_own else model.join(**keywords):
                train(model, opt, None, 1, clamped)
            check(model.module, opt, theirs, state)
            opt.close()


def test_numbers_are_those_of_ddp_with_torch(ranks: Pool) -> None:
    ranks.run(trains_as_ddp_with_torch, world=WORLD)


def test_numbers_without_the_module(ranks: Pool) -> None:
    ranks.run(trains_beside_ddp, world=WORLD)


def what_is_refused() -> None:
    """At once and on every rank, whoever has batches; and what ranks do differently."""
    rank = dist.get_rank()
    opt = ShardedSGD(Net(), **SGD, stage=1, release_gradients=True)
    with raises(ShardoptError, "release_gradients=True"), opt.join():
        raise AssertionError("not to be reached")
    with raises(ShardoptError, "release_gradients=True"), Join([opt]):
        raise AssertionError("not to be reached")
    with opt.join(enable=False):
        pass
    opt.close()
    alone = [dist.new_group([each]) for each in range(WORLD)][rank]
    opt = ShardedSGD([{"params": Net().parameters(), "process_group": alone}], **SGD)
    with raises(ShardoptError, "composed with tensor, pipeline or expert"), opt.join():
        raise AssertionError("not to be reached")
    for stage, neighbours in ((2, True), (3, True), (3, False)):
        what_goes_wrong(stage, neighbours)


def what_goes_wrong(stage: int, neighbours: bool) -> None:
    """Where the module was handed over."""
    rank, model = dist.get_rank(), DistributedDataParallel(Net())
    tuning = Tuning(neighbours=neighbours, keep_below=20, timeout=60)
    opt = ShardedSGD(model, stage=stage, tuning=tuning, **SGD)
    # DDP's own join().
    with raises(BindingError, "optimizer.join()"), model.join():
        raise AssertionError("not to be reached")
    # One rank runs out, and all are asked to stop there.
    with raises(RuntimeError, "exhausted"), opt.join(throw_on_early_termination=True):
        for step in range(2 if rank == 1 else 3):
            opt.zero_grad()
            model(batch(step)).backward()
            opt.step()
    assert opt.updates == 2
    opt.zero_grad()
    model(batch(0)).backward()  # behind the exception there is no context
    opt.step()
    # What DDP asks its reducer for has nobody to do it.
    with raises(BindingError, "call optimizer.close() first", "_set_ddp_runtime_logging_sample_rate"):
        model._set_ddp_runtime_logging_sample_rate(1)
    # Other divisors on each rank.
    with raises(DisagreementError, "divide_by_initial_world_size"), opt.join(rank == 0):
        opt.zero_grad()
        model(batch(0)).backward()
    opt.zero_grad()
    with raises(DisagreementError, "a forward that shares buffers", "step()"), opt.join():
        if rank == 0:
            opt.step()
        else:
            model(batch(0)).backward()

    # One rank is out of batches, one fails in its closure, one waits for both in its backward.
    def closure(step: int) -> Tensor:
        opt.zero_grad()
        loss = model(batch(step))
        if rank == 1 and step == 1:
            raise ValueError("a batch that is spoilt")
        loss.backward()
        return loss

    updates = opt.updates
    with raises(ValueError if rank == 1 else DisagreementError, "a batch that is spoilt"), opt.join():
        for step in range(1 if rank == 0 else 2):
            opt.step(functools.partial(closure, step))
    assert opt.updates == updates + 1
    # What one rank alone wrote into its slice, no other can repeat.
    opt.zero_grad()
    with raises(DisagreementError, "written to through .local", "clip_grad_norm_"), opt.join():
        for step in range(1 if rank == 1 else 2):
            opt.zero_grad()
            model(batch(step)).backward()
            if step:
                next(model.parameters()).grad.local.mul_(2.0)  # type: ignore[union-attr]
            opt.step()
    opt.close()


def test_refusals(ranks: Pool) -> None:
    ranks.run(what_is_refused, world=WORLD)


class GradientSetter(Joinable):
    """As in PyTorch's own test of ZeroRedundancyOptimizer: comes first, and sets gradients without a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.calls += 1

    def join_hook(self, **keywords: Any) -> JoinHook:
        assert keywords == {"told": "all joinables"}
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def closures_norms_and_setters() -> None:
    rank = dist.get_rank()
    # A step(closure), clipped, with states elsewhere: the rank that has run out takes it too.
    theirs, ours = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    torch_opt = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    opt = ShardedAdamW(ours, lr=0.01, stage=2, max_grad_norm=100.0, offload="cpu", tuning=Tuning(timeout=60))

    def closure(step: int, words: str | None = None) -> Tensor:
        opt.zero_grad()
        loss = ours(batch(step))
        if words is not None:
            raise ValueError(words)
        loss.backward()
        return loss

    with theirs.join():
        for step in range(1 + 2 * rank):
            torch_opt.zero_grad()
            theirs(batch(step)).backward()
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), 100.0)
            torch_opt.step()
    with opt.join():
        for step in range(1 + 2 * rank):
            opt.step(functools.partial(closure, step))
    assert opt.updates == 3 and (rank == 0 or abs(opt.grad_norm - float(norm)) < 1e-3 * float(norm))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    # What a closure raises where another rank has run out.
    with raises(ValueError if rank == 1 else DisagreementError, "a batch that is spoilt"), opt.join():
        for step in range(1 + rank):
            opt.step(functools.partial(closure, step, "a batch that is spoilt" if step else None))
    assert opt.updates == 4
    opt.step(functools.partial(closure, 0))
    opt.close()
    # Without DDP, behind another joinable.
    param, setter = nn.Parameter(torch.zeros(300)), GradientSetter()
    plain = ShardedSGD([param], lr=0.5, tuning=Tuning(timeout=60))
    with Join([setter, plain], told="all joinables"):
        for step in range(1 + 2 * rank):
            setter()
            param.grad = torch.full((300,), float(step + 1))
            plain.step()
    assert bool((param == -3.0).all()) and plain.updates == 3 and setter.calls == 1 + 2 * rank


def test_closures_norms_and_other_joinables(ranks: Pool) -> None:
    ranks.run(closures_norms_and_setters, world=2)


def follows_a_tensor() -> None:
    """A rate that a scheduler writes into a tensor is followed in that tensor, which compiled code may hold."""
    rank, rate = dist.get_rank(), torch.tensor(0.5)
    model, whole = Net(), Net()
    opt = ShardedSGD(model, lr=rate, stage=2, tuning=Tuning(timeout=60))
    with opt.join():
        for step in range(1 + 2 * rank):
            rate.fill_(0.5 ** (1 + step))
            opt.zero_grad()
            model(batch(step)).backward()
            opt.step()
    assert opt.param_groups[0]["lr"] is rate and float(rate) == 0.125 and opt.updates == 3
    equal_on_ranks(model.parameters())
    assert all(bool((mine != other).any()) for mine, other in zip(model.parameters(), whole.parameters(), strict=True))
    opt.close()


def test_a_rate_in_a_tensor_is_followed(ranks: Pool) -> None:
    ranks.run(follows_a_tensor, world=2)
