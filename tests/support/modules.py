"""Models that do with their modules and params all that models do, ways to train them, and what watches them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shardopt import ShardedOptimizer, ShardedSGD, Tuning
from shardopt.partition.memory import Memory
from shardopt.units.gatherer import Gatherer
from shardopt.units.unit import GatheredBucket, Unit

W = 24  # a weight is two and a quarter blocks
KEPT = 20  # of fewer elements than this, params stay whole
RATES = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


def small(**others: Any) -> Tuning:
    """A bucket for each weight, one for some biases; nothing stays that no module needs."""
    settings = {"keep_below": KEPT, "bucket_bytes": 2000, "live_bytes": 0}
    return Tuning(**{**settings, **others})


def data(step: int, *shape: int) -> Tensor:
    """Other values on every rank and step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


# -- models ------------------------------------------------------------------------------------------------------------


def square(*shape: int) -> Parameter:
    return Parameter(torch.randn(*(shape or (W, W))) / 5)


class Repeated(nn.Module):
    """Modules that run several times in a forward; outputs that are views, and written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(W, W), nn.Linear(W, W), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.relu_(self.one(x))
            x = self.act(self.two(x).mul_(0.5))
        return self.two(self.one(x))


class Owner(nn.Module):
    """Owns params itself, the outermost one too, and uses them before, between and behind its children."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.mix, self.scale = square(), Parameter(torch.ones(W))
        self.inner = Owner(depth - 1) if depth else nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x * self.scale) @ self.mix) * self.scale + x


class InPlace(nn.Module):
    """Writes to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.mix = Parameter(torch.full((W,), 0.7)), square()

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma).mul_(self.gamma) @ self.mix


@dataclass
class Pair:
    """What torch's pytree does not look into."""

    x: Tensor
    more: dict[str, Any]


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor):
        self.hidden = [(hidden, "text")]


class Structured(nn.Module):
    """Takes and returns keywords, tuples, dicts, dataclasses and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, pair: Pair, *, scale: float) -> tuple[Pair, Slots]:
        y = pair.more["y"][0]
        return Pair(pair.x @ self.a, {"y": (y @ self.b * scale, 3), "none": None}), Slots(y @ self.a)


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(W, W), nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pair, total = Pair(self.first(x), {"y": (x, 1)}), torch.zeros(())
        for layer in self.layers:
            pair, slots = layer(pair=pair, scale=0.5)
            total = total + slots.hidden[0][0].sum() / 100
        return {"out": pair.x + total, "other": pair.more["y"][0]}


class Positions(nn.Module):
    """Returns views of its param, or the param."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = square(8, W), Parameter(torch.full((W,), 0.9))

    def forward(self, count: int) -> tuple[Tensor, Tensor]:
        return self.table[:count], self.scale


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.one, self.two = Positions(), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        table, scale = self.positions(3)
        return self.two(self.one(x) * table * scale)


class Product(nn.Module):
    """Its first nodes have no differentiable inputs, and need the params in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = square(), square(), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ (self.a @ self.b))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(11, W), nn.Linear(W, W), nn.Linear(W, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0].abs() * 3).long().clamp(max=10)
        return self.head(self.hidden(self.embed(tokens)))


class Attention(nn.Module):
    """Modules of torch that read their children's params without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(W, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(W, 4, 32, 0.0, batch_first=True), 2)
        self.decoder = nn.TransformerDecoderLayer(W, 4, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(query=x, key=x, value=x, need_weights=False)
        return self.decoder(self.encoder(y), memory=x)


class Layers(nn.Module):
    """Kinds of layers: recurrent, normalised, parametrised, convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(W, W, 2, batch_first=True), nn.BatchNorm1d(W)
        self.weighed = parametrizations.weight_norm(nn.Linear(W, W))
        self.spectral = parametrizations.spectral_norm(nn.Linear(W, W))
        self.conv = nn.Conv1d(W, W, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, (hidden, _) = self.lstm(x)
        y = self.norm(self.conv(y.transpose(1, 2))).transpose(1, 2) + hidden[-1][:, None]
        return self.spectral(torch.relu_(self.weighed(y)))


class Block(nn.Module):
    def __init__(self, width: int = W) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, some of which are skipped, or checkpointed one by one or all together."""

    def __init__(self, reentrant: bool | None = None, whole: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(W, W), nn.ModuleList(Block() for _ in range(blocks))
        self.reentrant, self.whole, self.skipped = reentrant, whole, set[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number in self.skipped:
                continue
            is_plain = self.whole or self.reentrant is None
            x = block(x) if is_plain else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Odd(nn.Module):
    """Params of all shapes; a shared module between others."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.number, self.one = Parameter(torch.zeros(0, 3)), Parameter(torch.tensor(0.9)), square(1)
        self.turned, self.long = Parameter(square().detach().t()), Parameter(torch.ones(700))
        self.shared, self.layers = nn.Linear(W, W), nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.turned * self.number + self.one + self.empty.sum() + self.long.mean()
        for layer in self.layers:
            x = layer(torch.tanh(self.shared(x)))
        return x


# -- ways to train -----------------------------------------------------------------------------------------------------

Run = Callable[[nn.Module, int], Tensor]


def loss_of(output: Any) -> Tensor:
    outputs = list(output.values()) if isinstance(output, dict) else [output]
    return torch.stack([each.pow(2).mean() for each in outputs]).sum()


def plain(model: nn.Module, step: int) -> Tensor:
    loss = loss_of(model(data(step, 4, 3, W)))
    loss.backward()
    return loss


def retained(model: nn.Module, step: int) -> Tensor:
    """The same graph goes backward twice."""
    loss = loss_of(model(data(step, 4, 3, W)))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def accumulated(model: nn.Module, step: int) -> Tensor:
    plain(model, step + 50)
    return plain(model, step)


def joined(model: nn.Module, step: int) -> Tensor:
    """Two forwards, then one backward of both; a third forward goes backward last."""
    last = loss_of(model(data(step + 90, 2, 3, W)))
    loss = loss_of(model(data(step, 2, 3, W))) + loss_of(model(data(step + 70, 2, 3, W)))
    loss.backward()
    last.backward()
    return loss


def skipping(model: nn.Module, step: int) -> Tensor:
    model.skipped = {step % 4, (step + 1) % 3} if step else set()
    return plain(model, step)


def skipping_alone(model: nn.Module, step: int) -> Tensor:
    """Each rank skips others; a rank may look around on its own."""
    rank = dist.get_rank()
    model.skipped = {(step + rank) % 4}
    with torch.no_grad():
        for _ in range(rank):
            model(data(step, 1, 3, W))
    return plain(model, step)


def penalised(model: nn.Module, step: int) -> Tensor:
    """A graph of a backward: a gradient penalty on the inputs."""
    x = data(step, 4, 3, W).requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.tanh().sum(), x, create_graph=True)
    loss = loss_of(output) + (grad.norm() - 1).pow(2) / 10
    loss.backward()
    return loss


def curved(model: nn.Module, step: int) -> Tensor:
    """Gradients of gradients of params."""
    loss = loss_of(model(data(step, 4, 3, W)).tanh())
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss = loss + sum(grad.pow(2).sum() for grad in grads) / 10
    loss.backward()
    return loss


# -- optimizers --------------------------------------------------------------------------------------------------------


def made(stage: int = 3, make: Callable[[], nn.Module] = Stack, **tuning: Any) -> tuple[Any, ShardedOptimizer]:
    torch.manual_seed(0)
    model = make()
    return model, ShardedSGD(model, **RATES, stage=stage, tuning=small(**tuning))


def train_step(model: nn.Module, opt: ShardedOptimizer, step: int) -> None:
    opt.zero_grad()
    plain(model, step)
    opt.step()


# -- what watches them -------------------------------------------------------------------------------------------------


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that was given back stays, full of NaN."""

    def free(memory: Memory, keeps_pages: bool = False) -> bool:
        memory.is_allocated = False
        memory.tensor.data.fill_(math.nan)
        return False

    def allocate(memory: Memory, freed: Memory | None = None) -> None:
        memory.is_allocated = True
        memory.tensor.data.fill_(math.nan)

    with patch.object(Memory, "free", free), patch.object(Memory, "allocate", allocate):
        yield


@contextmanager
def watched() -> Iterator[list[Unit]]:
    """No more bytes than the budget, or than running modules and units between two uses need. Yields all units."""
    units: list[Unit] = []
    add, need = Gatherer.add, Gatherer.need

    def adds(gatherer: Gatherer, *arguments: Any) -> GatheredBucket:
        found = add(gatherer, *arguments)
        if found.unit not in units:
            units.append(found.unit)
        return found

    def needs(gatherer: Gatherer, unit: Unit) -> None:
        need(gatherer, unit)
        uses = (*gatherer.orders.schedule.forward, *gatherer.orders.schedule.backward)
        held = {name for use in uses if use.unit == unit.name for name in use.held}
        # A unit that another rank needs, or that a guess of the order has too early.
        if gatherer.passes.now is not None:
            held.update(gatherer.passes.now.joined)
        busy = sum(each.nbytes for each in units if each.users or each.is_spread or each.name in held)
        found = sum(each.bucket.resident_bytes for unit in units for each in unit.buckets)
        assert found <= max(busy, gatherer.budget.nbytes), f"{found} bytes live, {busy} used"

    with patch.multiple(Gatherer, add=adds, need=needs):
        yield units


def nothing_left(units: list[Unit]) -> bool:
    return not any(each.users or any(it.bucket.resident_bytes for it in each.buckets) for each in units)
