"""Params of the module that an optimizer of torch's own trains: averaged as under DDP, whole on every rank.

On two ranks, where half a gradient more or less rounding is none: DDP's mean has the bits of ours.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import BindingError, ShardedAdamW, ShardedSGD, ShardoptError, StateError, Tuning
from tests.support.comparing import equal_on_ranks
from tests.support.ranks import Pool
from tests.support.training import close_to, raises, raw

SGD = {"lr": 0.125, "momentum": 0.5}
SETTINGS = ((0, True), (1, False), (2, True), (3, True), (3, False))


class Net(nn.Module):
    """A rank whose number is not 0 leaves one param out of every second forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.own, self.out = nn.Linear(6, 31), nn.Linear(31, 31), nn.Linear(31, 5)
        self.odd, self.late = nn.Parameter(torch.ones(31)), nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        h = self.own(torch.tanh(self.first(x)))
        return self.out(h if leaves_out else h * self.odd) * self.late


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(8, 6, generator=generator), bool(step % 2 and dist.get_rank())).square().mean()


def groups_of(model: Net) -> tuple[list[Any], list[Any]]:
    """The params of the sharded optimizer, and those of the other one."""
    return [*model.first.parameters(), *model.out.parameters()], [*model.own.parameters(), model.odd, model.late]


def trains_as_under_ddp(stage: int, neighbours: bool) -> None:
    """Unused on one rank, accumulated, clipped together, thawed in mid-training."""
    theirs, ours = Net(), Net()
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    main, rest = zip(groups_of(theirs), groups_of(ours), strict=True)
    opts = [torch.optim.SGD(main[0], **SGD), torch.optim.AdamW(rest[0], lr=0.01)]
    tuning = Tuning(neighbours=neighbours, bucket_bytes=500, keep_below=20)
    own = [ShardedSGD(main[1], module=ours, stage=stage, tuning=tuning, **SGD), torch.optim.AdamW(rest[1], lr=0.01)]
    for step in range(6):
        if step == 3:
            for model in (theirs, ours):
                model.late.requires_grad_(True)
            ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
        for model, each, pause in ((ddp, opts, ddp.no_sync), (ours, own, own[0].no_sync)):
            for micro in range(2):
                with pause() if micro == 0 and step % 2 else nullcontext():
                    loss_of(model, 2 * step + micro).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for opt in each if step % 2 else each[::-1]:
                opt.step()
                opt.zero_grad(set_to_none=step % 3 > 0)
        with own[0].unsharded():
            close_to(ours, theirs)
            equal_on_ranks(ours.parameters())
    own[0].close()


def left_to_each_rank(stage: int) -> None:
    """DDP's ignore list: with DDP around the module or without, in another optimizer or in none."""
    for is_wrapped in (True, False):
        model = Net()
        names = [name for name, _ in model.named_parameters() if name.startswith("own.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        with torch.no_grad():
            model.own.bias.add_(dist.get_rank())
        kept = raw(model.own.bias)
        main = [*groups_of(model)[0], model.odd]
        wrapped = DistributedDataParallel(model) if is_wrapped else model
        opt = ShardedSGD(main, module=wrapped, stage=stage, tuning=Tuning(keep_below=20), **SGD)
        loss_of(wrapped, 0).backward()
        assert raw(model.own.bias) == kept
        grads = [torch.empty_like(model.own.bias) for _ in range(2)]
        dist.all_gather(grads, model.own.bias.grad)
        assert not torch.equal(*grads)
        opt.step()
        equal_on_ranks([model.odd])
        opt.close()


def refused(stage: int) -> None:
    """By what call to make, at once and on every rank."""
    tuning = Tuning(timeout=60)
    model = Net()
    opt = ShardedSGD(groups_of(model)[0], module=model, stage=stage, tuning=tuning, **SGD)
    with raises(BindingError, "odd is trainable but in no param group", "torch.optim"):
        loss_of(model, 0)
    other = torch.optim.SGD(groups_of(model)[1], lr=0.1)
    with raises(ShardoptError, "join()", "param group"), opt.join():
        pass
    loss_of(model, 0).backward()
    with raises(ShardoptError, "sparse=False"):
        if dist.get_rank():
            model.odd.grad = torch.ones(31).to_sparse()
        loss_of(model, 1).backward()
    opt.close()
    del other


def said_of_gradients(stage: int) -> None:
    """The likely cause first, in 40 words."""

    def in_few_words(kind: type[Exception], *words: str) -> Any:
        return raises_within(40, kind, *words)

    model = nn.Sequential(nn.Linear(6, 31), nn.Linear(31, 5))
    x = torch.ones(2, 6) * (1 + dist.get_rank())
    model(x).sum().backward()
    opt = ShardedAdamW(model, stage=stage, tuning=Tuning(keep_below=20))
    with in_few_words(ShardoptError, "construct the optimizer before the backward", "optimizer.bind()"):
        opt.step()
    opt.zero_grad()
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(model(x).sum(), params), strict=True):
        param.grad = grad
    with in_few_words(ShardoptError, "pass the params without the module", "averages gradients itself", "by hand"):
        opt.step()
    if stage < 2:
        opt.reduce_gradients()
        opt.step()
    opt.zero_grad()
    if stage < 2:
        with opt.no_sync():
            model(x).sum().backward()
        with in_few_words(ShardoptError, "leave no_sync()", "averages gradients itself"):
            opt.step()
        opt.zero_grad()
    opt.close()
    if stage == 1:
        model = nn.Sequential(nn.Linear(6, 31))
        opt = ShardedAdamW(model.parameters())
        model(x).sum().backward()
        with raises(ShardoptError, "ignore list", "param 0 of group 0", "gradients differ between ranks"):
            opt.step()


def averages_by_hand(stage: int) -> None:
    """A script's own averaging of what is averaged already: one error, or right numbers."""
    model = nn.Sequential(nn.Linear(6, 31), nn.Linear(31, 5))
    opt = ShardedAdamW(model, stage=stage, tuning=Tuning(keep_below=20))
    model(torch.ones(2, 6) * (1 + dist.get_rank())).sum().backward()
    params, same = list(model.parameters()), dist.new_group([1, 0])
    grads: list[Any] = [param.grad for param in params]
    before = [grad.full_tensor() for grad in grads]
    ways: list[Callable[[], object]] = [
        lambda: dist.all_reduce(grads[0]),
        lambda: dist.all_reduce(grads[1].data, op=dist.ReduceOp.MAX, group=same),
        lambda: dist.all_reduce(grads[0].detach(), async_op=True),
        lambda: dist.reduce(grads[0], 0),
        lambda: dist.all_reduce_coalesced(grads),
        lambda: coalesced(grads),
    ]
    for way in ways:
        with raises_within(40, StateError, "param.grad is the mean over ranks already: remove the script's own"):
            way()
    if stage:
        alone, _ = dist.new_subgroups(1)
        with raises_within(40, StateError, "call full_tensor() on every rank", "sum_tied", "a slice only"):
            dist.all_reduce(grads[0], group=alone)
        for copied in (grads[0].clone(), grads[0].view(-1)):
            with raises(StateError, "allreduce_"):
                dist.all_reduce(copied)
    # Each rank's copy of the mean, averaged, is the mean.
    gathered = [torch.zeros(31, 6) for _ in range(2)]
    dist.all_gather(gathered, grads[0])
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for grad, mean in zip(grads, torch._utils._unflatten_dense_tensors(flat / 2, grads), strict=True):
        grad.copy_(mean)
    assert all(torch.equal(grad.full_tensor(), mean) for grad, mean in zip(grads, before, strict=True))
    assert all(torch.equal(each, before[0]) for each in gathered)
    opt.step()
    opt.close()


def coalesced(grads: list[Tensor]) -> None:
    with dist._coalescing_manager():
        for grad in grads:
            dist.all_reduce(grad)


def reduces_over_others(dtype: torch.dtype) -> None:
    """A gradient that this rank holds whole may be reduced over ranks that hold other gradients."""
    alone, _ = dist.new_subgroups(1)
    model = nn.Linear(6, 31).to(dtype)
    opt = ShardedAdamW(model, stage=0, process_group=alone)
    model(torch.ones(2, 6, dtype=dtype) * (1 + dist.get_rank())).sum().backward()
    for param in model.parameters():
        grad: Any = param.grad
        expected, known = grad.full_tensor(), grad.norm()
        assert known > 0
        dist.all_reduce(expected)
        dist.all_reduce(grad, async_op=True).wait()  # type: ignore[union-attr]
        assert torch.equal(grad.full_tensor(), expected) and grad.dtype is dtype
        torch.testing.assert_close(grad.norm(), expected.float().norm())
    opt.step()
    opt.close()


class raises_within:
    """An error of this kind with these words, the first of which begin it, in at most so many words."""

    def __init__(self, most: int, kind: type[Exception], *words: str):
        self.most, self.kind, self.words = most, kind, words

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        text = str(error).partition(" Run a zero-bubble")[0]  # is there once torch's schedules were imported
        assert isinstance(error, self.kind), error
        assert text.startswith(self.words[0]) and all(word in text for word in self.words), text
        assert len(text.split()) <= self.most, (len(text.split()), text)
        return True


def test_averaged_as_under_ddp(ranks: Pool) -> None:
    for setting in SETTINGS:
        ranks.run(trains_as_under_ddp, *setting, world=2)


def test_left_alone_and_refused(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(left_to_each_rank, stage, world=2)
        ranks.run(refused, stage, world=2)
    for stage in range(4):
        ranks.run(said_of_gradients, stage, world=2)
        ranks.run(averages_by_hand, stage, world=2)
    ranks.run(reduces_over_others, torch.float32, world=2)
    ranks.run(reduces_over_others, torch.bfloat16, world=2)
