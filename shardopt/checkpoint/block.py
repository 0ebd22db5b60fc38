"""Blocks: the boxes of a param's elements that tensor parallelism cuts it into, and the order of elements in them.

::

    0.up.weight, shape (13, 6), Shard(0) over two ranks      0.up.weight[0:7, 0:6]
                                                             0.up.weight[7:13, 0:6]

A checkpoint keeps each block as a tensor of its own, under such a name, in the format and storage order of the rank
that held it. Who loads cuts the param otherwise: what two boxes have in common is a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..tensors.boxes import boxes

Span = tuple[
    tuple[int, ...], tuple[int, ...]
]  # of a box: its first index in each dimension, and the one behind its last


@dataclass(frozen=True)
class Block:
    """Elements ``offsets[d] <= i[d] < offsets[d] + sizes[d]`` of a param of shape ``shape``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Block:
        return Block(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def name_in(self, param: str) -> str:
        """Returns the name of the block's tensors: the param's, where the block is all of it."""
        if self.is_whole:
            return param
        spans = (f"{first}:{first + size}" for first, size in zip(self.offsets, self.sizes, strict=True))
        return f"{param}[{', '.join(spans)}]"


def make_up(shape: Sequence[int], blocks: Iterable[Block]) -> bool:
    """True if blocks without elements in common are all of a param: each dimension is cut at the same places."""
    given = list(blocks)
    if any(block.shape != tuple(shape) or len(block.offsets) != len(block.sizes) for block in given):
        return False
    spans: list[set[tuple[int, int]]] = [set() for _ in shape]
    for block in given:
        for dim, span in enumerate(zip(block.offsets, block.sizes, strict=True)):
            spans[dim].add(span)
    for size, its_spans in zip(shape, spans, strict=True):
        end = 0
        for first, length in sorted(its_spans):
            if first != end or not length:
                return False
            end += length
        if end != size:
            return False
    return len({block.offsets for block in given}) == len(given) == math.prod(map(len, spans))


class Frame(NamedTuple):
    """A box of a param, and how its elements are numbered 0, 1, ...: along dense strides."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(block: Block, strides: Sequence[int]) -> Frame:
        return Frame(block.offsets, block.sizes, tuple(strides))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of several elements, the one whose index moves slowest first."""
        moving = (dim for dim, size in enumerate(self.sizes) if size > 1)
        return tuple(sorted(moving, key=lambda dim: -self.strides[dim]))

    def spans(self, start: int, stop: int) -> list[Span]:
        """Returns the boxes of the param that elements ``[start, stop)`` make up, at most ``2 d - 1``."""
        order, found = self.order, []
        for box in boxes(tuple(self.sizes[dim] for dim in order), start, stop):
            low, high = list(self.offsets), [first + 1 for first in self.offsets]
            for dim, first, size in zip(order, box.offsets, box.sizes, strict=True):
                low[dim] += first
                high[dim] = low[dim] + size
            found.append((tuple(low), tuple(high)))
        return found if self.numel else []

    def number(self, index: Sequence[int]) -> int:
        """Returns the number of the element with this index in the param."""
        moved = zip(index, self.offsets, self.strides, strict=True)
        return sum((each - first) * stride for each, first, stride in moved)

    def view(self, flat: torch.Tensor, start: int, span: Span) -> torch.Tensor:
        """Returns the elements of a box, of those that ``flat`` holds, 1D, from number ``start`` on."""
        sizes = [high - low for low, high in zip(*span, strict=True)]
        return flat.as_strided(sizes, self.strides, flat.storage_offset() + self.number(span[0]) - start)


def common(some: Iterable[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Yields the boxes that two lists of boxes have in common."""
    for low, high in some:
        for other_low, other_high in others:
            first = tuple(map(max, low, other_low))
            last = tuple(map(min, high, other_high))
            if all(begin < end for begin, end in zip(first, last, strict=True)):
                yield first, last
