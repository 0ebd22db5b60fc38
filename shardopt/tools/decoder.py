"""A model to plan for, of which only the number of params is known."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from ..arguments import whole

VOCABULARY = 1 << 16  # tokens of a large model; an embedding of a small one takes a twentieth of its params
ROWS = 256  # an embedding has a multiple of so many rows, as those of known models have


def transformer(numel: int) -> nn.Module:
    """Returns a decoder with ``numel`` params on the meta device; its embedding takes what the layers leave."""
    numel = whole(numel, "numel (params of a model whose layers are laid out)", least=1, most=10**15)
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))  # width 128 x depth, as is usual
    embedding = min(0.05, VOCABULARY * 128 * layers / numel)
    width = int(((1 - embedding) * numel / (12 * layers)) ** 0.5) if numel > 10_000 else 0
    width -= width % (128 if width >= 1024 else 16)  # as known models have it, so that ranks get equal parts
    blocks = [list(_layer(width)) for _ in range(layers)] if width else []
    left = numel - sum(math.prod(shape) for shapes in blocks for shape in shapes)
    lists = [nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes) for shapes in blocks]
    return nn.ModuleList([_embedding(left, width), *lists])


def _embedding(numel: int, width: int) -> nn.Module:
    """Returns rows of an embedding, a matrix that Muon does not take, and a vector of what fills no row."""
    first, rows = nn.Module(), numel // width if width else 0
    rows -= rows % ROWS if rows > ROWS else 0
    rest = numel - rows * width
    if rows:
        first.rows = nn.Embedding(rows, width, device="meta")
    if rest:
        first.rest = nn.Parameter(torch.empty(rest, device="meta"))
    return first


def _layer(width: int) -> Iterator[tuple[int, ...]]:
    yield from ((width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width))
