"""The boxes that tensor parallelism cuts a param into, and the order of the elements in a box.

::

    0.up.weight, shape (13, 6), Shard(0) over two ranks      0.up.weight[0:7, 0:6]
                                                             0.up.weight[7:13, 0:6]

A checkpoint holds each box as a tensor of its own, under such a name, in the format and storage order of the rank
that held it. A rank that loads may hold other boxes: what two boxes have in common is a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..tensors.boxes import boxes
from .typed_json import Shape  # noqa: TC001 (fields of records are read at run time)

# Of a box: its first index in each dimension, and the index after its last.
Corners = tuple[tuple[int, ...], tuple[int, ...]]


class ParamBox(NamedTuple):
    """Elements ``offsets[d] <= i[d] < offsets[d] + sizes[d]`` of a param of shape ``shape``."""

    shape: Shape
    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> ParamBox:
        return ParamBox(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def name_in(self, param: str) -> str:
        """Returns the name of the box's tensors: the param's, where the box is all of it."""
        if self.is_whole:
            return param
        spans = (f"{first}:{first + size}" for first, size in zip(self.offsets, self.sizes, strict=True))
        return f"{param}[{', '.join(spans)}]"


def make_up(shape: Sequence[int], parts: Iterable[ParamBox]) -> bool:
    """True if the boxes are all of a param, each element once. All cut a dimension at the same places."""
    given = list(parts)
    if any(box.shape != tuple(shape) or len(box.offsets) != len(box.sizes) for box in given):
        return False
    spans: list[set[tuple[int, int]]] = [set() for _ in shape]
    for box in given:
        for dim, span in enumerate(zip(box.offsets, box.sizes, strict=True)):
            spans[dim].add(span)
    for size, its_spans in zip(shape, spans, strict=True):
        end = 0
        for first, length in sorted(its_spans):
            if first != end or not length:
                return False
            end += length
        if end != size:
            return False
    return len({box.offsets for box in given}) == len(given) == math.prod(map(len, spans))


class StridedBox(NamedTuple):
    """A box of a param whose elements are numbered 0, 1, ... along dense strides."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(box: ParamBox, strides: Sequence[int]) -> StridedBox:
        return StridedBox(box.offsets, box.sizes, tuple(strides))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions with more than one element; the one whose index moves slowest comes first."""
        moving = (dim for dim, size in enumerate(self.sizes) if size > 1)
        return tuple(sorted(moving, key=lambda dim: -self.strides[dim]))

    def corners(self, start: int, stop: int) -> list[Corners]:
        """Returns the boxes of the param that elements ``[start, stop)`` make up, at most ``2 d - 1``."""
        order, found = self.order, []
        for box in boxes(tuple(self.sizes[dim] for dim in order), start, stop):
            low, high = list(self.offsets), [first + 1 for first in self.offsets]
            for dim, first, size in zip(order, box.offsets, box.sizes, strict=True):
                low[dim] += first
                high[dim] = low[dim] + size
            found.append((tuple(low), tuple(high)))
        return found if self.numel else []

    def flat_index(self, index: Sequence[int]) -> int:
        """Returns the number of the element that has this index in the param."""
        moved = zip(index, self.offsets, self.strides, strict=True)
        return sum((each - first) * stride for each, first, stride in moved)

    def view(self, flat: torch.Tensor, start: int, corners: Corners) -> torch.Tensor:
        """Returns a view of the elements of a box; ``flat`` is 1D, and begins with element number ``start``."""
        sizes = [high - low for low, high in zip(*corners, strict=True)]
        return flat.as_strided(sizes, self.strides, flat.storage_offset() + self.flat_index(corners[0]) - start)


def common(some: Iterable[Corners], others: Sequence[Corners]) -> Iterator[Corners]:
    """Yields the boxes that two lists of boxes have in common."""
    for low, high in some:
        for other_low, other_high in others:
            first = tuple(map(max, low, other_low))
            last = tuple(map(min, high, other_high))
            if all(begin < end for begin, end in zip(first, last, strict=True)):
                yield first, last
