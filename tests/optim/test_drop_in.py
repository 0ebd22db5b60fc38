"""What scripts written for torch.optim do around an optimizer works unchanged, on two real gloo ranks."""

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler

from shardopt import DisagreementError, Part, ShardedAdamW, ShardedSGD
from tests.support.cases import fill_gradients
from tests.support.ranks import Pool
from tests.support.training import Net, close_to, ddp, digest, load_bytes, loss_of, pair, raises, train_step

# -- schedulers, groups, closures --------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda epoch: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 2),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.5, total_iters=3),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 4),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-2, 2, cycle_momentum=True),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=8),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 1e-4, anneal_epochs=3),
}


def schedulers() -> None:
    for name, make in SCHEDULERS.items():
        for lr in (1e-3, torch.tensor(1e-3)):
            if name == "CyclicLR" and isinstance(lr, Tensor):
                continue
            theirs, ours, torch_opt, opt = pair(lr=lr)
            torch_schedule, schedule = make(torch_opt), make(opt)
            seen: set[float] = set()
            for step in range(5):
                rates = []
                for model, optimizer, each in ((theirs, torch_opt, torch_schedule), (ours, opt, schedule)):
                    train_step(model, optimizer, step)
                    each.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                    rates.append([float(group["lr"]) for group in optimizer.param_groups])
                assert rates[0] == rates[1], f"{name}: {rates}"
                seen.add(rates[0][0])
            assert len(seen) > 1, f"{name} did nothing"
            close_to(ours, theirs)


def groups_and_unfreezing() -> None:
    """Each param its own lr and decay; a group added and a param unfrozen in mid-training."""
    theirs, ours = Net(), Net()
    torch_extra, extra = Parameter(torch.ones(3, 5)), Parameter(torch.ones(3, 5))
    optimizers: list[torch.optim.Optimizer] = []
    for model, kind in ((theirs, torch.optim.AdamW), (ours, ShardedAdamW)):
        model.embed.weight.requires_grad_(False)
        groups = [
            {"params": [param], "lr": 1e-3 * (1 + which), "weight_decay": 0.1 * which, "betas": (0.5 + which / 30, 0.9)}
            for which, param in enumerate(model.parameters())
        ]
        optimizers.append(kind(groups))
    for step in range(9):
        if step == 3:
            optimizers[0].add_param_group({"params": [torch_extra], "lr": 0.1})
            optimizers[1].add_param_group({"params": [extra], "lr": 0.1})
        if step == 5:
            for model in (theirs, ours):
                model.embed.weight.requires_grad_(True)
        for model, optimizer, more in ((theirs, optimizers[0], torch_extra), (ours, optimizers[1], extra)):
            optimizer.zero_grad()
            fill_gradients([*model.parameters(), more], "heavy_tailed", step)
            if step == 7:
                model.conv.weight.requires_grad_(False)
                model.conv.weight.grad = None
            optimizer.step()
    close_to(ours, theirs)
    torch.testing.assert_close(extra, torch_extra, atol=1e-7, rtol=1e-6)
    counts = [
        [float(optimizer.state[param]["step"]) for param in (*model.parameters(), more)]
        for model, optimizer, more in ((theirs, optimizers[0], torch_extra), (ours, optimizers[1], extra))
    ]
    assert counts[0] == counts[1] and set(counts[0]) == {4.0, 6.0, 7.0, 9.0}


def closures() -> None:
    theirs, ours, torch_opt, opt = pair()
    for step in range(3):
        losses = []
        for model, optimizer in ((theirs, torch_opt), (ours, opt)):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            with torch.no_grad() if step == 1 else torch.enable_grad():
                losses.append(optimizer.step(closure))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    close_to(ours, theirs)
    before = digest(opt)
    with raises(DisagreementError, "closure"):
        opt.step((lambda: 1.0) if dist.get_rank() == 1 else None)
    assert digest(opt) == before


def hooks_and_reports() -> None:
    model = ddp(Net())
    opt = ShardedAdamW(model.named_parameters(), lr=1e-3)
    seen: list[str] = []
    handles = [
        opt.register_step_pre_hook(lambda *_: seen.append("before")),
        opt.register_step_post_hook(lambda *_: seen.append("after")),
        opt.register_state_dict_pre_hook(lambda *_: seen.append("saving")),
        opt.register_state_dict_post_hook(lambda _, saved: saved.__setitem__("mine", 1)),
        opt.register_load_state_dict_pre_hook(lambda _, loaded: {**loaded, "param_groups": loaded["param_groups"]}),
        opt.register_load_state_dict_post_hook(lambda _: seen.append("loaded")),
    ]
    train_step(model, opt, 0)
    assert isinstance(opt, torch.optim.Optimizer) and "ShardedAdamW" in repr(opt) and "lr: 0.001" in repr(opt)
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert saved["mine"] == 1 and saved["param_groups"][0]["param_names"][0] == "module.embed.weight"
    for handle in handles:
        handle.remove()
    train_step(model, opt, 1)
    assert seen == ["before", "after", "saving", "loaded"]
    opt.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    opt.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    before = digest(opt)
    opt.step()  # no param has a gradient: nothing happens
    assert digest(opt) == before


def test_schedulers_groups_closures_hooks(ranks: Pool) -> None:
    for function in (schedulers, groups_and_unfreezing, closures, hooks_and_reports):
        ranks.run(function, world=2)


# -- autograd, compilation, several at once ----------------------------------------------------------------------------


def surroundings() -> None:
    """Compiled and checkpointed models train as plain ones do."""
    expected = Net()
    plain = ShardedAdamW(expected.parameters(), lr=1e-2)
    models: list[nn.Module] = [
        torch.compile(Net(), backend="aot_eager"),
        Net(checkpointed=True),
        Net(checkpointed=True, reentrant=True),
    ]
    for step in range(3):
        train_step(ddp(expected), plain, step)
    for model in models:
        opt = ShardedAdamW(model.parameters(), lr=1e-2)
        wrapped = ddp(model)
        for step in range(3):
            train_step(wrapped, opt, step)
        close_to(model, expected)


def autograd_sees_the_write() -> None:
    messages = []
    for kind in (torch.optim.AdamW, ShardedAdamW):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        opt = kind([*first.parameters(), *second.parameters()])
        loss = second(first(torch.ones(1, 4))).sum()
        loss.backward(retain_graph=True)
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        messages.append(str(caught.value).partition(", is at version")[0])  # torch writes once more than we do
    assert messages[0] == messages[1]


def several_at_once() -> None:
    """Two models, three optimizers; and two groups of ranks."""
    one, two = ddp(Net(1)), ddp(Net(2))
    halves = list(one.parameters())
    opts = [
        ShardedAdamW(halves[:4], lr=1e-2),
        ShardedSGD(halves[4:], lr=0.1, momentum=0.9),
        ShardedAdamW(two.parameters(), stage=0),
    ]
    alone = [copy.deepcopy(one), copy.deepcopy(two)]
    torch_halves = list(alone[0].parameters())
    torch_opts = [
        torch.optim.AdamW(torch_halves[:4], lr=1e-2),
        torch.optim.SGD(torch_halves[4:], lr=0.1, momentum=0.9),
        torch.optim.AdamW(alone[1].parameters()),
    ]
    for step in range(4):
        for models, optimizers in (((one, two), opts), (alone, torch_opts)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss_of(models[0], step) + loss_of(models[1], step)).backward()
            for optimizer in optimizers:
                optimizer.step()
    close_to(one, alone[0])
    close_to(two, alone[1])
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = Net(dist.get_rank())
    opt = ShardedAdamW(own.parameters(), process_group=groups[dist.get_rank()])
    before = digest(opt)
    for step in range(dist.get_rank() + 1):  # each rank as often as it likes
        fill_gradients(own.parameters(), "integers", step)
        opt.step()
    assert digest(opt) != before and not any(isinstance(each, Part) for each in opt.state[own.out.weight].values())
    del opts, opt
    gc.collect()


def without_group() -> None:
    assert not dist.is_initialized()
    ours, theirs = Net(), Net()
    opt, torch_opt = ShardedAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for step in range(3):
        train_step(ours, opt, step)
        train_step(theirs, torch_opt, step)
    close_to(ours, theirs)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    torch_opt.load_state_dict(load_bytes(file.getvalue()))
    opt.consolidate_state_dict()
    train_step(ours, opt, 3)
    train_step(theirs, torch_opt, 3)
    close_to(ours, theirs)


def test_surroundings(ranks: Pool) -> None:
    ranks.run(surroundings, world=2)
    ranks.run(autograd_sees_the_write, world=2)
    ranks.run(several_at_once, world=3)
    ranks.run(without_group, world=1, group=False)
