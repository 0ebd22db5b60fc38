"""Promise: DDP reduces again after an optimizer ended, whatever was frozen then; ``unsharded()`` may come first."""

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import DisagreementError, ShardedAdamW, ShardedSGD, ShardoptError
from shardopt.module.ddp import RetiredReducer, ReturningReducer
from tests.support.comparing import raw, snapshot
from tests.support.modules import RATES, W, data, made, plain, small, train_step
from tests.support.ranks import Pool
from tests.support.training import raises


def reduces_again(closes: bool) -> None:
    """All params are frozen when the optimizer ends; some train later."""
    inner = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Linear(W, W))
    model = DistributedDataParallel(inner)
    opt = ShardedSGD(model, **RATES, stage=2)
    model(data(0, 4, W)).sum().backward()
    opt.step()
    opt.zero_grad()
    inner.requires_grad_(False)
    if closes:
        opt.close()
    del opt
    gc.collect()
    assert isinstance(model.reducer, ReturningReducer)
    x = data(1, 4, W).requires_grad_()
    model(x).sum().backward()  # as the generator's loss goes through the other half of a GAN
    assert x.grad is not None and isinstance(model.reducer, ReturningReducer)
    inner[2].requires_grad_(True)
    with model.no_sync():
        model(data(2, 4, W)).sum().backward()
    model(data(3, 4, W)).sum().backward()
    grads = [torch.empty(W, W) for _ in range(2)]
    dist.all_gather(grads, inner[2].weight.grad)
    assert torch.equal(*grads) and grads[0].any() and inner[0].weight.grad is None
    again = ShardedSGD(inner[2].parameters(), **RATES, module=model, stage=2)
    before = raw(inner[2].weight)
    model(data(4, 4, W)).sum().backward()
    again.step()
    assert raw(inner[2].weight) != before
    again.close()


def test_ddp_reduces_again(ranks: Pool) -> None:
    ranks.run(reduces_again, True, world=2)
    ranks.run(reduces_again, False, world=2)


def binds_where_it_shows() -> None:
    """The first forward runs within ``unsharded()``."""
    model, opt = made()
    with opt.unsharded():
        plain(model, 0)
        model.first.weight.detach().clone()
        opt.zero_grad()
    train_step(model, opt, 0)
    plainly, other = made()
    train_step(plainly, other, 0)
    assert snapshot(model, opt) == snapshot(plainly, other)
    with torch.device("meta"):
        model = nn.Linear(W, W)
    opt = ShardedAdamW(model, stage=3, tuning=small())
    with raises(ShardoptError, "bind()"), opt.unsharded():
        pass


def steps_inside(stage: int) -> list[torch.Tensor]:
    """Lookahead, as timm and pytorch_optimizer write it, reads and writes params after the step that it wraps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
    opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), **RATES)
    if stage:
        opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
    slow: dict[nn.Parameter, torch.Tensor] = {}
    x = torch.randn(4, W, generator=torch.Generator().manual_seed(1))  # of all ranks
    for step in range(5):
        opt.zero_grad()
        model(x).square().mean().backward()
        if isinstance(opt, ShardedSGD):
            with opt.unsharded(), opt.unsharded():
                lookahead(opt, model, slow, step)
        else:
            lookahead(opt, model, slow, step)
    if isinstance(opt, ShardedSGD):
        with opt.unsharded():
            return [param.detach().clone() for param in model.parameters()]
    return [param.detach() for param in model.parameters()]


@torch.no_grad()
def lookahead(opt: torch.optim.Optimizer, model: nn.Module, slow: dict[nn.Parameter, torch.Tensor], step: int) -> None:
    if step == 3:
        model[0].weight.mul_(0.5)  # before the step too
    if not slow:
        slow.update({param: param.clone() for param in model.parameters()})
    viewed = model[0].bias.data
    opt.step()
    assert torch.equal(viewed, model[0].bias)
    if step % 2:
        for param, kept in slow.items():
            kept.add_(param - kept, alpha=0.5)
            param.copy_(kept)


def some_ranks_inside() -> None:
    model, opt = made()
    train_step(model, opt, 0)
    before = snapshot(model, opt)
    opt.zero_grad()
    plain(model, 1)
    context = opt.unsharded()
    with context, raises(DisagreementError, "step() in unsharded()"):
        if dist.get_rank():
            opt.engine.domain.gatherer.here.unsharded_contexts -= 1
        try:
            opt.step()
        finally:
            if dist.get_rank():
                opt.engine.domain.gatherer.here.unsharded_contexts += 1
    assert snapshot(model, opt) == before
    opt.step()


def test_unsharded_first(ranks: Pool) -> None:
    ranks.run(binds_where_it_shows, world=2)


def test_step_inside(ranks: Pool) -> None:
    plainly = ranks.run(steps_inside, 0, world=1)[0]
    for world in (1, 2, 3):
        replicated = ranks.run(steps_inside, 1, world=world)[0]
        torch.testing.assert_close(replicated, plainly, rtol=1e-6, atol=1e-7)
        for found in ranks.run(steps_inside, 3, world=world):
            assert list(map(raw, found)) == list(map(raw, replicated))
    ranks.run(some_ranks_inside, world=2)


def compiled_around_ddp(stage: int) -> None:
    """The optimizer finds the DDP module that torch.compile's wrapper holds."""
    found = []
    for wrap in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W)))
        model = wrap(ddp)
        opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
        with warnings.catch_warnings(action="ignore"):  # Dynamo reads ``grad`` of what it traces, and warns of itself
            for step in range(2):
                train_step(model, opt, step)
        assert isinstance(ddp.reducer, RetiredReducer)
        found.append(snapshot(ddp.module, opt))
    assert found[0] == found[1]


@pytest.mark.slow
def test_compiled_around_ddp(ranks: Pool) -> None:
    for stage in (1, 2, 3):
        ranks.run(compiled_around_ddp, stage, world=2)
