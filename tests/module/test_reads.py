"""Stage 3 takes models as people write them: params that are read outside of their own module's call train to the bits
of stage 1, gradients of inputs too. Memory that was given back is NaN."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shardopt import ReleasedError, ShardedSGD, ShardoptError
from tests.support.comparing import raw, snapshot
from tests.support.modules import RATES, W, data, nothing_left, poisoned, small, square
from tests.support.ranks import Pool
from tests.support.training import raises


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(W, W), nn.LayerNorm(W)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """A head that is never called, between blocks; what reads it is said by ``head``."""

    def __init__(self, head: Callable[["Model", Tensor], Tensor], **others: Any) -> None:
        super().__init__()
        self.first, self.layers, self.lm_head = (
            nn.Linear(W, W),
            nn.ModuleList(Layer() for _ in range(2)),
            nn.Linear(W, 2 * W),
        )
        for name, module in others.items():
            setattr(self, name, module)
        self.head = head

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, self.body(x))

    def encode(self, x: Tensor) -> Tensor:
        """Another method than forward: its own reads, and calls of modules."""
        return torch.tanh(self.body(x) @ self.lm_head.weight.t())


def by_function(model: Model, x: Tensor) -> Tensor:
    return F.linear(x, model.lm_head.weight, model.lm_head.bias)


def by_a_view(model: Model, x: Tensor) -> Tensor:
    """The view outlives the read; what backward saves is the view."""
    turned = model.lm_head.weight.t()
    return torch.sigmoid(x @ turned) @ turned.t() @ turned


def by_detach(model: Model, x: Tensor) -> Tensor:
    return x @ model.lm_head.weight.detach().t() + F.linear(x, model.lm_head.weight) * model.lm_head.weight.data.norm()


def before_and_after(model: Model, x: Tensor) -> Tensor:
    """Read early and late, with other units in between."""
    y = F.linear(x, model.lm_head.weight)
    for layer in model.layers:
        y = y + F.linear(layer(x), model.lm_head.weight)
    return y


def in_chunks(model: Model, x: Tensor) -> Tensor:
    """A fused loss: another number of chunks on each rank, each of them computed again in backward."""
    chunks = x.flatten(0, -2).chunk(2 + dist.get_rank())
    return torch.cat([checkpoint(by_function, model, chunk, use_reentrant=False) for chunk in chunks])


def of_a_sibling(model: Model, x: Tensor) -> Tensor:
    """A block reads the weight of the block beside it."""
    model.layers[0].other = [model.layers[1]]  # in a list, so that it is no child
    return model.layers[0](x) @ model.layers[1].linear.weight


class Reader(nn.Module):
    """Is called for its own weight, and reads that of another module meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = square(), list[nn.Module]()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.own @ self.other[0].weight.t()


def by_a_sibling(model: Model, x: Tensor) -> Tensor:
    model.reader.other = [model.lm_head]
    return model.reader(x)


class Multiply(torch.autograd.Function):
    """``__torch_function__`` does not see it read its weight: when it is applied, and again in its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def by_a_function_of_autograd(model: Model, x: Tensor) -> Tensor:
    return Multiply.apply(x, model.lm_head.weight)


class Lists(nn.Module):
    """Params in containers, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(square() for _ in range(3))
        self.named = nn.ParameterDict({"a": square(), "b": square()})

    def forward(self, x: Tensor) -> Tensor:
        for each in self.many:
            x = torch.tanh(x @ each)
        return x @ self.named["a"] + x @ self.named["b"]


class Adapter(nn.Module):
    """As DoRA: takes the norm of a weight that it adapts, of a module that it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(W, W), nn.Linear(W, 4, bias=False), nn.Linear(4, W, bias=False)
        self.magnitude = Parameter(torch.ones(W))

    def forward(self, x: Tensor) -> Tensor:
        norm = (self.base.weight + self.b.weight @ self.a.weight).norm(dim=1).detach()
        return self.magnitude / norm * (self.base(x) + self.b(self.a(x)))


def called(name: str) -> Callable[[Model, Tensor], Tensor]:
    return lambda model, x: getattr(model, name)(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        read.__name__: lambda read=read: Model(read)
        for read in (
            by_function,
            by_a_view,
            by_detach,
            before_and_after,
            in_chunks,
            of_a_sibling,
            by_a_function_of_autograd,
        )
    },
    "by_a_sibling": lambda: Model(by_a_sibling, reader=Reader()),
    "lists": lambda: Model(called("lists"), lists=Lists()),
    "adapter": lambda: Model(called("adapter"), adapter=Adapter()),
    "weight norm": lambda: Model(called("out"), out=parametrizations.weight_norm(nn.Linear(W, W))),
}


def trained(make: Callable[[], nn.Module], stage: int, method: str | None = None, **tuning: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = make()
    call = model if method is None else getattr(model, method)
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=small(timeout=60, **tuning))
    opt.bind()
    seen: list[Any] = []
    for step in range(3):
        opt.zero_grad()
        for batch in range(2):
            x = data(10 * step + batch, 4, 3, W).requires_grad_()
            loss = call(x).square().mean()
            loss.backward()
            seen += [loss.item(), raw(x.grad)]
        with torch.no_grad():  # reads that no backward follows
            seen.append(call(x).sum().item())
        opt.step()
        assert stage == 1 or nothing_left(opt.engine.domain.sharded.units)
    return seen, snapshot(model, opt)


WAYS: tuple[dict[str, Any], ...] = ({}, {"neighbours": False}, {"live_bytes": None, "neighbours": False})


def all_train(names: Sequence[str], method: str | None = None) -> None:
    for name in names:
        expected = trained(MODELS[name], 1, method)
        for number, tuning in enumerate(WAYS):
            with poisoned() if number != 1 else nullcontext():
                assert trained(MODELS[name], 3, method, **tuning) == expected, f"{name}, {tuning}"


def test_models_train_as_at_stage_1(ranks: Pool) -> None:
    ranks.run(all_train, list(MODELS), world=2)


def test_other_methods_train_as_at_stage_1(ranks: Pool) -> None:
    """The root's forward never runs."""
    ranks.run(all_train, ["by_function"], "encode", world=2)


def several_backwards(stage: int, **tuning: Any) -> list[bytes]:
    """What a method read is needed by a second backward, of the same graph or another, after a first one ended."""
    torch.manual_seed(0)
    model = Model(by_function)
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=small(timeout=60, **tuning))
    opt.bind()
    seen = []
    for step in range(3):
        opt.zero_grad()
        inputs = [data(10 * step + batch, 4, 3, W).requires_grad_() for batch in range(2)]
        if step:  # a read without autograd comes first
            with torch.no_grad():
                model.encode(inputs[0])
        losses = [model.encode(each).square().mean() for each in inputs]
        losses[0].backward(retain_graph=True)
        model(inputs[1]).square().mean().backward()
        for loss in losses:
            loss.backward()
        opt.step()
        assert stage == 1 or nothing_left(opt.engine.domain.sharded.units)
        seen += [raw(each.grad) for each in inputs]
    return [*seen, *snapshot(model, opt)]


def methods_and_several_backwards() -> None:
    expected = several_backwards(1)
    for tuning in WAYS:
        with poisoned():
            assert several_backwards(3, **tuning) == expected


def test_a_method_reads_for_several_backwards(ranks: Pool) -> None:
    ranks.run(methods_and_several_backwards, world=2)


def close(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.allclose(one, other, atol=1e-5)


def outside() -> None:
    """What a script reads on its own account is refused, with the call to make: other ranks may not be there."""
    model = Model(by_function)
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small())
    opt.bind()
    for read in (lambda: model.lm_head.weight.sum(), lambda: F.linear(data(0, 2, W), model.first.weight)):
        with raises(ReleasedError, "unsharded()"):
            read()
    x = data(0, 2, W)

    def of_each_sample() -> dict[str, Tensor]:
        def loss(params: dict[str, Tensor], sample: Tensor) -> Tensor:
            return torch.func.functional_call(model, params, (sample,)).square().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)

    for transformed in (of_each_sample, lambda: torch.func.jvp(model, (x,), (x,))):
        with raises(ReleasedError, "put the call in `with optimizer.unsharded():`", "torch.func"):
            transformed()
    with opt.unsharded():
        assert of_each_sample().keys() == dict(model.named_parameters()).keys()
        assert model.lm_head.weight.sum().isfinite()
        (found,) = torch.func.vjp(model, x)[1](torch.ones(2, 2 * W))
        with torch.no_grad():
            assert close(torch.vmap(model)(x), model(x))
    x.requires_grad_()
    model(x).sum().backward()
    assert close(found, x.grad)


def test_outside_of_the_model(ranks: Pool) -> None:
    ranks.run(outside, world=2)


class Keeps(nn.Module):
    """Keeps a tensor from within, which a loss may be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(W, 4 * W), nn.Linear(4 * W, W), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.kept = hidden.square().mean()
        return x + self.down(hidden)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(W, W), nn.ModuleList(Keeps() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def from_within(stage: int, trains: bool, **tuning: Any) -> list[bytes]:
    torch.manual_seed(0)
    model = Keeping()
    model.blocks.requires_grad_(trains)
    params = [param for param in model.parameters() if param.requires_grad]
    opt = ShardedSGD(params, module=model, **RATES, stage=stage, tuning=small(timeout=60, **tuning))
    for step in range(2):
        opt.zero_grad()
        output, kept = model(data(step, 4, W)).square().mean(), model.blocks[0].kept
        (output + kept).backward()
        opt.step()
    found = snapshot(model, opt)
    if stage == 3 and "live_bytes" not in tuning:  # with it, all stays from forward to backward
        opt.zero_grad()
        model(data(2, 4, W))
        with raises(ShardoptError, "return from"):
            model.blocks[0].kept.backward()
    return found


def losses_from_within() -> None:
    for trains in (True, False):
        expected = from_within(1, trains)
        for tuning in WAYS:
            assert from_within(3, trains, **tuning) == expected


def test_a_loss_from_within_a_block_alone_is_an_error(ranks: Pool) -> None:
    """Frozen or not: no hook tells that its params are needed. Beside an output of the block it is right."""
    ranks.run(losses_from_within, world=2)
