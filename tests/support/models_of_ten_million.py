"""Models of at least ten million params, plain PyTorch as people write it: what stage 3 has to cut into units.

Inputs are tiny, so that a step is little more than what it moves.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from examples.train_gpt import GPT
from tests.support import llama

WORDS = 256


def run(block: nn.Module, *inputs: Tensor, checkpointed: bool) -> Tensor:
    return checkpoint(block, *inputs, use_reentrant=False) if checkpointed else block(*inputs)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


# -- a vision transformer ----------------------------------------------------------------------------------------------


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Owns params itself: the class token and the position embedding."""

    def __init__(self, checkpointed: bool = False, width: int = 384, depth: int = 6, patch: int = 8) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (32 // patch) ** 2 + 1, width) / 50)
        self.encoder = nn.ModuleList(EncoderBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.encoder:
            x = run(block, x, checkpointed=self.checkpointed)
        return self.head(self.norm(x)[:, 0])


# -- a mixture of experts ----------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Experts(nn.Module):
    """Each word goes to the two experts that the router says; an expert without words does not run."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, 1)
        weights, chosen = self.router(words).softmax(-1).topk(2)
        out = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(words[rows]) * weights[rows, place, None])
        return out.view_as(x)


class SparseBlock(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.moe = nn.LayerNorm(width), Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MoE(nn.Module):
    """Ranks have other words, and so use other experts."""

    def __init__(self, checkpointed: bool = False, width: int = 256, depth: int = 4, experts: int = 5) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.positions = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(SparseBlock(width, experts) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.positions(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = run(layer, x, checkpointed=self.checkpointed)
        return self.head(self.norm(x))


# -- a UNet of a diffusion model ---------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(silu(self.norm1(x))) + self.time(silu(time))[:, :, None, None]
        return self.conv2(silu(self.norm2(y))) + self.shortcut(x)


class SpatialAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(8, channels), Attention(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x).flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """Lists of lists of modules, none of which is called itself; what goes down is used again on the way up."""

    def __init__(self, checkpointed: bool = False, widths: tuple[int, ...] = (64, 128, 272), time: int = 256) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = [*zip(widths, (*widths[1:], widths[-1]), strict=True)]
        self.downs = nn.ModuleList(
            nn.ModuleList([ResidualBlock(a, a, time), SpatialAttention(a), nn.Conv2d(a, b, 4, stride=2, padding=1)])
            for a, b in pairs
        )
        self.middle1 = ResidualBlock(widths[-1], widths[-1], time)
        self.middle2 = ResidualBlock(widths[-1], widths[-1], time)
        self.ups = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose2d(b, a, 2, stride=2), ResidualBlock(2 * a, a, time), SpatialAttention(a)])
            for a, b in reversed(pairs)
        )
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, time, skips = self.first(x), self.time(time), []
        for block, attention, down in self.downs:
            x = attention(run(block, x, time, checkpointed=self.checkpointed))
            skips.append(x)
            x = down(x)
        x = self.middle2(self.middle1(x, time), time)
        for up, block, attention in self.ups:
            x = torch.cat([up(x), skips.pop()], 1)
            x = attention(run(block, x, time, checkpointed=self.checkpointed))
        return self.last(x)


# -- recurrent networks ------------------------------------------------------------------------------------------------


class LSTM(nn.Module):
    """One module of several layers, which flattens its weights and reads them in C++."""

    def __init__(self, width: int = 512, depth: int = 5) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, width), nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(words))[0])


class Cells(nn.Module):
    """Unrolled by hand: every word uses every cell again."""

    def __init__(self, width: int = 640, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.cells = (
            nn.Embedding(WORDS, width),
            nn.ModuleList(nn.GRUCell(width, width) for _ in range(depth)),
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        states, outputs = [torch.zeros(len(words), cell.hidden_size) for cell in self.cells], []
        for word in self.embed(words).unbind(1):
            for number, cell in enumerate(self.cells):
                word = states[number] = cell(word, states[number])
            outputs.append(word)
        return self.head(torch.stack(outputs, 1))


# -- all of them -------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(context=16, layers=6, width=384, heads=6),
    "Llama": lambda: llama.Llama(blocks=22),
    "ViT": ViT,
    "MoE": MoE,
    "UNet": UNet,
    "LSTM": LSTM,
    "cells": Cells,
    "ViT, checkpointed": lambda: ViT(checkpointed=True),
    "MoE, checkpointed": lambda: MoE(checkpointed=True),
    "UNet, checkpointed": lambda: UNet(checkpointed=True),
}


def loss_of(model: nn.Module) -> Tensor:
    """Of a batch of one, another one on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    if isinstance(model, ViT | UNet):
        images = torch.randn(1, 3, 32, 32, generator=generator)
        output = model(images) if isinstance(model, ViT) else model(images, torch.tensor([[0.5]]))
    else:
        output = model(torch.randint(WORDS, (1, 8), generator=generator))
    return output.square().mean()
