"""The GPT that engines are measured with, and what every rank of every engine is told."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class GPT(nn.Module):
    """Tokens to loss."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context + 1] int64
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Settings:
    """What every rank of every engine is told."""

    ranks: int
    threads: int
    device: str  # type only: a rank takes the GPU of its number
    dtype: str
    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    context: int
    burst: int
    seed: int

    def model(self, small: bool = False) -> GPT:
        layers, width, vocab = (1, 64, 256) if small else (self.layers, self.width, self.vocab)
        heads = 2 if small else self.heads
        torch.manual_seed(self.seed)
        return GPT(layers, width, heads, vocab, self.context)
