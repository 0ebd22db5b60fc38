"""Sums of squares of a gradient over rows and columns, in float64, in Triton; ``products.py`` has their order.

A program takes one span of each run of a band. It writes one number for each run and one for each column of the span:
parts, which a second kernel adds to the sums in the order of spans and of bands. So nothing is atomic, and each element
is read once. The parts take 8 bytes for every 128 elements and for every 512.

Matrices without bands have a kernel of their own, in which a lane adds up all of a row, or of a column.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .formats import format_of
from .products import BAND, MAX_DIMS, SPAN, Geometry, MarginPiece, geometry_of
from .tables import Factors, sent_together
from .triton_streams import GRAD_TYPES, on
from .triton_words import widen

if TYPE_CHECKING:
    from .formats import Format

    Array = np.ndarray[Any, Any]

NUM_WARPS = 1
RUNS_AT_ONCE = 2  # whose loads are on their way together; divides a band
SUMS = 256  # that one program adds parts to, or elements one by one

# A piece in bands, int64: address of the param's element 0, its elements [start, stop), the outer and inner side of a
# matrix, elements from one run to the next, the first band of all matrices and how many the piece has, addresses of the
# parts. Then, as in the next table, dimensions: how many, and of each size and stride, the fastest first.
PIECE = ("grad", "start", "stop", "runs", "run", "stride", "first_band", "bands", "outer_parts", "inner_parts", "dims")
# The rows, or the columns, of a piece without bands: likewise; how many there are, elements of each and the stride.
SIDE = ("grad", "start", "stop", "count", "size", "stride", "sums", "dims")
# Parts: address of the sums, how many, address of the first part, parts of a sum and sums from one to the next.
PARTS = ("sums", "count", "parts", "terms", "step")
_DIMS = 2 * (MAX_DIMS + 1)


@triton.jit
def row_of_program(table_ptr, programs_ptr, COLUMNS: tl.constexpr, DIMS: tl.constexpr):
    """Returns the row of a table that a program works on, as a tuple, and its number among the programs of this row.

    Between the two: where the sizes and strides of its dimensions are, for which a row has room for ``DIMS`` numbers.
    """
    program = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + tl.load(programs_ptr + program * 2) * (COLUMNS + DIMS)
    row = ()
    for column in tl.static_range(COLUMNS):
        row = row + (tl.load(row_ptr + column),)  # noqa: RUF005
    return row, row_ptr + COLUMNS, tl.load(programs_ptr + program * 2 + 1)


@triton.jit
def place_of(number, dims_ptr, dims):
    """Returns where the element of this number lies, of the dimensions of a row: one number, or a vector."""
    place = number - number
    for dim in range(dims):
        size = tl.load(dims_ptr + 2 * dim)
        place += number % size * tl.load(dims_ptr + 2 * dim + 1)
        number = number // size
    return place


@triton.jit
def squares_of(grad, unscale, clip, GRAD: tl.constexpr):
    scaled = (widen(grad, GRAD) * unscale * clip).to(tl.float64)
    return scaled * scaled


@triton.jit
def folded(x, LENGTH: tl.constexpr):
    """Returns the sum of a span, whose length is ``2**LENGTH``: one half is added to the other, until one is left."""
    # A sum over more than two has an order that Triton chooses.
    for step in tl.static_range(LENGTH - 1):
        x = tl.sum(tl.reshape(x, (2, 1 << (LENGTH - 1 - step))), axis=0)
    return tl.sum(x, axis=0)


@triton.jit(do_not_specialize=["unscale", "clip"])
def margin_parts_kernel(
    pieces_ptr,  # [num_pieces, COLUMNS + DIMS] int64
    programs_ptr,  # [num_programs, 2] int64: row of the table, number of the program among those of this row
    unscale,  # fp32, as the next
    clip,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    LENGTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    piece, dims_ptr, number = row_of_program(pieces_ptr, programs_ptr, COLUMNS, DIMS)
    grad_at, start, stop, runs, run, stride, first_band, num_bands, outer_parts, inner_parts, dims = piece
    spans = (run + SPAN - 1) // SPAN
    band, span = number // spans, number % spans
    bands = (runs + BAND - 1) // BAND  # of a matrix
    matrix, first_run = (first_band + band) // bands, (first_band + band) % bands * BAND
    first = place_of(matrix, dims_ptr, dims) + first_run * stride + span * SPAN
    grad_ptr = grad_at.to(tl.pointer_type(GRAD_TYPE)) + first
    outer_ptr = outer_parts.to(tl.pointer_type(tl.float64)) + (span * num_bands + band) * BAND
    inner_ptr = inner_parts.to(tl.pointer_type(tl.float64)) + band * run + span * SPAN

    place = tl.arange(0, SPAN)
    width = tl.minimum(run - span * SPAN, SPAN)
    count = tl.minimum(runs - first_run, BAND)
    sums = tl.zeros([SPAN], tl.float64)
    for base in range(0, count, AT_ONCE):
        grads = ()
        for index in tl.static_range(AT_ONCE):
            ahead = (base + index) * stride
            low = tl.maximum(tl.minimum(start - first - ahead, SPAN), 0).to(tl.int32)
            high = tl.maximum(tl.minimum(stop - first - ahead, width), 0).to(tl.int32)
            high = tl.where(base + index < count, high, 0)
            grad = tl.load(grad_ptr + ahead + place, mask=(place >= low) & (place < high), other=0)
            grads = grads + (grad,)  # noqa: RUF005
        for index in tl.static_range(AT_ONCE):
            squares = squares_of(grads[index], unscale, clip, GRAD)
            sums += squares
            tl.store(outer_ptr + base + index, folded(squares, LENGTH))
    tl.store(inner_ptr + place, sums, mask=place < width)


@triton.jit
def add_parts_kernel(tasks_ptr, programs_ptr, COLUMNS: tl.constexpr, SUMS: tl.constexpr):
    task, _, number = row_of_program(tasks_ptr, programs_ptr, COLUMNS, 0)
    sums_at, count, parts_at, terms, step = task
    index = number * SUMS + tl.arange(0, SUMS)
    inside = index < count
    sum_ptrs = sums_at.to(tl.pointer_type(tl.float64)) + index
    part_ptrs = parts_at.to(tl.pointer_type(tl.float64)) + index
    total = tl.load(sum_ptrs, mask=inside, other=0)
    for term in range(terms):
        total += tl.load(part_ptrs + term * step, mask=inside, other=0)
    tl.store(sum_ptrs, total, mask=inside)


@triton.jit(do_not_specialize=["unscale", "clip"])
def side_sums_kernel(
    sides_ptr,  # [num_sides, COLUMNS + DIMS] int64
    programs_ptr,  # as above
    unscale,
    clip,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    SUMS: tl.constexpr,
):
    side, dims_ptr, number = row_of_program(sides_ptr, programs_ptr, COLUMNS, DIMS)
    grad_at, start, stop, count, size, stride, sums_at, dims = side
    index = number * SUMS + tl.arange(0, SUMS)
    inside = index < count
    place = place_of(index, dims_ptr, dims)
    grad_ptrs = grad_at.to(tl.pointer_type(GRAD_TYPE)) + place
    sum_ptrs = sums_at.to(tl.pointer_type(tl.float64)) + index
    total = tl.load(sum_ptrs, mask=inside, other=0)
    for number in range(size):
        ahead = number * stride
        here = inside & (place + ahead >= start) & (place + ahead < stop)
        total += squares_of(tl.load(grad_ptrs + ahead, mask=here, other=0), unscale, clip, GRAD)
    tl.store(sum_ptrs, total, mask=inside)


# -- tables ------------------------------------------------------------------------------------------------------------


class _Sides(NamedTuple):
    """The sides of a param's matrices, as its geometry has them, and the dimensions before: (size, stride)."""

    outer: tuple[int, int]
    inner: tuple[int, int]
    matrices: tuple[tuple[int, int], ...]  # the slowest first; of two that lie as one, one


@functools.cache
def _sides(geometry: Geometry) -> _Sides:
    sizes = list(zip(geometry.shape, geometry.strides, strict=True))
    matrices: list[tuple[int, int]] = []
    for size, stride in sizes[:-2]:
        if matrices and matrices[-1][1] == size * stride:
            size *= matrices.pop()[0]
        if size > 1:
            matrices.append((size, stride))
    row, column = sizes[-2:]
    outer, inner = (row, column) if geometry.outer_is_row else (column, row)
    return _Sides(outer, inner, tuple(matrices))


def _with_dims(row: Sequence[int], dims: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a row of a table with these dimensions, the slowest of which is the first here."""
    numbers = [number for each in reversed(dims) for number in each]
    return [*row, len(dims), *numbers, *[0] * (_DIMS - len(numbers))]


class _Tables:
    """What the three kernels are told of the pieces of one launch each."""

    def __init__(self, pieces: Sequence[MarginPiece]) -> None:
        self.in_bands: list[list[int]] = []
        self.sides: list[list[int]] = []
        self.tasks: list[Array] = []
        self.programs: dict[str, list[int]] = defaultdict(list)  # of each row, by the name of its table
        self.scratch: list[torch.Tensor] = []
        for each in pieces:
            outer, inner = (each.rows, each.columns) if each.geometry.outer_is_row else (each.columns, each.rows)
            grad_at = each.grad.data_ptr() - each.start * each.grad.element_size()
            where = [grad_at, each.start, each.start + each.grad.numel()]
            if each.geometry.runs:
                self._add_bands(each, where, outer, inner)
            else:
                self._add_sides(_sides(each.geometry), where, outer, inner)

    def _add_bands(self, each: MarginPiece, where: list[int], outer: torch.Tensor, inner: torch.Tensor) -> None:
        sides = _sides(each.geometry)
        (runs, stride), (run, _) = sides.outer, sides.inner
        bands, spans = -(-runs // BAND), -(-run // SPAN)
        first, last = _bands_of(sides, each.start, where[2])
        count = last - first
        outer_parts, inner_parts = (
            torch.empty(size, dtype=torch.float64, device=each.grad.device)
            for size in (spans * count * BAND, count * run)
        )
        self.scratch += [outer_parts, inner_parts]
        at = [outer_parts.data_ptr(), inner_parts.data_ptr()]
        self.in_bands.append(_with_dims([*where, runs, run, stride, first, count, *at], sides.matrices))
        self.programs["bands"].append(count * spans)
        # Of each matrix the bands [begin, end) that the piece has.
        matrices = np.arange(first // bands, -(-last // bands), dtype=np.int64)
        begin, end = np.maximum(matrices * bands, first), np.minimum((matrices + 1) * bands, last)
        first_run = (begin - matrices * bands) * BAND
        of_outer = np.empty((len(matrices), len(PARTS)), np.int64)
        of_outer[:, 0] = outer.data_ptr() + 8 * (matrices * runs + first_run)
        of_outer[:, 1] = np.minimum(runs - first_run, (end - begin) * BAND)
        of_outer[:, 2] = at[0] + 8 * BAND * (begin - first)
        of_outer[:, 3:] = spans, count * BAND
        of_inner = np.empty_like(of_outer)
        of_inner[:, 0] = inner.data_ptr() + 8 * run * matrices
        of_inner[:, 1] = run
        of_inner[:, 2] = at[1] + 8 * run * (begin - first)
        of_inner[:, 3] = end - begin
        of_inner[:, 4] = run
        self.tasks += [of_outer, of_inner]

    def _add_sides(self, sides: _Sides, where: list[int], outer: torch.Tensor, inner: torch.Tensor) -> None:
        for sums, kept, added in ((outer, sides.outer, sides.inner), (inner, sides.inner, sides.outer)):
            self.sides.append(_with_dims([*where, len(sums), *added, sums.data_ptr()], [*sides.matrices, kept]))
            self.programs["sides"].append(-(-len(sums) // SUMS))


def _bands_of(sides: _Sides, start: int, stop: int) -> tuple[int, int]:
    """Returns the first band of all matrices that holds any of the elements [start, stop), and the one after the last.

    All bands, where matrices do not lie one behind the other.
    """
    (runs, stride), (run, _), matrices = sides
    bands = -(-runs // BAND)
    if stride != run or (matrices and (len(matrices) > 1 or matrices[0][1] != runs * run)):
        return 0, bands * math.prod(size for size, _ in matrices)
    first, last = ((at // (runs * run)) * bands + at // run % runs // BAND for at in (start, stop - 1))
    return first, last + 1


def _programs(counts: Sequence[int] | Array) -> torch.Tensor:
    """Returns the row of each program and its number: as many programs for each row as it counts; 2D int64."""
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return torch.from_numpy(np.stack([rows, np.arange(len(rows)) - firsts[rows]], axis=1))


# -- launches ----------------------------------------------------------------------------------------------------------


def add_margin_sums(pieces: Sequence[MarginPiece], factors: Factors) -> None:
    """Launches up to three kernels for all pieces of one dtype, on the current CUDA stream of their device."""
    assert factors.divisor == 1
    alike: dict[tuple[torch.device, torch.dtype], list[MarginPiece]] = defaultdict(list)
    for each in pieces:
        if each.grad.numel():
            alike[each.grad.device, each.grad.dtype].append(each)
    for (device, dtype), found in alike.items():
        _launch(format_of(dtype, "a gradient"), found, factors, device)


def _launch(grad: Format, pieces: Sequence[MarginPiece], factors: Factors, device: torch.device) -> None:
    tables = _Tables(pieces)
    numbers = float(factors.unscale), float(factors.clip)  # Triton would compile the kernel again for an int
    common = {"GRAD": grad.name, "GRAD_TYPE": GRAD_TYPES[grad.name], "DIMS": _DIMS}
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    cut = {"BAND": BAND, "SPAN": SPAN, "LENGTH": SPAN.bit_length() - 1, "AT_ONCE": RUNS_AT_ONCE}
    with on(device):
        if tables.in_bands:
            tasks = np.concatenate(tables.tasks)
            programs, adding = _programs(tables.programs["bands"]), _programs(-(-tasks[:, 1] // SUMS))
            there = sent_together([torch.tensor(tables.in_bands), programs, torch.from_numpy(tasks), adding], device)
            margin_parts_kernel[(len(programs),)](*there[:2], *numbers, COLUMNS=len(PIECE), **cut, **common, **options)
            add_parts_kernel[(len(adding),)](*there[2:], COLUMNS=len(PARTS), SUMS=SUMS, **options)
        if tables.sides:
            programs = _programs(tables.programs["sides"])
            there = sent_together([torch.tensor(tables.sides), programs], device)
            side_sums_kernel[(len(programs),)](*there, *numbers, COLUMNS=len(SIDE), SUMS=SUMS, **common, **options)


@functools.cache
def prepare_margin_sums(grad: Format, device: torch.device) -> None:
    """Compiles the kernels, by launches over a few zeros."""
    pieces = []
    for shape in ((1, 2 * SPAN), (1, 1)):
        zeros = torch.zeros(math.prod(shape), dtype=grad.dtype, device=device)
        sums = [torch.zeros(size, dtype=torch.float64, device=device) for size in shape]
        pieces.append(MarginPiece(zeros, 0, geometry_of(shape, (shape[1], 1)), *sums))
    add_margin_sums(pieces, Factors())
