"""What frameworks do around a training, one thing at a time: move the module, ask DDP, wrap, count."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import ReleasedError, ShardedAdamW, ShardedSGD, Tuning
from tests.support.ranks import Pool
from tests.support.training import Net, close_to, loss_of, raises, train_step

SMALL = Tuning(bucket_bytes=2000, keep_below=100)


class Wrapper(nn.Module):
    """As a framework's: no params of its own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any) -> Any:
        return self.inner(*arguments)


def moved_to_where_it_is() -> None:
    """Lightning does so with every module when training ends."""
    for stage in (1, 2, 3):
        model = Net()
        opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=SMALL)
        expected = copy.deepcopy(model)
        reference = DistributedDataParallel(expected)
        torch_opt = torch.optim.AdamW(expected.parameters(), lr=0.01)
        for step in range(3):
            train_step(model, opt, step)
            train_step(reference, torch_opt, step)
            for move in (model.cpu, model.float, lambda model=model: model.to("cpu", torch.float32)):
                assert move() is model
        if stage == 3:
            for move in (model.half, model.double, lambda model=model: model.to(torch.bfloat16)):
                with raises(ReleasedError, "close()", "move and cast"):
                    move()
        train_step(model, opt, 3)
        train_step(reference, torch_opt, 3)
        with opt.unsharded():
            close_to(model, expected)
        opt.close()
        assert next(model.half().parameters()).dtype is torch.float16


def wrapped_after_the_handover() -> None:
    """DDP around a wrapper of the module is taken over as DDP around the module is, and answers about itself."""
    for stage in (1, 2, 3):
        inner, expected = Net(), Net()
        opt = ShardedAdamW(inner, lr=0.01, stage=stage, tuning=SMALL)
        model, reference = DistributedDataParallel(Wrapper(inner)), DistributedDataParallel(expected)
        torch_opt = torch.optim.AdamW(expected.parameters(), lr=0.01)
        for step in range(3):
            with model.no_sync():
                loss_of(model, 10 + step).backward()
            with reference.no_sync():
                loss_of(reference, 10 + step).backward()
            for each, optimizer in ((model, opt), (reference, torch_opt)):
                loss_of(each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert model._get_ddp_logging_data() == {}
        with opt.unsharded():
            close_to(inner, expected)
        opt.close()


def updates_are_counted() -> None:
    warnings.simplefilter("ignore")
    model = Net()
    opt = ShardedSGD(model, lr=0.1, stage=2, tuning=SMALL)
    for step in range(4):
        opt.zero_grad()
        (loss_of(model, step) * (float("nan") if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
        opt.step()
    assert opt.updates == 3
    opt.close()


def one_params_state() -> None:
    """Each rank takes its part of an assigned state; the parts that are shown can be assigned back."""
    model, other = Net(), Net()
    opt = ShardedAdamW(model, lr=0.01, stage=2, tuning=SMALL)
    again = ShardedAdamW(other, lr=0.01, stage=3, tuning=SMALL)
    for step in range(2):
        train_step(model, opt, step)
    train_step(other, again, 7)
    with again.unsharded(), torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        whole = {name: getattr(value, "full_tensor", value.clone)() for name, value in opt.state[theirs].items()}
        again.state[mine] = whole
    for optimizer in (opt, again):
        for param, state in optimizer.state.items():
            optimizer.state[param] = {name: value.to("cpu") for name, value in state.items()}
    train_step(model, opt, 3)
    train_step(other, again, 3)
    with again.unsharded():
        assert all(torch.equal(*both) for both in zip(model.parameters(), other.parameters(), strict=True))
    opt.close()
    again.close()


def contexts_within_contexts() -> None:
    """An inner ``no_sync()`` ends without ending the outer one: gradients stay this rank's own until it ends, too."""
    model = nn.Linear(2, 1, bias=False)
    opt = ShardedSGD(model, lr=1.0, stage=1)
    mine = torch.full((1, 2), 1.0 + dist.get_rank())
    with opt.no_sync():
        with opt.no_sync():
            model(mine).sum().backward()
        model(mine).sum().backward()
        assert torch.equal(model.weight.grad, 2 * mine)
    model(mine).sum().backward()
    before = model.weight.detach().clone()
    opt.step()
    assert torch.equal(model.weight.detach(), before - 4.5)  # the mean of 3 and 6
    opt.close()


def reduced_by_backward() -> None:
    """``reduce_gradients()`` does nothing where a backward has reduced, and from stage 2 on it asks nobody."""
    for options in (
        {"stage": 2},
        {"stage": 3, "tuning": Tuning(keep_below=0)},
        {"stage": 1, "release_gradients": True},
    ):
        model = nn.Linear(2, 1, bias=False)
        opt = ShardedSGD(model, lr=1.0, **options)  # type: ignore[arg-type]
        with opt.unsharded():
            before = model.weight.detach().clone()
        releases = "release_gradients" in options
        for _ in range(1 if releases else 2):
            model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
            if dist.get_rank() == 0 or releases:  # of what no_sync() accumulated there is nothing
                opt.reduce_gradients()
        opt.step()
        with opt.unsharded():
            assert torch.equal(model.weight.detach(), before - (1.5 if releases else 3.0))
        opt.close()


def test_around_a_training(ranks: Pool) -> None:
    for function in (moved_to_where_it_is, wrapped_after_the_handover, updates_are_counted, one_params_state):
        ranks.run(function, world=2)


def test_what_is_reduced_when(ranks: Pool) -> None:
    for function in (contexts_within_contexts, reduced_by_backward):
        ranks.run(function, world=2)
