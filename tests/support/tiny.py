"""The model of tests/fixtures: odd sizes, two groups, a tied and a frozen param, buffers. Torch alone, no shardopt."""

import torch
from torch import Tensor, nn

HYPER = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
DECAY = 0.1


class Tiny(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 7)
        self.fixed = nn.Linear(7, 3)
        self.back = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.rand(5) + 0.5)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens)) * self.scale.to(self.embed.weight.dtype)
        return self.head(x + self.back(self.fixed(torch.tanh(self.hidden(x)))))


def groups(model: nn.Module) -> list[dict]:
    """Matrices decay, the rest does not; the second learning rate shows whether groups were swapped."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": DECAY},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def loss(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    """Of a batch that depends on step and rank alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(11, (4, 6), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
