"""Where an element finds the factor of its row and that of its column, and where it adds to their sums.

The last two dimensions of a param make a matrix; those before it number matrices. Elements lie in storage order, in
runs along the fastest dimension. Along a run of a contiguous param the row stays and the column advances by one: what
stays is the ``outer`` of the two, the other one the ``inner``. For a transposed matrix it is the other way round. Where
the fastest dimension is neither (``channels_last``), both advance, by steps of their own.

A table has one row a param, int64::

    first       element of the param that the shard's element 0 would be
    outer, inner     addresses of fp32 factors, or of float64 sums; one behind the other in the order of a contiguous
                     tensor of all dimensions but the columns', or but the rows'
    run, outer_step, inner_step     elements of a run, and what each advances by
    runs        how many a matrix has, if its sums are added up in bands and spans; else 0
    dims        number of dimensions that are slower than a run; for each (size, outer_stride, inner_stride)

Sums are added up in one order, whatever kernel does it, so that their bits are the same. A matrix is cut into bands of
128 runs, and a run into spans of 512 elements::

    run     span 0   span 1          span    x x x x x x x x      folded in half until one is left
    0       | a      | b     |               x x x x
    1       | a      | b     | band 0        x x
    2       | a      | b     |               x
    3       | c      | d     | band 1

An inner sum adds the elements of a band one by one, then the bands. An outer sum adds the spans of its run, each
folded. Where both sides of a matrix are short, or its elements are not neighbours, a sum adds them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import ShardoptError

FIRST, OUTER, INNER, RUN, OUTER_STEP, INNER_STEP, RUNS, DIMS, SLOWER = range(9)
MAX_DIMS = 8  # slower than a run, where neighbours that advance alike are one
COLUMNS = SLOWER + 3 * MAX_DIMS

BAND, SPAN = 128, 512
_SHORT = 64  # sides up to which there are neither


class Products(NamedTuple):
    """The factors of a launch's params, for the kernels of its passes.

    Attributes:
        table: 2D [num_rows, COLUMNS] int64 in host memory, as this module has it.
        factors: 1D fp32, where the kernels run; the table holds their addresses.
    """

    table: torch.Tensor
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def part(self, start: int) -> torch.Tensor:
        """Returns the table for the elements of the shard from ``start`` on."""
        if start == 0:
            return self.table
        table = self.table.clone()
        table[:, FIRST] += start
        return table


class _Dim(NamedTuple):
    size: int
    row: int  # how far the row advances from one index to the next
    column: int


class MarginPiece(NamedTuple):
    """Elements [start, stop) of one param, whose squares are added to the sums of its rows and columns.

    Attributes:
        grad: their gradient, 1D in storage order.
        rows, columns: sums, 1D float64, on the gradient's device.
    """

    grad: torch.Tensor
    start: int
    geometry: Geometry
    rows: torch.Tensor
    columns: torch.Tensor


class Geometry(NamedTuple):
    """How the rows and columns of one param lie in its storage order.

    Attributes:
        columns: a row of the table from ``RUN`` on.
        outer_is_row: True if the outer is the row.
        rows: how many there are, of all matrices.
        shape, strides: of the param.
    """

    columns: tuple[int, ...]
    outer_is_row: bool
    rows: int
    num_columns: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def runs(self) -> int:
        """How many runs a matrix has, if its sums are added up in bands and spans; else 0."""
        return self.columns[RUNS - RUN]


def geometry_of(shape: Sequence[int], strides: Sequence[int]) -> Geometry:
    """Returns the geometry of a dense param of two dimensions or more.

    Raises:
        ShardoptError: more dimensions lie apart from each other than the table has room for.
    """
    dims = _dims(shape, strides)
    run = dims.pop() if dims else _Dim(1, 0, 1)
    if len(dims) > MAX_DIMS:
        raise ShardoptError(
            f"make params of shape {tuple(shape)} contiguous before the first step: their {len(dims) + 1} dimensions "
            f"lie in an order of memory in which rows and columns cannot be found, with room for {MAX_DIMS + 1}."
        )
    outer_is_row = run.row == 0 or run.column != 0
    pairs = [(each.row, each.column) if outer_is_row else (each.column, each.row) for each in (run, *dims)]
    slower = [(each.size, *pair) for each, pair in zip(reversed(dims), reversed(pairs[1:]), strict=True)]
    runs = shape[-2] if outer_is_row else shape[-1]
    is_cut = pairs[0] == (0, 1) and max(runs, run.size) > _SHORT
    columns = [run.size, *pairs[0], runs if is_cut else 0, len(dims), *(number for each in slower for number in each)]
    columns += [0] * (COLUMNS - RUN - len(columns))
    rows, num_columns = math.prod(shape[:-1]), math.prod(shape[:-2]) * shape[-1]
    return Geometry(tuple(columns), outer_is_row, rows, num_columns, tuple(shape), tuple(strides))


def _dims(shape: Sequence[int], strides: Sequence[int]) -> list[_Dim]:
    """Returns the dimensions from the slowest to the fastest, those that advance alike as one."""
    last = len(shape) - 1
    rows = [math.prod(shape[at + 1 : last]) if at < last else 0 for at in range(len(shape))]
    columns = [shape[last] * math.prod(shape[at + 1 : last - 1]) for at in range(last - 1)] + [0, 1]
    order = sorted((at for at, size in enumerate(shape) if size > 1), key=lambda at: -strides[at])
    dims: list[_Dim] = []
    for at in order:
        each = _Dim(shape[at], rows[at], columns[at])
        if dims and (dims[-1].row, dims[-1].column) == (each.row * each.size, each.column * each.size):
            each = each._replace(size=dims.pop().size * each.size)
        dims.append(each)
    return dims
