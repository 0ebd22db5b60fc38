"""Training with states of AdamW that are stored in some code after each step, and the GPT of the example to train."""

import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from code_book import BFloat16, Code, Now, Offset, dynamic, flash, fp32, golden, linear, minifloat, random
from common import ROOT
from torch import Tensor, nn

EPS = 1e-8


@dataclass(frozen=True)
class Pair:
    """How the states of AdamW are held."""

    name: str
    exp_avg: Code = fp32
    exp_avg_sq: Code = fp32


def pairs() -> list[Pair]:
    return [
        Pair("fp32"),
        *(
            Pair(f"offset m{one} + m{two}", Offset(one, True), Offset(two, False))
            for one in (3, 4, 5)
            for two in (3, 4, 5)
        ),
        *(
            Pair(f"offset m{one} + m{two} {rounding.__name__}", Offset(one, True), Offset(two, False, rounding))
            for one, two in ((4, 4), (4, 5), (5, 5))
            for rounding in (random, golden)
        ),
        Pair("linear", linear(True), linear(False)),
        Pair("dynamic tree", dynamic(True), dynamic(False)),
        Pair("flash", flash(True), flash(False)),
        Pair("minifloat e4m3 + e4m4, 2^k scale", minifloat(4, 3, True), minifloat(4, 4, False)),
        Pair("minifloat e4m3 + e5m3, 2^k scale", minifloat(4, 3, True), minifloat(5, 3, False)),
        *(Pair(str(b), b, b) for b in (BFloat16(), BFloat16(scaled=True), BFloat16(random))),
        Pair("bf16, nearest + random", BFloat16(), BFloat16(random)),
        Pair("bf16, nearest + golden", BFloat16(), BFloat16(golden)),
    ]


class AdamW:
    """Of one flat param; the states are stored and loaded after each step, which itself is in fp32."""

    def __init__(self, param: Tensor, pair: Pair, beta2: float, decay: Tensor | float, seed: int = 0) -> None:
        self.param, self.pair, self.beta2, self.decay = param, pair, beta2, decay
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0

    def step(self, grad: Tensor, lr: float) -> Tensor:
        """Returns the update, before its learning rate."""
        self.steps += 1
        m = self.exp_avg.lerp(grad, 1 - 0.9)
        v = (self.beta2 * self.exp_avg_sq).addcmul_(grad, grad, value=1 - self.beta2)
        root = (v / (1 - self.beta2**self.steps)).sqrt_().add_(EPS)
        update = (m / (1 - 0.9**self.steps)).div_(root)
        self.param.mul_(1 - lr * self.decay).sub_(lr * update)
        now = Now(self.steps, self.generator)
        self.exp_avg, self.exp_avg_sq = self.pair.exp_avg(m, now), self.pair.exp_avg_sq(v, now)
        return update


# ---- The example -----------------------------------------------------------------------------------------------------


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """To train on, and held out; read once a process."""
    found: tuple[Tensor, Tensor] = example().read_standard_library()
    return found


@dataclass(frozen=True)
class Size:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16


class Training:
    """The example's model and batches, as one process."""

    def __init__(self, seed: int, steps: int, size: Size) -> None:
        self.gpt, self.steps, self.size = example(), steps, size
        self.text, self.held_out_text = texts()
        torch.manual_seed(seed)
        self.model: nn.Module = self.gpt.GPT(size.context, size.layers, size.width, size.heads)
        self.sampler = torch.Generator().manual_seed(seed)

    def loss(self) -> Tensor:
        """Of the next batch, with its graph."""
        starts = torch.randint(len(self.text) - self.size.context, (self.size.batch,), generator=self.sampler)
        loss: Tensor = self.model(*self._sequences(self.text, starts))
        return loss

    def backward(self) -> Tensor:
        """Returns the loss."""
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.detach()

    def lr(self, step: int) -> float:
        return 4e-3 * self.gpt.learning_rate_factor(step, self.steps)

    @torch.no_grad()
    def held_out_loss(self, windows: int = 1024) -> float:
        starts = torch.linspace(0, len(self.held_out_text) - self.size.context - 1, windows).long()
        losses = [self.model(*self._sequences(self.held_out_text, part)) for part in starts.view(-1, 64)]
        return torch.stack(losses).mean().item()

    def _sequences(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        return self.gpt.sequences(text, starts, self.size.context, torch.device("cpu"))
