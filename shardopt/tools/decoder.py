"""A model to plan for, of which only the number of params is known."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from ..arguments import whole


def transformer(numel: int) -> nn.Module:
    """Returns a decoder with ``numel`` params on the meta device; its embedding takes what the layers leave."""
    numel = whole(numel, "numel (params of a model whose layers are laid out)", least=1, most=10**15)
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))  # width 128 x depth, as is usual
    width = max(1, int((0.95 * numel / (12 * layers)) ** 0.5) // 16 * 16) if numel > 10_000 else 0
    blocks = [list(_layer(width)) for _ in range(layers)] if width else []
    left = numel - sum(math.prod(shape) for shapes in blocks for shape in shapes)
    lists = [nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes) for shapes in blocks]
    return nn.ModuleList([_embedding(left, width), *lists])


def _embedding(numel: int, width: int) -> nn.Module:
    """Returns rows of an embedding, a matrix that Muon does not take, and a vector of what fills no row."""
    first, rest = nn.Module(), numel % width if width else numel
    if rest < numel:
        first.rows = nn.Embedding(numel // width, width, device="meta")
    if rest:
        first.rest = nn.Parameter(torch.empty(rest, device="meta"))
    return first


def _layer(width: int) -> Iterator[tuple[int, ...]]:
    yield from ((width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width))
