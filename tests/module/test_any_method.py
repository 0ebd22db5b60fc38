"""A module that is taken over is called by any method, the first time too: it trains as torch.optim and DDP train it,
where DDP is given a forward that calls the method."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardopt import DisagreementError, ShardedAdamW
from tests.support.comparing import raw
from tests.support.modules import W, data, poisoned, small
from tests.support.ranks import Pool
from tests.support.training import raises

RATES = {"lr": 0.01, "eps": 1e-3}


class Agent(nn.Module):
    """As in PPO scripts: no forward at all. Its encoder is shared, its scale a param that a method reads."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(W, W), nn.Tanh())
        self.actor, self.critic, self.unused = nn.Linear(W, 4), nn.Linear(W, 1), nn.Linear(W, W)
        self.mix = nn.Parameter(torch.randn(W, W) / 5)

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(self.encoder(x @ self.mix))

    def get_action_and_value(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x @ self.mix)
        choice = torch.distributions.Categorical(logits=self.actor(hidden))
        return choice.log_prob(action), choice.entropy(), self.critic(hidden)


def ppo(agent: Agent, step: int) -> Tensor:
    x, action = data(step, 6, W), data(step, 6).gt(0).long()
    with torch.no_grad():
        target = agent.get_value(x).flatten() + data(step + 50, 6)
    log, entropy, value = agent.get_action_and_value(x, action)
    return (value.flatten() - target).square().mean() - log.mean() - 0.01 * entropy.mean()


def value_alone(agent: Agent, step: int) -> Tensor:
    """The actor gets no gradient; in the second step all do."""
    return ppo(agent, step) if step == 1 else agent.get_value(data(step, 6, W)).square().mean()


class Language(nn.Module):
    """As a causal language model: a body, and a head whose weight a fused loss reads."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.lm_head = nn.Linear(W, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.body(x))

    def fused_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return fused(self.body(x), self.lm_head.weight, labels)

    def tied_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Autograd saves the weight, which no call of a module needs."""
        return F.cross_entropy(self.body(x) @ self.lm_head.weight.t(), labels)

    def head_alone(self, x: Tensor, labels: Tensor) -> Tensor:
        """Calls no module."""
        return fused(x, self.lm_head.weight, labels)


class Fused(torch.autograd.Function):
    """Computes gradients in its forward, as fused losses do, from the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x @ weight.t()
        grad = (logits.softmax(1) - F.one_hot(labels, len(weight))) / len(x)
        ctx.save_for_backward(grad @ weight, grad.t() @ x)
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad * x, grad * weight, None


def fused(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return Fused.apply(x, weight, labels)


def labels(step: int) -> Tensor:
    return data(step, 6, 11).argmax(1)


def by_a_method(model: Language, step: int) -> Tensor:
    return model.fused_loss(data(step, 6, W), labels(step))


def body_then_head(model: Language, step: int) -> Tensor:
    """A step of the head alone, which calls no module; then the body is called by the script."""
    if step == 1:
        return model.body(data(step, 6, W)).square().mean()
    return model.head_alone(data(step, 6, W), labels(step)) if step == 0 else by_a_method(model, step)


def redirected(model: Language, step: int) -> Tensor:
    """As TRL: the trainer's own loss runs in place of the model's forward, and reads the head's weight."""
    forward = model.forward

    def loss(_: nn.Module, x: Tensor) -> Tensor:
        model.forward = forward
        return fused(model.body(x), model.lm_head.weight, labels(step))

    model.forward = MethodType(loss, model)
    return model(data(step, 6, W))


Loss = Callable[[Any, int], Tensor]
WAYS: tuple[tuple[type[nn.Module], Loss], ...] = (
    (Agent, ppo),
    (Agent, value_alone),
    (Language, by_a_method),
    (Language, body_then_head),
    (Language, redirected),
)


class Called(nn.Module):
    """Gives DDP a forward that calls the method."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, step: int) -> Tensor:
        return self.loss(self.model, step)


def by_torch(make: type[nn.Module], loss: Loss) -> list[Tensor]:
    model = make()
    called: nn.Module = Called(model, loss)
    if dist.get_world_size() > 1:
        called = DistributedDataParallel(called, find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), **RATES)
    for step in range(3):
        opt.zero_grad()
        called(step).backward()
        opt.step()
    return [param.detach() for param in model.parameters()]


def by_shardopt(make: type[nn.Module], loss: Loss, stage: int, wraps: bool, **others: Any) -> list[Tensor]:
    model = make(seed=dist.get_rank() if loss is by_a_method and not wraps else 0)  # bound ahead of what it computes
    whole = DistributedDataParallel(model) if wraps and dist.get_world_size() > 1 else model
    opt = ShardedAdamW(whole, **RATES, stage=stage, **{"tuning": small(timeout=60), **others})
    for step in range(3):
        opt.zero_grad()
        loss(model, step).backward()
        opt.step()
    with opt.unsharded():
        found = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return found


def all_ways() -> None:
    messages = {"tuning": small(timeout=60, neighbours=False, live_bytes=None)}
    for make, loss in WAYS:
        expected = by_torch(make, loss)
        for stage in (1, 2, 3):
            for others in ({}, *{1: [{"release_gradients": True}], 2: [], 3: [messages]}[stage]):
                found = by_shardopt(make, loss, stage, wraps=stage == 2, **others)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(
                        one, other, atol=2e-5, rtol=1e-4, msg=f"{loss.__name__}, {stage}, {others}"
                    )


def test_any_method(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(all_ways, world=world)


def accumulates(stage: int, method: bool) -> list[bytes]:
    """no_sync() alone defers, whatever the forward was; a forward of the whole between."""
    model = Language()
    opt = ShardedAdamW(model, **RATES, stage=stage, tuning=small(timeout=60))

    def loss(step: int) -> Tensor:
        x = data(step, 6, W)
        return by_a_method(model, step) if method else fused(model.body(x), model.lm_head.weight, labels(step))

    for step in range(3):
        opt.zero_grad()
        with opt.no_sync():
            # A backward through a call of the head comes to its end before the weight that a method read is needed.
            waiting = model.tied_loss(data(20 + step, 6, W), labels(step))
            model.lm_head(data(30 + step, 6, W)).square().mean().backward()
            waiting.backward()
            loss(10 * step).backward()
            if step == 1:
                model(data(step, 6, W)).square().mean().backward()
        if step == 2:
            model(data(step, 6, W)).square().mean().backward()
            with opt.no_sync():
                loss(step).backward()
        loss(10 * step + 1).backward()
        opt.step()
    with opt.unsharded():
        found = [raw(param) for param in model.parameters()]
    opt.close()
    return found


def defers() -> None:
    assert accumulates(1, method=True) == accumulates(1, method=False)
    whole = accumulates(1, method=True)
    for stage in (2, 3):
        with poisoned():
            parts = accumulates(stage, method=True)
        for both in zip(parts, whole, strict=True):
            torch.testing.assert_close(*(torch.frombuffer(bytearray(each), dtype=torch.float32) for each in both))


def differs() -> None:
    """A backward that binds can give no rank other values: ranks that differ are told so, and nothing has changed."""
    model = Language(seed=dist.get_rank())
    before = [raw(param) for param in model.parameters()]
    opt = ShardedAdamW(model, **RATES, stage=2, tuning=small(timeout=60))
    with raises(DisagreementError, "optimizer.bind() before the first forward", "body.0.weight"):
        model.head_alone(data(0, 6, W), labels(0)).backward()
    assert [raw(param) for param in model.parameters()] == before
    opt.zero_grad()
    opt.bind()
    model.head_alone(data(0, 6, W), labels(0)).backward()
    opt.step()
    opt.close()


def test_what_ranks_do_apart(ranks: Pool) -> None:
    ranks.run(defers, world=2)
    ranks.run(differs, world=2)
