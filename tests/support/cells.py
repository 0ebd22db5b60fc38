"""A module of params of odd shapes, each with the gradient that it is told; gradients are whole numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

# In the order of the params: one of no dimension, one without elements, a block and one, one that is transposed.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (257,), (13, 40), (19, 30), (300,), (16, 16), (5,))
GROUPS = ((0, 1, 2), (3, 4, 5))
LATE = (6, 7)  # in no group at first
FROZEN = (5, *LATE)  # at first
LOW = (2, 4, 6)  # of bf16, where there are such
TRANSPOSED, TIED = 4, 3
CELLS = len(SHAPES) + 1  # the last one is tied


class Cell(nn.Module):
    """Its param's gradient is what it was given."""

    def __init__(self, weight: Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight.float() * factors).sum()


class Cells(nn.Module):
    """Those are used whose factors are given."""

    def __init__(self, weights: Iterable[Tensor]):
        super().__init__()
        params = [Parameter(weight, requires_grad=index not in FROZEN) for index, weight in enumerate(weights)]
        self.cells = nn.ModuleList(Cell(param) for param in [*params, params[TIED]])

    def forward(self, factors: Mapping[int, Tensor]) -> Tensor:
        return torch.stack([self.cells[cell](each) for cell, each in factors.items()]).sum()

    @property
    def params(self) -> list[Parameter]:
        return [cell.weight for cell in self.cells][: len(SHAPES)]


def param_of(cell: int) -> int:
    return TIED if cell == len(SHAPES) else cell


def whole_numbers(seed: int, shape: Sequence[int], bound: int) -> Tensor:
    return torch.randint(-bound, bound + 1, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def values(seed: int, index: int) -> Tensor:
    """For a param, in fp32; bf16 has them too."""
    tensor = whole_numbers(1000 * seed + index, SHAPES[index], 127) / 64
    return tensor.t().contiguous().t() if index == TRANSPOSED else tensor


def factors_of(seed: int, rank: int, mask: int, bad: int = -1) -> dict[int, Tensor]:
    """By cell, for a rank's forward: the cells of the mask. Those of the cell ``bad`` begin with an Inf on rank 0."""
    found = {}
    for cell in range(CELLS):
        if mask >> cell & 1:
            found[cell] = whole_numbers(1009 * seed + 101 * rank + cell, SHAPES[param_of(cell)], 4)
            if cell == bad and rank == 0 and found[cell].numel():
                found[cell].view(-1)[0] = math.inf
    return found


def by_param(factors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What gradients they make."""
    found: dict[int, Tensor] = {}
    for cell, each in factors.items():
        index = param_of(cell)
        found[index] = found[index] + each if index in found else each
    return found
