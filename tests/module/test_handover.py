"""A module that was handed over trains as under DDP and torch.optim, is given back, and refuses what it must.

On two ranks, where half a gradient more or less rounding is none: DDP's mean has the bits of ours.
"""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import _JoinConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import lr_scheduler

from shardopt import (
    BindingError,
    DisagreementError,
    ReleasedError,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    StateError,
    Tuning,
)
from shardopt.tensors.gradient import GradientPart
from tests.support.moments import until
from tests.support.ranks import Pool
from tests.support.training import close_to, raises, raw

SETTINGS = tuple((stage, neighbours) for stage in (1, 2, 3) for neighbours in (True, False))
# Every stage once, both connections: jobs take turns with the two of them.
TURNS = tuple(tuple(each for each in SETTINGS if sum(each) % 2 == turn) for turn in range(2))
SGD = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}
ADAMW = {"lr": 0.01, "weight_decay": 0.1}


class Net(nn.Module):
    """With buffers that every forward changes, a frozen param, and one that no forward uses."""

    def __init__(self, seed: int = 0, spare: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 31, bias=False)
        self.norm = nn.BatchNorm1d(31)
        self.frozen = nn.Linear(31, 20).requires_grad_(False)
        self.hidden = nn.Linear(20, 33)
        self.out = nn.Linear(33, 5)
        self.spare = nn.Linear(12, 12) if spare else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.relu(self.norm(self.first(x))))
        return self.out(torch.tanh(self.hidden(x)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return model(torch.randn(8, 6, generator=generator)).square().mean()


def backward(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()


def train_step(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    backward(model, step)
    opt.step()


def tuning(neighbours: bool, **more: Any) -> Tuning:
    """Several buckets, and at stage 3 some params that stay whole."""
    return Tuning(neighbours=neighbours, bucket_bytes=1000, keep_below=100, **more)


def wrapped(model: nn.Module, **keywords: Any) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
        return DistributedDataParallel(model, **keywords)


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_close(ours: nn.Module, theirs: nn.Module, *opts: ShardedOptimizer) -> None:
    """Params, gathered where they must be, and buffers."""
    with whole(*opts):
        close_to(inner(ours), inner(theirs))
        for (name, mine), other in zip(inner(ours).named_buffers(), inner(theirs).buffers(), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def whole(*opts: ShardedOptimizer) -> Iterator[None]:
    if not opts:
        yield
        return
    with opts[0].unsharded(), whole(*opts[1:]):
        yield


def check_equal_on_ranks(model: nn.Module) -> None:
    for param in model.parameters():
        others = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.detach())
        assert all(raw(other) == raw(param) for other in others)


def average(model: nn.Module) -> None:
    """What DDP would do."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


# -- DDP ---------------------------------------------------------------------------------------------------------------

WRAPPINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "finds unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "own buffers": {"broadcast_buffers": False},
}


def trains_as_under_ddp(stage: int, neighbours: bool) -> None:
    for number, (name, keywords) in enumerate(WRAPPINGS.items()):
        if (number + stage) % 2 != neighbours and name != "plain":
            continue  # in another setting
        theirs, ours = (wrapped(Net(spare=name == "finds unused"), **keywords) for _ in range(2))
        torch_kind, kind, rates = (
            (torch.optim.SGD, ShardedSGD, SGD) if number % 2 == 0 else (torch.optim.AdamW, ShardedAdamW, ADAMW)
        )
        params = [[param for param in model.parameters() if param.requires_grad] for model in (theirs, ours)]
        # A step by DDP first: its buckets were used, and some gradients are views of them.
        for model, each in ((theirs, params[0]), (ours, params[1])):
            train_step(model, torch.optim.SGD(each, lr=0.125), 9)
        reducer, views = (
            weakref.ref(ours.reducer),
            [StorageWeakRef(p.grad.untyped_storage()) for p in params[1] if p.grad is not None],
        )
        torch_opt, opt = torch_kind(params[0], **rates), kind(ours, **rates, stage=stage, tuning=tuning(neighbours))
        for each in (torch_opt, opt):
            each.zero_grad()
        gc.collect()
        assert reducer() is not None and any(view.expired() for view in views) != ("views" in name)
        for step in range(3):
            if step == 1:  # rank 0's are for all, unless every rank keeps its own
                for model in (theirs, ours):
                    model.module.norm.running_mean.add_(dist.get_rank())
            for model, each in ((theirs, torch_opt), (ours, opt)):
                each.zero_grad()
                if step >= 2:
                    with model.no_sync():
                        backward(model, 10 + step)
                        backward(model, 20 + step)
                backward(model, step)
                each.step()
            if step == 0:
                gc.collect()
                assert reducer() is None and all(view.expired() for view in views), name
            check_close(ours, theirs, opt)
        with opt.unsharded():
            mine, other = ours.state_dict(), theirs.state_dict()
        assert list(mine) == list(other) and all(mine[key].shape == other[key].shape for key in other)
        for model in (theirs, ours):
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(ours, 5), loss_of(theirs, 5), rtol=1e-5, atol=0)


def test_trains_as_under_ddp(ranks: Pool) -> None:
    for setting in SETTINGS:
        ranks.run(trains_as_under_ddp, *setting, world=2)


# -- taken over, and given back ----------------------------------------------------------------------------------------


def handed_over_before_ddp(stage: int, neighbours: bool) -> None:
    """As frameworks do: the optimizer is made first, and the model wrapped, or moved, afterwards."""
    theirs, model = wrapped(Net()), Net()
    opt = ShardedAdamW(model, **ADAMW, stage=stage, tuning=tuning(neighbours))
    ours = wrapped(model)
    reducer = weakref.ref(ours.reducer)
    torch_opt = torch.optim.AdamW([param for param in theirs.parameters() if param.requires_grad], **ADAMW)
    for step in range(3):
        train_step(theirs, torch_opt, step)
        train_step(ours, opt, step)
    check_close(ours, theirs, opt)
    gc.collect()
    assert reducer() is None


def plain_module(stage: int, neighbours: bool) -> None:
    """Rank 0's params and buffers for all; no_sync() and what follows it; a scheduler; closures."""
    theirs, ours = wrapped(Net()), Net(seed=dist.get_rank())
    ours.norm.running_mean.add_(dist.get_rank())
    torch_opt = torch.optim.SGD([param for param in theirs.parameters() if param.requires_grad], **SGD)
    opt = ShardedSGD(ours, **SGD, stage=stage, tuning=tuning(neighbours))
    schedules = [lr_scheduler.LambdaLR(each, lambda epoch: 0.5**epoch) for each in (torch_opt, opt)]
    for step in range(4):
        losses = []
        for model, each, schedule in zip((theirs, ours), (torch_opt, opt), schedules, strict=True):

            def closure(model: Any = model, each: Any = each, step: int = step) -> Tensor:
                each.zero_grad()
                if step >= 1:
                    with opt.no_sync() if each is opt else model.no_sync():
                        backward(model, 10 + step)
                        backward(model, 20 + step)
                loss = loss_of(model, step)
                loss.backward()
                return loss.detach()

            losses.append(each.step(closure) if step % 2 else closure())
            if step % 2 == 0:
                each.step()
            schedule.step()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for each in theirs.buffers():  # as DDP does in its next forward
            dist.broadcast(each, 0)
        check_close(ours, theirs, opt)
    assert opt.param_groups[0]["lr"] == torch_opt.param_groups[0]["lr"] == SGD["lr"] / 16
    # Nothing reduced: at stage 1 no rank knows a mean.
    if stage == 1:
        opt.zero_grad()
        with opt.no_sync():
            backward(ours, 0)
        before = [raw(param) for param in ours.parameters()]
        with raises(ShardoptError, "no_sync()"):
            opt.step()
        assert before == [raw(param) for param in ours.parameters()]
        backward(ours, 1)
        with opt.no_sync():
            backward(ours, 2)
        with raises(ShardoptError, "no_sync()"):
            opt.step()
        assert before == [raw(param) for param in ours.parameters()]


def hooks_of(model: nn.Module) -> int:
    modules = sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())
    return modules + sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def given_back(stage: int, neighbours: bool) -> None:
    """After close(), and after the optimizer was dropped without it, DDP reduces by itself again."""
    for closes in (True, False) if stage < 3 else (True,):
        theirs, ours = wrapped(Net()), wrapped(Net())
        params = [[param for param in model.parameters() if param.requires_grad] for model in (theirs, ours)]
        torch_opt = torch.optim.SGD(params[0], **SGD)
        opt = ShardedSGD(ours, **SGD, stage=stage, tuning=tuning(neighbours))
        for step in range(2):
            train_step(theirs, torch_opt, step)
            train_step(ours, opt, step)
        for model in (theirs, ours):
            backward(model, 7)  # gradients that nobody will use
        gone = weakref.ref(opt)
        if closes:
            opt.close()
            opt.close()
        del opt
        gc.collect()
        assert gone() is None and hooks_of(ours) == hooks_of(theirs) == 0
        assert all(type(param) is Parameter and param.grad is None for param in params[1])
        check_close(ours, theirs)
        for step in range(2, 4):
            for model, each in ((theirs, params[0]), (ours, params[1])):
                train_step(model, torch.optim.SGD(each, lr=0.125), step)
        check_close(ours, theirs)
        check_equal_on_ranks(ours.module)
        # To another optimizer.
        again = ShardedAdamW(ours, **ADAMW, stage=3, tuning=tuning(neighbours))
        torch_again = torch.optim.AdamW(params[0], **ADAMW)
        train_step(ours, again, 4)
        train_step(theirs, torch_again, 4)
        check_close(ours, theirs, again)
        again.close()


def dropped_at_stage_3(neighbours: bool) -> None:
    """Its slices lie apart and no rank can ask the others alone: reading says so, and nothing crashes.

    The slices go with the model; what is left of both then says so.
    """
    model, threads = Net(), threading.active_count()
    opt = ShardedSGD(model, **SGD, stage=3, tuning=tuning(neighbours))
    train_step(model, opt, 0)
    with opt.unsharded():
        trained = model.hidden.weight.detach().clone()
    del opt
    gc.collect()
    until(lambda: threading.active_count() <= threads, "the threads that serve slices to end, which hold them")
    gc.collect()
    weight, gone = model.hidden.weight, weakref.ref(model.hidden.bias)
    with raises(ReleasedError, "full_tensor()", "hidden.weight", "without close()"):
        weight.sum()
    with raises(ReleasedError, "full_tensor()"):
        loss_of(model, 0)
    again = ShardedSGD(model, **SGD, stage=3, tuning=tuning(neighbours))  # as a script that makes its optimizer anew
    with raises(ReleasedError, "full_tensor()", "without close()"):
        loss_of(model, 0)
    del again
    assert torch.equal(weight.detach().full_tensor(), trained)
    del model

    def is_gone() -> bool:  # a thread of gloo may let go of its last message later
        gc.collect()
        return gone() is None

    until(is_gone, "the params to be freed")
    for read in (weight.sum, weight.detach):
        with raises(ReleasedError, "went with both"):
            read()


def copies(stage: int, neighbours: bool) -> None:
    """A copy of the model, for an average of weights say, is nobody's but its owner's."""
    theirs, ours = wrapped(Net()), wrapped(Net())
    torch_opt = torch.optim.SGD([param for param in theirs.parameters() if param.requires_grad], **SGD)
    opt = ShardedSGD(ours, **SGD, stage=stage, tuning=tuning(neighbours))
    for step in range(4):
        train_step(theirs, torch_opt, step)
        train_step(ours, opt, step)
        if step == 1:
            with opt.unsharded():
                twins = [copy.deepcopy(ours.module), copy.deepcopy(ours)]
            twin_opts = [torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.125) for twin in twins]
            starts = [raw(param) for param in twins[0].parameters()]
            gradients = [param.grad for param in ours.parameters()]
        if step >= 1:
            for twin, twin_opt in zip(twins, twin_opts, strict=True):
                twin_opt.zero_grad()
                backward(twin, 50 + step)
                grads = [param.grad for param in twin.parameters() if param.requires_grad]
                assert all(type(grad) is Tensor for grad in grads)
                twin_opt.step()
            if step == 1:
                assert all(one.grad is grad for one, grad in zip(ours.parameters(), gradients, strict=True))
                assert [raw(param) for param in twins[0].parameters()] != starts
                check_equal_on_ranks(twins[1].module)
    check_close(ours, theirs, opt)
    first, second = (next(iter(twin.parameters())) for twin in twins)
    assert raw(first) != raw(second)  # one was trained by each rank for itself, the other by DDP


def two_optimizers(stage: int, neighbours: bool) -> None:
    """Each has some of the params; a third rank's worth of them is frozen."""
    for is_ddp in (True, False):
        theirs, ours = wrapped(Net()), wrapped(Net()) if is_ddp else Net(seed=dist.get_rank())
        model = inner(ours)
        torch_opts = [
            torch.optim.AdamW([*theirs.module.first.parameters(), *theirs.module.out.parameters()], **ADAMW),
            torch.optim.SGD([*theirs.module.hidden.parameters(), *theirs.module.norm.parameters()], **SGD),
        ]
        options = {"module": ours, "stage": stage, "tuning": tuning(neighbours)}
        opts = [
            ShardedAdamW([*model.first.parameters(), *model.out.parameters()], **ADAMW, **options),
            ShardedSGD([*model.hidden.parameters(), *model.norm.parameters()], **SGD, **options),
        ]
        for step in range(3):
            for each, optimizers in ((theirs, torch_opts), (ours, opts)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                backward(each, step)
                for optimizer in optimizers[:: 1 if step else -1]:
                    optimizer.step()
            with whole(*opts):
                close_to(inner(ours), inner(theirs))
        for opt in opts:
            opt.close()
        check_equal_on_ranks(model)


def test_taken_over_and_given_back(ranks: Pool) -> None:
    for number, function in enumerate((handed_over_before_ddp, plain_module, given_back, copies, two_optimizers)):
        for setting in TURNS[number % 2]:
            ranks.run(function, *setting, world=2)
    for neighbours in (True, False):
        ranks.run(dropped_at_stage_3, neighbours, world=2)


# -- gradients and groups ----------------------------------------------------------------------------------------------


def pair(stage: int, neighbours: bool, **keywords: Any) -> tuple[Any, Any, torch.optim.Optimizer, ShardedOptimizer]:
    theirs, ours = wrapped(Net()), wrapped(Net())
    torch_opt = torch.optim.SGD([param for param in theirs.parameters() if param.requires_grad], **SGD)
    return theirs, ours, torch_opt, ShardedSGD(ours, **SGD, stage=stage, tuning=tuning(neighbours), **keywords)


def torchs_tools(stage: int, neighbours: bool) -> None:
    """What scripts do between backward and step has the same result, and needs no other rank."""
    theirs, ours, torch_opt, opt = pair(stage, neighbours)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(8):
        both = list(zip((theirs, ours), (torch_opt, opt), scalers, strict=True))
        scaled = step >= 4
        for model, each, scaler in both:
            each.zero_grad(set_to_none=step != 2)
            for turn in range(2):
                loss = loss_of(model, 10 * turn + step)
                if step == 5 and turn == 0 and dist.get_rank() == 1:
                    loss = loss * torch.inf
                (scaler.scale(loss) if scaled else loss).backward()
            if scaled:
                scaler.unscale_(each)
        if step != 5:
            norms = [clip_grad_norm_(model.parameters(), 0.02) for model in (theirs, ours)]
            torch.testing.assert_close(norms[1], norms[0], rtol=2e-6, atol=0)
            assert norms[0] > 0.02
            norms = [
                get_total_norm([param.grad for param in m.parameters() if param.grad is not None])
                for m in (theirs, ours)
            ]
            torch.testing.assert_close(norms[1], norms[0], rtol=2e-6, atol=0)
        for model in (theirs, ours):
            clip_grad_value_(model.parameters(), 0.001)
        if step == 1:
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert (mine.grad is None) == (other.grad is None)
                if mine.grad is not None:
                    assert isinstance(mine.grad, GradientPart) and mine.grad.local.numel() < max(other.numel(), 257)
                    torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=2e-6, atol=1e-8)
        for _, each, scaler in both:
            if scaled:
                scaler.step(each)
                scaler.update()
            else:
                each.step()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        check_close(ours, theirs, opt)
    assert scalers[0].get_scale() == 2.0**9 * 2  # halved once, doubled once
    # One rank alone may look, for its log.
    for model, each in ((theirs, torch_opt), (ours, opt)):
        each.zero_grad()
        backward(model, 9)
    if dist.get_rank() == 0:
        norms = [param.grad.norm() for param in ours.parameters() if param.grad is not None]
        assert get_total_norm(norms) > 0 and all(norm.isfinite() for norm in norms)
    for _ in range(2):  # zeros are gradients: what has momentum moves on
        torch_opt.zero_grad(set_to_none=False)
        opt.zero_grad(set_to_none=False)
        torch_opt.step()
        opt.step()
    check_close(ours, theirs, opt)
    kept = ours.module.out.weight.grad
    opt.zero_grad()
    backward(ours, 3)
    with raises(StateError, "earlier backward"):
        kept.norm()


class Growing(Net):
    """May get one more layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.spare is None else x + self.spare(x)


def groups_in_mid_training(stage: int, neighbours: bool) -> None:
    """Params added, unfrozen and frozen: each rank gets them, and they count their own steps."""
    theirs, ours = Growing(), Growing()
    torch_opt = torch.optim.AdamW([{"params": list(theirs.parameters())}], **ADAMW)
    opt = ShardedAdamW(
        [{"params": list(ours.parameters())}],
        **ADAMW,
        module=ours,
        stage=stage,
        tuning=tuning(neighbours, broadcast_buffers=False),
    )
    model = wrapped(ours, broadcast_buffers=False) if neighbours else ours
    for step in range(8):
        for each, optimizer in ((theirs, torch_opt), (ours, opt)):
            if step == 2:
                torch.manual_seed(1)
                each.spare = nn.Linear(5, 5)
                optimizer.add_param_group({"params": list(each.spare.parameters()), "lr": 0.05})
            if step in (3, 6):
                each.frozen.requires_grad_(step == 3)
            if step == 5:
                each.hidden.requires_grad_(False)
        torch_opt.zero_grad()
        backward(theirs, step)
        average(theirs)
        torch_opt.step()
        train_step(model, opt, step)
        check_close(ours, theirs, opt)
    counts = [float(opt.state[param]["step"]) for param in ours.parameters()]
    assert counts == [float(torch_opt.state[param]["step"]) for param in theirs.parameters()]
    assert set(counts) == {3.0, 5.0, 6.0, 8.0}


def test_gradients_and_groups(ranks: Pool) -> None:
    for function, turn in zip((torchs_tools, groups_in_mid_training), TURNS, strict=True):
        for setting in turn:
            ranks.run(function, *setting, world=2)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(8, 5)
        self.embed = nn.Embedding(40, 8, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed((x[:, 0] * 10).long() % 40))


def refused_before_training(stage: int, neighbours: bool) -> None:
    """With an error that says what to do; the model can be trained all the same once that was done."""
    options = {"stage": stage, "tuning": tuning(neighbours)}
    model = Net()
    if stage >= 2:
        with raises(ValueError, "module", f"stage={stage}"):
            ShardedSGD(model.parameters(), **SGD, **options)
    with raises(TypeError, "module="):
        ShardedSGD(model, **SGD, module=Net(), **options)
    stranger = Parameter(torch.ones(3))
    held = None  # with the frame of the constructor in it, as a notebook keeps the last error
    try:
        ShardedSGD(
            [{"params": [model.out.weight]}, {"params": [model.out.bias, stranger]}], **SGD, module=model, **options
        )
    except BindingError as error:
        held = error
    assert held is not None and "param 1 of group 1" in str(held) and "not a param of the module" in str(held)
    loss_of(model, 0)  # nobody took it over
    # At the first forward.
    opt = ShardedSGD(model.out.parameters(), **SGD, module=model, **options)
    with raises(BindingError, "first.weight", "no param group"):
        backward(model, 0)
    assert all(param.grad is None for param in model.parameters())
    other = ShardedSGD(list(model.parameters())[1:], **SGD, module=model, **options)  # some of them are the first one's
    with raises(BindingError, "no param group" if stage == 3 else "first.weight"):
        backward(model, 0)
    del other
    gc.collect()
    rest = [param for param in model.parameters() if param not in set(model.out.parameters())]
    other = ShardedSGD([*rest, model.out.bias], **SGD, module=model, **options)
    with raises(BindingError, "another optimizer already takes the gradient", "shape (5,)"):
        backward(model, 0)
    other.close()
    opt.close()
    # DDP's own ways.
    hooked = wrapped(Net())
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for ddp, words in (
        (hooked, "communication hook"),
        (wrapped(Net(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)), "mixed_precision"),
    ):
        opt = ShardedSGD(ddp, **SGD, **options)
        with raises(BindingError, words):
            backward(ddp, 0)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ddp = wrapped(model)
    opt = ShardedSGD(ddp, **SGD, process_group=alone, **options)
    with raises(BindingError, "process_group"):
        backward(ddp, 0)
    opt.close()
    for steps in (0, 1):
        ddp = wrapped(model)
        opt = ShardedSGD(ddp, **SGD, **options)
        for step in range(steps):
            train_step(ddp, opt, step)
        with raises(BindingError, "join()", "model.parameters()"), ddp.join():
            train_step(ddp, opt, steps)
        ddp._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it on behind an exception
        opt.close()
    # And now as it should be.
    theirs, again = wrapped(Net()), ShardedSGD(model, **SGD, **options)
    with torch.no_grad():
        for mine, other in zip(model.state_dict().values(), theirs.module.state_dict().values(), strict=True):
            mine.copy_(other)
    train_step(model, again, 1)
    train_step(theirs, torch.optim.SGD([param for param in theirs.parameters() if param.requires_grad], **SGD), 1)
    with again.unsharded():
        close_to(model, theirs.module)


def refused_in_training(stage: int, neighbours: bool) -> None:
    """Nothing changes on any rank."""
    options = {"stage": stage, "tuning": tuning(neighbours)}
    # What is sparse in backward.
    for model in (Words(sparse=True), wrapped(Words(sparse=True))):
        opt = ShardedSGD(model, **SGD, **options)
        with raises(ShardoptError, "embed" if "embed" in str(opt) else "param 2", "sparse=False"):
            backward(model, 0)
        with raises(ShardoptError, "zero_grad()"):
            opt.step()
        opt.close()
        assert all(
            raw(one) == raw(other) for one, other in zip(model.parameters(), Words(True).parameters(), strict=True)
        )
    theirs, ours, torch_opt, opt = pair(stage, neighbours)
    train_step(theirs, torch_opt, 0)
    train_step(ours, opt, 0)
    small = ours.module.norm.weight  # whole at every stage
    data = small.data
    for spoil, words, which in (
        (lambda: setattr(small, "data", data.double()), "recast", (None, 1)),  # on all ranks, on one
        (lambda: setattr(small, "grad", torch.ones_like(data)), "'present' on rank 1", (1,)),  # on all it takes effect
    ):
        for odd in which:
            opt.zero_grad()
            backward(ours, 1)
            loss_of(theirs, 1)  # for its buffers
            here, small.grad = odd in (None, dist.get_rank()), None
            if here:
                spoil()
            with raises(ShardoptError if here else DisagreementError, words, "rank 1" if not here else ""):
                opt.step()
            small.grad = None
            small.data = data
            check_close(ours, theirs, opt)
    small.data = data.clone()  # the same values: taken, and no error
    train_step(theirs, torch_opt, 2)
    train_step(ours, opt, 2)
    check_close(ours, theirs, opt)


def test_refusals(ranks: Pool) -> None:
    for function, turn in zip((refused_before_training, refused_in_training), TURNS, strict=True):
        for setting in turn:
            ranks.run(function, *setting, world=2)
