"""What begins a round of reduction, what must not, and what happens to gradients between rounds."""

import copy
import gc
import io
import warnings
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardopt import (
    BindingError,
    CommunicationError,
    DisagreementError,
    ReleasedError,
    ShardedSGD,
    ShardoptError,
    StateError,
    Tuning,
)
from shardopt.partition.reducer import Reducer
from tests.module.test_handover import (
    SGD,
    Net,
    average,
    backward,
    check_close,
    loss_of,
    pair,
    train_step,
    tuning,
    whole,
)
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import close_to, raises


def own_gradient_beside_a_part(neighbours: bool) -> None:
    """A backward under no_sync() behind a reduced one: used together, dropped together, never one without the other."""
    theirs, ours, torch_opt, opt = pair(1, neighbours)
    for step in range(4):
        for model, each in ((theirs, torch_opt), (ours, opt)):
            each.zero_grad()
            backward(model, step)
            with model.no_sync():
                backward(model, 10 + step)
                backward(model, 20 + step)
        params = list(ours.module.parameters())
        if step == 0:  # reduced with the next one
            for model in (theirs, ours):
                backward(model, 30)
        elif step == 1:
            grads = [param.grad for param in params if param.grad is not None]
            for spoil in (
                lambda grads: clip_grad_norm_(params, 1.0),  # noqa: B023
                lambda grads: grads[0].mul_(0.5),
                lambda grads: grads[0].local,
                lambda grads: torch._foreach_mul_(grads, 0.5),
            ):
                with raises(StateError, "no_sync()"):
                    spoil(grads)
            with raises(ShardoptError, "no_sync()"):
                opt.step()
            for model in (theirs, ours):
                backward(model, 30)
        elif step == 2:  # zeroed through the module, which knows no optimizer
            for model in (theirs, ours):
                model.zero_grad(set_to_none=False)
                backward(model, 31)
        else:  # the reduced part is given up
            for model in (theirs, ours):
                model.zero_grad(set_to_none=True)
                backward(model, 32)
        torch_opt.step()
        opt.step()
        check_close(ours, theirs, opt)


def no_round(stage: int, neighbours: bool) -> None:
    """torch.autograd.grad() accumulates nothing: one rank alone may ask. backward(inputs=...) accumulates some."""
    theirs, ours, torch_opt, opt = pair(stage, neighbours)
    for step in range(3):
        for model, each in ((theirs, torch_opt), (ours, opt)):
            each.zero_grad()
            if model is ours and step and dist.get_rank() == 1 and stage < 3:
                x = torch.ones(4, 6, requires_grad=True)
                model.eval()
                (grad,) = torch.autograd.grad(model.module(x).sum(), x)
                assert grad.shape == x.shape and not opt.engine.takeover.rounds.is_open
                model.train()
            backward(model, step)
            each.step()
    check_close(ours, theirs, opt)
    for model in (theirs, ours):
        model.zero_grad()
    loss_of(ours, 5).backward(inputs=[ours.module.out.bias])
    with theirs.no_sync():
        loss_of(theirs, 5).backward(inputs=[theirs.module.out.bias])
    average(theirs.module)
    opt.step()
    torch_opt.step()
    check_close(ours, theirs, opt)


def files_and_copies(stage: int) -> None:
    """A copy or a file of the module holds no hook of the optimizer's, and trains by itself."""
    model = Net()
    opt = ShardedSGD(model, **SGD, stage=stage, tuning=tuning(True))
    train_step(model, opt, 0)
    file = io.BytesIO()
    with opt.unsharded():
        torch.save(model, file)
        copied = copy.deepcopy(model)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copied):
        with opt.unsharded():
            close_to(other, model)
        backward(other, 1)
        grads = [param.grad for param in other.parameters() if param.requires_grad]
        assert all(type(grad) is Tensor for grad in grads)
    train_step(model, opt, 1)
    opt.close()


def graphs_of_before_close(stage: int) -> None:
    model, reference = Net(), Net()
    opt = ShardedSGD(model, **SGD, stage=stage, tuning=tuning(True))
    train_step(model, opt, 0)
    with opt.unsharded():
        reference.load_state_dict(model.state_dict())
    loss = loss_of(model, 1)
    opt.close()
    if stage == 3:
        with raises(ReleasedError, "close()"):
            loss.backward()
    else:
        loss.backward()
        backward(reference, 1)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


def dropped_with_params() -> None:
    model = Net()
    opt = ShardedSGD(model, **SGD, stage=3, tuning=tuning(True))
    train_step(model, opt, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del opt
        gc.collect()
    assert any("close()" in str(each.message) for each in caught)


def wrong_on_one_rank(stage: int) -> None:
    """All hear of it before any waits for another one's values."""
    rank, model = dist.get_rank(), Net()
    opt = ShardedSGD(model, **SGD, stage=stage, tuning=tuning(True))
    if rank == 1:
        model.extra = nn.Parameter(torch.ones(3))  # trainable, and nobody's
    with raises(BindingError if rank == 1 else DisagreementError, "extra"):
        backward(model, 0)
    if rank == 1:
        del model.extra
        model.register_buffer("extra", torch.ones(3))
    with raises(DisagreementError, "extra"):
        backward(model, 0)
    if rank == 1:
        del model.extra
    train_step(model, opt, 0)
    opt.close()


class Meeting(torch.autograd.Function):
    """A collective of the model's own in backward, as SyncBatchNorm has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad := grad.clone())
        return grad / dist.get_world_size()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 4:
                x = Meeting.apply(x)
            if number != skipped:
                x = layer(x)
        return x


def collective_in_backward(frozen: bool) -> None:
    """One rank lacks the param that a bucket waits for, so nobody gets memory back before the model's own meeting."""
    rank, models = dist.get_rank(), (Deep(), Deep())
    torch_opt = torch.optim.SGD(models[0].parameters(), **SGD)
    opt = ShardedSGD(models[1], **SGD, stage=2, tuning=tuning(True))
    for step in range(3):
        x = torch.full((2, 16), 0.1 * (rank + step + 1))
        started = []
        for model, each in zip(models, (torch_opt, opt), strict=True):
            each.zero_grad()
            if frozen and step == 2:
                model.layers[11].requires_grad_(False)
            loss = model(x, -1 if frozen else (0, 11)[rank]).square().mean()
            if model is models[1]:
                reducer = opt.engine.domain.reducer
                assert isinstance(reducer, Reducer)
                watched = model.layers[3].weight.register_post_accumulate_grad_hook(
                    lambda _, reducer=reducer, started=started: started.append(reducer._started)
                )
            loss.backward()
            if model is models[0]:
                for param in model.parameters():
                    if param.requires_grad and param.grad is None:
                        param.grad = torch.zeros_like(param)
                average(model)
            else:
                watched.remove()
            each.step()
        close_to(models[1], models[0])
        # What was frozen holds nobody up.
        assert step == 0 or started[0] > 0 or not frozen


class Unlucky(Exception):
    pass


def unlucky(*_: Any) -> None:
    raise Unlucky


def zeroes_late(stage: int, zeroed: str, fails: bool) -> None:
    """Rank 0 gives a batch up and is at the next one before rank 1 comes to it. Both go on at the same batch.

    Each rank keeps its buffers: shared, they hold rank 0's forward until rank 1 comes to its own, as under DDP.

    Args:
        zeroed: when rank 1 calls zero_grad(): "before" or "after" its forward.
        fails: rank 1's forward of this batch raises, too.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model, reference = Net(), Net()
    opt, torch_opt = (
        ShardedSGD(model, **SGD, stage=stage, tuning=tuning(True, broadcast_buffers=False)),
        torch.optim.SGD(reference.parameters(), **SGD),
    )
    train_step(model, opt, 0)
    if rank == 0:
        opt.zero_grad()
        loss = loss_of(model, 1)
        with model.out.bias.register_hook(unlucky), raises(Unlucky):
            loss.backward()
        opt.zero_grad()
        store.set("given up", "")
    else:
        if zeroed == "before":
            store.wait(["given up"])
            opt.zero_grad()
        if fails:
            with model.out.register_forward_pre_hook(unlucky), raises(Unlucky):
                loss_of(model, 1)
        else:
            loss = loss_of(model, 1)
            if zeroed == "after":
                store.wait(["given up"])
                opt.zero_grad()
            with raises(CommunicationError, "rank 0 gave up this backward"):
                loss.backward()
        opt.zero_grad()
    dist.barrier()
    for step in (2, 3):
        train_step(model, opt, step)
    for step in (0, 2, 3):
        torch_opt.zero_grad()
        backward(reference, step)
        average(reference)
        torch_opt.step()
    with whole(opt):  # buffers saw the other batch, too
        close_to(model, reference)


def test_ranks_give_up_in_their_own_time(ranks: Pool) -> None:
    for stage in (1, 3):
        for zeroed, fails in (("before", False), ("after", False), ("before", True)):
            ranks.run(zeroes_late, stage, zeroed, fails, world=2, timeout=60)


def test_rounds(ranks: Pool) -> None:
    for neighbours in (True, False):
        ranks.run(own_gradient_beside_a_part, neighbours, world=2)
        for stage in (1, 3):
            ranks.run(no_round, stage, neighbours, world=2)
    for frozen in (False, True):
        ranks.run(collective_in_backward, frozen, world=2)


def test_copies_and_ends(ranks: Pool) -> None:
    for stage in (1, 2, 3):
        ranks.run(files_and_copies, stage, world=2)
        ranks.run(graphs_of_before_close, stage, world=2)
        ranks.run(wrong_on_one_rank, stage, world=2)
    ranks.run(dropped_with_params, world=2)


class Squares(nn.Module):
    """Two params, whose gradients are buckets as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(256) for _ in range(2))

    def forward(self) -> Tensor:
        return sum((param * param).sum() for param in self.params)  # type: ignore[return-value]


class Stream:
    """Takes the place of a CUDA stream."""

    def __init__(self) -> None:
        self.awaited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.awaited.append(event)


class Event:
    """Takes the place of torch.cuda.Event."""

    def record(self, stream: Stream) -> None:
        self.stream = stream


def test_a_sum_is_added_to_once_it_is_restored() -> None:
    """On GPUs a round begins on the stream of its first gradient; the others' streams wait for what happens there."""
    model = Squares()
    optimizer = ShardedSGD(model, lr=0.1, stage=2, tuning=Tuning(bucket_bytes=1))
    model().backward()
    domain = optimizer.engine.domain
    assert domain is not None and domain.reducer is not None and len(domain.reducer.buckets) == 2
    for bucket in domain.reducer.buckets:
        bucket.device = torch.device("cuda", 1)
    streams = [Stream(), *(Stream() for _ in model.params)]
    current = streams[:1]
    for param, stream in zip(model.params, streams[1:], strict=True):
        param.register_hook(lambda _, stream=stream: current.__setitem__(0, stream))
    with (
        patch("torch.cuda.current_stream", lambda device: current[0]),
        patch("torch._C._cuda_getCurrentRawStream", lambda index: id(current[0]), create=True),
        patch("torch.cuda.Event", Event),
    ):
        model().backward()
    awaited = [stream.awaited for stream in streams]
    (event,) = {event for each in awaited for event in each}
    assert all(event in stream.awaited for stream in streams[1:] if stream is not event.stream)
    assert event not in event.stream.awaited
    optimizer.close()


def test_a_hook_that_drops_a_gradient_is_told() -> None:
    """The gradient of a param that fills its bucket is delivered at once, after the script's own hooks."""
    layer = nn.Linear(32, 32)
    opt = ShardedSGD(layer, lr=0.1, stage=2, tuning=Tuning(bucket_bytes=64))
    layer.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    before = raw(layer.weight)
    with raises(ShardoptError, "remove a hook that sets param.grad to None", "was gone before it was reduced"):
        layer(torch.ones(1, 32)).sum().backward()
    assert raw(layer.weight) == before
    opt.close()
