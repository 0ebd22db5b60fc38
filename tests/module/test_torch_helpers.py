"""torch's own helpers around a training, at the stages that take the module over: compiled models, SWA and EMA."""

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from shardopt import BindingError, ReleasedError, ShardedAdamW, Tuning
from tests.optim.test_drop_in import SCHEDULERS
from tests.support.ranks import Pool
from tests.support.training import Net, batch, close_to, ddp, loss_of, raises, train_step

SMALL = Tuning(bucket_bytes=2000, keep_below=100)
STAGES = (1, 2, 3)


def test_every_scheduler_of_torch_is_tested() -> None:
    """In test_drop_in.py, beside torch's optimizer."""
    found = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} <= set(SCHEDULERS)


# How a model is compiled: before it is handed over and after that, alone and inside of DDP.
HOW = ("after", "after, in DDP", "before")


def compiled(rows: list[tuple[int, str]]) -> None:
    warnings.simplefilter("ignore")
    expected = Net()
    torch_opt, reference = torch.optim.AdamW(expected.parameters(), lr=1e-2), ddp(expected)
    for step in range(3):
        train_step(reference, torch_opt, step)
    for stage, how in rows:
        model = Net()
        if how == "before":
            run: nn.Module = torch.compile(model, backend="aot_eager")
            opt = ShardedAdamW(run, lr=1e-2, stage=stage, tuning=SMALL)
        else:
            opt = ShardedAdamW(model, lr=1e-2, stage=stage, tuning=SMALL)
            run = torch.compile(model, backend="aot_eager")
            run = ddp(run) if how == "after, in DDP" else run
        for step in range(3):
            train_step(run, opt, step)
        with opt.unsharded():
            close_to(model, expected)
        opt.close()
        torch._dynamo.reset()


def averages() -> None:
    """The same average of the same weights, updated after each step; its own memory, whole on every rank."""
    for stage in STAGES:
        for make in (lambda: get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn):
            theirs, ours = ddp(Net()), Net()
            torch_opt = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
            opt = ShardedAdamW(ours, lr=1e-2, stage=stage, tuning=SMALL)
            schedules = [SWALR(each, 1e-3, anneal_epochs=3) for each in (torch_opt, opt)]
            averaged = [AveragedModel(theirs.module, multi_avg_fn=make()), AveragedModel(ours, multi_avg_fn=make())]
            for step in range(4):
                train_step(theirs, torch_opt, step)
                train_step(ours, opt, step)
                averaged[0].update_parameters(theirs.module)
                if stage == 3:
                    with raises(ReleasedError, "unsharded()"):
                        AveragedModel(ours)
                with opt.unsharded():
                    averaged[1].update_parameters(ours)
                for schedule in schedules:
                    schedule.step()
            close_to(averaged[1], averaged[0])
            update_bn([batch(0)[0]], averaged[1])
            assert torch.isfinite(loss_of(averaged[1], 9))
            # Made in mid-training, of the weights of this moment.
            with opt.unsharded():
                late: Any = AveragedModel(ours)
                close_to(late.module, ours)
                before = [param.clone() for param in late.parameters()]
            train_step(ours, opt, 5)
            assert all(torch.equal(mine, kept) for mine, kept in zip(late.parameters(), before, strict=True))
            opt.close()


def rank_0s_params() -> None:
    """DDP sends them to all when it wraps a module, Lightning behind fit(): sharded ones too."""
    for stage in STAGES:
        model = Net()
        opt = ShardedAdamW(model, lr=1e-2, stage=stage, tuning=SMALL)
        train_step(model, opt, 0)
        with opt.unsharded():
            before = [param.detach().clone() for param in model.parameters()]
        for nbytes in (250 << 20, 500):  # all at once, and one by one
            _sync_module_states(model, dist.group.WORLD, nbytes, 0, ())
        wrapped = ddp(model)
        with opt.unsharded():
            assert all(map(torch.equal, before, model.parameters()))
        if stage == 3:
            weight: Any = model.hidden.weight
            weight.data.copy_(torch.full_like(before[4], 0.25))  # by every rank
            with opt.unsharded():
                assert model.hidden.weight.eq(0.25).all()
            held = opt.state[model.hidden.weight]["exp_avg"]
            held.copy_(before[4])  # by every rank, its slice
            assert torch.equal(held.full_tensor(), before[4].expand_as(held))
        train_step(wrapped, opt, 1)
        opt.close()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(stage, "after, in DDP") for stage in (2, 3)], id="few"),
        pytest.param([(stage, how) for stage in STAGES for how in HOW], id="all", marks=pytest.mark.slow),
    ],
)
def test_compiled(rows: list[tuple[int, str]], ranks: Pool) -> None:
    """Alone and at stage 1 test_inductor.py, test_gather.py and test_drop_in.py compile them in every run."""
    ranks.run(compiled, rows, world=2)


def test_rank_0s_params(ranks: Pool) -> None:
    ranks.run(rank_0s_params, world=2)


def test_averages(ranks: Pool) -> None:
    ranks.run(averages, world=2)


def functional_call_first() -> None:
    """A binding would find other tensors in the params' places, or may not write: nothing is bound until bind()."""
    inputs, _ = batch(0)
    for stage in STAGES:
        model = Net()
        opt = ShardedAdamW(model, lr=1e-2, stage=stage, tuning=SMALL)
        named = {name: param.detach().clone() for name, param in model.named_parameters()}

        def called(tensors: dict[str, Any], model: nn.Module = model) -> Any:
            return torch.func.functional_call(model, tensors, (inputs,)).square().sum()

        average = {name: nn.Parameter(tensor) for name, tensor in named.items()}
        for use, tensors in ((called, named), (called, average), (torch.func.grad(called), named)):
            with raises(BindingError, "call optimizer.bind() on every rank before", "torch.func", "Nothing was bound"):
                use(tensors)
        opt.bind()
        with opt.unsharded():
            torch.func.grad(called)(named)
        train_step(model, opt, 0)
        opt.close()


def test_functional_call_first(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(functional_call_first, world=world)


def test_a_frozen_tensor_that_is_no_param_stands_in_nobodys_place() -> None:
    """Tools that move frozen weights put plain tensors where params were."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model[0]._parameters["weight"] = model[0].weight.detach()  # type: ignore[assignment]
    opt = ShardedAdamW(model[1].parameters(), lr=1e-2, stage=2, module=model, tuning=SMALL)
    before = model[1].weight.detach().clone()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    assert not torch.equal(before, model[1].weight)
    opt.close()


def recast_between_steps() -> None:
    """Params of another dtype than their gradients' sums: the backward says so, and the optimizer closes."""
    for stage in (0, 1, 2):
        model = nn.Linear(3, 2)
        opt = ShardedAdamW(model, lr=1e-2, stage=stage, tuning=SMALL)
        for dtype in (torch.float32, torch.bfloat16):
            loss = model.to(dtype)(torch.ones(2, 3, dtype=dtype)).sum()
            if dtype is torch.bfloat16:
                with raises(BindingError, "was moved, recast", "call close(), and construct it anew"):
                    loss.backward()
                break
            loss.backward()
            opt.step()
            opt.zero_grad()
        opt.close()


def test_recast_between_steps(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(recast_between_steps, world=world)
