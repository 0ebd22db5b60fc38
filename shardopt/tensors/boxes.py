"""A range of a tensor's elements as boxes, for formats that know only slices along dimensions. Integers, no tensors."""

import math
from typing import NamedTuple


class Box(NamedTuple):
    """Elements ``offsets[d] <= i[d] < offsets[d] + sizes[d]``: ``[start, start + numel)`` in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Returns the fewest boxes, in order, that make up the row-major elements ``[start, stop)``: at most ``2 d - 1``.

    ::

        shape (4, 5), [3, 17)      . . . a a      a  (0, 3) 1 x 2
                                   b b b b b      b  (1, 0) 2 x 5
                                   b b b b b
                                   c c . . .      c  (3, 0) 1 x 2
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), start)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are whole
    if first > last:  # within one row
        return _inside(shape, last, start, stop)
    found = _inside(shape, first - 1, start, first * row)
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row))
    return found + _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    """Returns the boxes of a range that lies in the row ``index``."""
    before = index * math.prod(shape[1:])
    return [
        Box((index, *each.offsets), (1, *each.sizes), before + each.start)
        for each in boxes(shape[1:], start - before, stop - before)
    ]
