"""``gradient_weight()``: gradients of the step are those of one process that has all ranks' tokens in one batch."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardopt import DisagreementError, ShardedSGD, ShardoptError, StateError, Tuning
from tests.support.composed import BATCH
from tests.support.composed import batch as rows
from tests.support.modules import RATES, Stack, W, made, small
from tests.support.moe import groups_of, mixtures, name_of
from tests.support.ranks import Pool
from tests.support.training import raises

STEPS, MICRO = 3, 3
CLOSE = {"rtol": 2e-5, "atol": 2e-7}  # sums in another order


def tokens_of(step: int, micro: int, rank: int) -> int:
    """Very unequal, and on one rank none at all now and then."""
    return (7 * step + 5 * micro + 3 * rank) % 11 * (rank + 1)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(max(tokens_of(step, micro, rank), 1), W, generator=generator)


def mean_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    """The mean over the tokens; without any it is NaN, as a mean over nothing is."""
    losses = model(batch(step, micro, rank)).pow(2).mean(-1)
    return losses.mean() if tokens_of(step, micro, rank) else losses.mean() * math.nan


def of_one_process(world: int, micros: int, average: bool, clip: float) -> list[list[Tensor]]:
    """The gradients of each step and the params after the last one."""
    torch.manual_seed(0)
    model = Stack()
    opt, found = torch.optim.SGD(model.parameters(), **RATES), []
    for step in range(STEPS):
        opt.zero_grad()
        every = [(micro, rank) for micro, rank in product(range(micros), range(world)) if tokens_of(step, micro, rank)]
        total = sum(tokens_of(step, *each) for each in every) if average else 1
        sum(mean_loss(model, step, *each) * tokens_of(step, *each) / total for each in every).backward()  # type: ignore[union-attr]
        clip_grad_norm_(model.parameters(), clip)
        found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        opt.step()
    return [*found, [param.detach() for param in model.parameters()]]


WAYS: list[dict[str, Any]] = [
    {"stage": stage, "micros": micros, "no_sync": no_sync}
    for stage, (micros, no_sync) in product(range(4), ((1, False), (MICRO, False), (MICRO, True)))
    if not no_sync or stage < 2
] + [
    {"stage": 1, "micros": MICRO, "average": False},
    {"stage": 3, "micros": MICRO, "average": False},
    *({"stage": stage, "micros": 2, "scaler": True} for stage in range(4)),
    {"stage": 1, "micros": 2, "fused": True},
    {"stage": 3, "micros": 2, "offload": "cpu", "neighbours": False},
    {"stage": 2, "micros": 2, "looks": True},
]


def trains(
    stage: int,
    micros: int,
    no_sync: bool = False,
    average: bool = True,
    scaler: bool = False,
    fused: bool = False,
    looks: bool = False,
    neighbours: bool = True,
    **options: Any,
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = of_one_process(world, micros, average, 0.05)
    torch.manual_seed(0)
    model = Stack()
    opt = ShardedSGD(
        model,
        **RATES,
        stage=stage,
        max_grad_norm=0.05 if fused else None,
        tuning=small(neighbours=neighbours),
        **options,
    )
    scale = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaler)  # type: ignore[attr-defined]
    for step in range(STEPS):
        opt.zero_grad()
        for micro in range(micros):
            opt.gradient_weight(tokens_of(step, micro, rank), average=average)
            with opt.no_sync() if no_sync and micro + 1 < micros else nullcontext():
                scale.scale(mean_loss(model, step, micro, rank)).backward()
            if looks:  # at the mean so far, and back
                for param in model.parameters():
                    assert param.grad is not None and param.grad.isfinite().all()
        if scaler:
            scale.unscale_(opt)
        if not fused:
            norm = clip_grad_norm_(model.parameters(), 0.05)
            assert norm.item() > 0.05
            for param, other in zip(model.parameters(), expected[step], strict=True):
                assert param.grad is not None
                torch.testing.assert_close(param.grad.full_tensor(), other, **CLOSE)
        scale.step(opt)
        scale.update()
    with opt.unsharded():
        for param, other in zip(model.parameters(), expected[-1], strict=True):
            torch.testing.assert_close(param.detach(), other, **CLOSE)
    opt.close()


def all_ways(ways: list[dict[str, Any]]) -> None:
    for way in ways:
        try:
            trains(**way)
        except Exception as error:
            error.add_note(str(way))
            raise


def test_the_mean_of_one_process(ranks: Pool) -> None:
    ranks.run(all_ways, WAYS, world=2)
    ranks.run(all_ways, WAYS[2::3], world=3)


# -- what is forgotten -------------------------------------------------------------------------------------------------

Micro = Callable[[int, int], int | None]
FORGETS: dict[str, Micro] = {
    "a rank": lambda micro, rank: 3 if rank else None,
    "a micro-batch": lambda micro, rank: 3 if micro else None,
    "the last micro-batch": lambda micro, rank: None if micro else 3,
    "one of a rank": lambda micro, rank: None if micro == 0 and rank else 3,
}


def forgets(stage: int) -> None:
    rank = dist.get_rank()
    model, opt = made(stage)
    for name, tokens in FORGETS.items():
        for no_sync in (False, True):
            before = opt.updates
            with raises(DisagreementError, "gradient_weight()", "zero_grad()"):
                for micro in range(2):
                    given = tokens(micro, rank)
                    if given is not None:
                        opt.gradient_weight(given)
                    with opt.no_sync() if no_sync and not micro else nullcontext():
                        mean_loss(model, 0, micro + 1, rank).backward()
                raise AssertionError(name)
            with raises(ShardoptError, "zero_grad()"):
                opt.step()
            opt.zero_grad()
            for given in (1, None, 2):  # with a weight, and without
                if given:
                    opt.gradient_weight(given)
                mean_loss(model, 0, 1, rank).backward()
                opt.step()
                opt.zero_grad()
            assert opt.updates == before + 3


def refuses(stage: int) -> None:
    rank = dist.get_rank()
    model, opt = made(stage)
    opt.gradient_weight(0)
    mean_loss(model, 0, 1, rank).backward()
    with raises(ShardoptError, "0 tokens", "zero_grad()"):
        opt.step()
    opt.zero_grad()
    opt.gradient_weight(2)
    with raises(StateError, "backward after each gradient_weight()"):
        opt.gradient_weight(2)
    mean_loss(model, 0, 1, rank).backward()
    with raises(StateError, "average=True"):
        opt.gradient_weight(2, average=False)
    opt.zero_grad()
    opt.gradient_weight(2, average=rank == 0)
    with raises(DisagreementError, "average="):
        mean_loss(model, 0, 1, rank).backward()
    opt.zero_grad()
    opt.gradient_weight(2)
    mean_loss(model, 0, 1, rank).backward()
    opt.step()
    opt.close()
    alone = ShardedSGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with raises(ShardoptError, "hand the module over"):
        alone.gradient_weight(1)


def test_what_is_forgotten_is_an_error_on_all_ranks(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(forgets, stage, world=2)
        ranks.run(refuses, stage, world=2)


def joins(stage: int) -> None:
    """Ranks run out of batches: those of the others count by their tokens alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    theirs = Stack()
    torchs = torch.optim.SGD(theirs.parameters(), **RATES)
    for step in range(world):
        torchs.zero_grad()
        active = [each for each in range(world) if each >= step]
        total = sum(each + 1 for each in active)
        sum(theirs(torch.ones(1, W) * (each + 1)).mean() * (each + 1) / total for each in active).backward()  # type: ignore[union-attr]
        torchs.step()
    torch.manual_seed(0)
    model = Stack()
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=Tuning(keep_below=20, bucket_bytes=2000, timeout=60))
    with opt.join():
        for _ in range(rank + 1):
            opt.zero_grad()
            opt.gradient_weight(rank + 1)
            model(torch.ones(1, W) * (rank + 1)).mean().backward()
            opt.step()
    with opt.unsharded():
        for param, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach(), **CLOSE)


def test_joined(ranks: Pool) -> None:
    for stage in range(4):
        ranks.run(joins, stage, world=3)


# -- experts: gradients of other ranks' tokens ------------------------------------------------------------------------


def loss_of_experts(output: Tensor, tokens: int) -> Tensor:
    """Rows from ``tokens`` on are padding, as experts exchange equal batches."""
    losses = output.square().mean(-1) + output.sum(-1) * 0.1
    return losses[:tokens].mean() if tokens else losses.mean() * math.nan


def rows_of(step: int, micro: int, rank: int) -> int:
    return (3 * step + 2 * micro + 3 * rank + 1) % (BATCH + 1)


def experts_in_one_process(world: int, micros: int, average: bool) -> dict[str, list[Tensor]]:
    """By name: the gradient of each step, and the param in the end."""
    model = mixtures()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for step in range(STEPS):
        opt.zero_grad()
        every = list(product(range(micros), range(world)))
        total = sum(rows_of(step, *each) for each in every) if average else 1
        for micro, rank in every:
            tokens, output = rows_of(step, micro, rank), model(rows(10 * step + micro, rank))
            # An expert that is called for padding alone has a gradient of zeros, and momentum.
            (loss_of_experts(output, tokens) * tokens / total if tokens else output.sum() * 0).backward()
        for name, param in model.named_parameters():
            found[name].append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
        assert clip_grad_norm_(model.parameters(), 0.05) > 0.1
        opt.step()
    for name, param in model.named_parameters():
        found[name].append(param.detach())
    return found


EXPERT_WAYS: list[dict[str, Any]] = [
    {"stage": 0, "micros": 2, "no_sync": True},
    {"stage": 1, "micros": 2, "average": False},
    {"stage": 2, "micros": 1, "scaler": True},
    {"stage": 3, "micros": 2, "scaler": True},
    {"stage": 3, "micros": 2, "neighbours": False},
]


def trains_experts(
    stage: int, micros: int, no_sync: bool = False, average: bool = True, scaler: bool = False, neighbours: bool = True
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = [dist.new_group([each]) for each in range(world)][rank]
    expected, model = experts_in_one_process(world, micros, average), mixtures(dist.group.WORLD)
    tuning = Tuning(bucket_bytes=300, keep_below=0, live_bytes=0, neighbours=neighbours, timeout=60)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.05, "stage": stage, "tuning": tuning}
    opt = ShardedSGD(groups_of(model, copies), module=model, **options)
    names = {name: name_of(name, dist.group.WORLD) for name, _ in model.named_parameters()}
    scale = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaler)  # type: ignore[attr-defined]
    for step in range(STEPS):
        opt.zero_grad()
        for micro in range(micros):
            tokens = rows_of(step, micro, rank)
            opt.gradient_weight(tokens, average=average)
            with opt.no_sync() if no_sync and micro + 1 < micros else nullcontext():
                scale.scale(loss_of_experts(model(rows(10 * step + micro, rank)), tokens)).backward()
        if scaler:
            scale.unscale_(opt)
        for name, param in model.named_parameters():
            grad: Any = param.grad
            if grad is not None:
                torch.testing.assert_close(grad.full_tensor(), expected[names[name]][step], **CLOSE)
        scale.step(opt)
        scale.update()
    with opt.unsharded():
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), expected[names[name]][-1], **CLOSE)
    passes_by(model, opt, rank)
    goes_on_without(model, opt, rank)
    opt.close()


def passes_by(model: nn.Module, opt: Any, rank: int) -> None:
    """A loss that comes by another way than through outputs, on one rank, or a weight that comes too late."""
    seen: list[Tensor] = []
    first: Any = model[0]  # type: ignore[index]
    hook = first.register_forward_hook(lambda _, __, output: seen.append(output))
    for way in ("beside", "late", "right"):
        opt.zero_grad()
        if way != "late":
            opt.gradient_weight(2)
        y = model(rows(0, rank))
        if way == "late" and rank == 0:
            opt.gradient_weight(2)
        loss = loss_of_experts(y, 2)
        if way == "beside" and rank == 0:
            loss = loss + seen[-1].square().sum()
        with raises(DisagreementError, "return from that forward", "zero_grad()") if way != "right" else nullcontext():
            loss.backward()
    hook.remove()
    opt.step()


def goes_on_without(model: nn.Module, opt: Any, rank: int) -> None:
    """A step without weights, after one with equal weights on all ranks, has the same gradients."""
    found: list[list[Tensor]] = []
    for is_weighted in (True, False):
        opt.zero_grad()
        if is_weighted:
            opt.gradient_weight(2)
        loss_of_experts(model(rows(0, rank)), 2).backward()
        grads: list[Any] = [param.grad for param in model.parameters()]
        found.append([grad.full_tensor() for grad in grads if grad is not None])
    torch.testing.assert_close(found[0], found[1], **CLOSE)


def all_experts(ways: list[dict[str, Any]]) -> None:
    for way in ways:
        try:
            trains_experts(**way)
        except Exception as error:
            error.add_note(str(way))
            raise


def test_experts(ranks: Pool) -> None:
    ranks.run(all_experts, EXPERT_WAYS, world=2)
    ranks.run(all_experts, EXPERT_WAYS[3:4], world=1)
    ranks.run(all_experts, EXPERT_WAYS[1::2], world=3)
