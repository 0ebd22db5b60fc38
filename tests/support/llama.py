"""A small Llama: many modules a bucket and more bytes than stay gathered, at the settings that nobody has to set."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

WIDTH, WORDS = 256, 320


class Block(nn.Module):
    """Seven matrices of 256 KiB, each just large enough to be sharded at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_of_gates = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.out(scaled_dot_product_attention(self.query(y), self.key(y), self.value(y), is_causal=True))
        y = self.norm_of_gates(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """At default settings on CPUs a bucket holds eight of its matrices, from two blocks."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.arange(4).view(1, 4)).float().square().mean()
