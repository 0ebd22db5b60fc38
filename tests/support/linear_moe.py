"""A mixture of experts whose loss is linear in the params, with whole numbers: sums are exact, in whatever order."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM, WIDTH, BATCHES = 4, 300, 4  # experts; elements of each param; ranks that have a batch
DENSE = NUM  # counted behind the experts


def numbers(step: int, rank: int, part: int) -> Tensor:
    """1D [WIDTH]: what one rank's batch multiplies the param of an expert with; zeros if none of its tokens goes there.

    At each step one expert gets no token at all.
    """
    if part != DENSE and (part == step % NUM or (step + rank + part) % 3 == 0):
        return torch.zeros(WIDTH)
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randint(-3, 4, (WIDTH,), generator=generator).float()


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-8, 9, (WIDTH,)).to(dtype))

    def forward(self, by: Tensor) -> Tensor:
        return (self.weight * by.to(self.weight.dtype)).sum(dtype=torch.float32)


class LinearMixture(nn.Module):
    """One process has all experts, and all batches; a rank has the experts of its group's tokens."""

    def __init__(self, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = Weights(dtype)
        made = [Weights(dtype) for _ in range(NUM)]
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        self.own = range(rank * NUM // size, (rank + 1) * NUM // size)
        self.experts = nn.ModuleList(made[index] for index in self.own)
        self.batches = [dist.get_rank()] if group is not None else list(range(BATCHES))
        self.tokens_of = self.batches if group is None else dist.get_process_group_ranks(group)

    def forward(self, step: int) -> Tensor:
        total = self.dense(sum(numbers(step, rank, DENSE) for rank in self.batches))
        for index, expert in zip(self.own, self.experts, strict=True):
            by = [numbers(step, rank, index) for rank in self.tokens_of]
            if any(bool(each.any()) for each in by):
                total = total + expert(sum(by))
        return total
