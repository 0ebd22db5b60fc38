"""Totals and counts in Triton; ``reductions.py`` defines them.

A program takes a few blocks: it loads all of them before it looks at the first one, and adds what it found to the
totals once, unless a param ends among them. Additions and maxima of integers are atomic, and of the same bits in
whatever order programs come to them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from .reductions import COLUMNS, LARGEST, LIMB_BITS, NONFINITE
from .tables import BLOCK, Factors, Gradients, sent
from .triton_streams import GRAD_TYPES, on
from .triton_words import widen

if TYPE_CHECKING:
    from .formats import Format

# Blocks of 256 that one program reads. Each addition to a param's totals waits for the one before it, wherever it comes
# from: one for every block would take longer than reading does.
BLOCKS_PER_PROGRAM = 4
NUM_WARPS = 1
LANES = 32  # the power of two at which a row of totals fits


@triton.jit
def load_gradients(
    row_of_block_ptr,
    rows_ptr,
    num_blocks,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Returns the rows of this program's blocks, and their gradients [BLOCK] or zeros: tuples of BLOCKS."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    rows = ()
    starts = ()
    ends = ()
    for index in tl.static_range(BLOCKS):
        inside = first + index < num_blocks
        row = tl.load(row_of_block_ptr + first + index, mask=inside, other=0).to(tl.int64)
        rows = rows + (row,)  # noqa: RUF005
        starts = starts + ((first + index) * BLOCK,)  # noqa: RUF005
        ends = ends + (tl.where(inside, tl.load(rows_ptr + row * 2 + 1), 0),)  # noqa: RUF005
    grads = ()
    for index in tl.static_range(BLOCKS):
        offsets = starts[index] + tl.arange(0, BLOCK)
        grad_ptrs = tl.load(rows_ptr + rows[index] * 2).to(tl.pointer_type(GRAD_TYPE)) + offsets
        if ALIGNED:
            grad_ptrs = tl.max_contiguous(tl.multiple_of(grad_ptrs, 16), BLOCK)
        # Gradients are not padded: only a block that holds the end of a param pays for masks element by element.
        if starts[index] + BLOCK <= ends[index]:
            grad = tl.load(grad_ptrs)
        else:
            grad = tl.load(grad_ptrs, mask=offsets < ends[index], other=0)
        grads = grads + (grad,)  # noqa: RUF005
    return rows, grads


@triton.jit
def sums_of(grad, factor, divisor, unscale, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """Returns what ``BlockSums`` holds of one block [BLOCK]: mantissa, exponent, largest, nonfinite."""
    if factor != 0.0:  # noqa: SIM108  decided when it runs
        scaled = widen(grad, GRAD) * factor
    else:
        scaled = tl.div_rn(widen(grad, GRAD), divisor) * unscale
    bits = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Maxima and integer sums: the same in whatever order the hardware takes them.
    top = tl.max(bits, axis=0)
    nonfinite = 0
    if top >= 0x7F800000:
        finite = bits < 0x7F800000
        bits = tl.where(finite, bits, 0)
        top = tl.max(bits, axis=0)
        nonfinite = tl.sum(tl.where(finite, 0, 1), axis=0)
    grid = tl.maximum(top >> 23, 1)
    # 2**(153 - grid), in two factors where it passes fp32's range; both products are exact.
    raised = 153 - grid
    first_factor = ((tl.minimum(raised, 127) + 127) << 23).to(tl.float32, bitcast=True)
    magnitude = bits.to(tl.float32, bitcast=True) * first_factor
    if raised > 127:
        magnitude = magnitude * (raised << 23).to(tl.float32, bitcast=True)
    q = magnitude.to(tl.int32).to(tl.int64)  # truncates
    return sum_of_squares(q, BLOCK), grid, top, nonfinite


@triton.jit
def sum_of_squares(q, BLOCK: tl.constexpr):
    """Returns the sum over a block of what is below 2**27: below 2**57 of 8 elements, whose 3 words of 27 bits each
    are added over 32 lanes in one instruction.
    """
    sums = tl.sum(tl.reshape(q * q, (BLOCK // 8, 8)), axis=1)
    low = tl.sum((sums & 0x7FFFFFF).to(tl.uint32), axis=0).to(tl.int64)
    middle = tl.sum(((sums >> 27) & 0x7FFFFFF).to(tl.uint32), axis=0).to(tl.int64)
    high = tl.sum((sums >> 54).to(tl.uint32), axis=0).to(tl.int64)
    return low + (middle << 27) + (high << 54)


@triton.jit
def row_of_block_sums(
    mantissa,
    exponent,
    nonfinite,
    NONFINITE: tl.constexpr,
    LIMB_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Returns what one block adds to the columns of its row [LANES] int64; all but the largest magnitude."""
    column = tl.arange(0, LANES)
    # The mantissa, of up to 62 bits, begins at this bit of the limbs: each takes what lies in its own bits.
    above = column * LIMB_BITS - (2 * tl.maximum(exponent, 1) - 2)
    from_below = mantissa >> tl.minimum(tl.maximum(above, 0), 63).to(tl.int64)
    from_above = mantissa << tl.minimum(tl.maximum(-above, 0), LIMB_BITS - 1).to(tl.int64)
    added = tl.where(above >= 0, from_below, from_above) & ((1 << LIMB_BITS) - 1)
    added = tl.where(above > -LIMB_BITS, added, 0)
    return tl.where(column == NONFINITE, nonfinite.to(tl.int64), added)


@triton.jit
def add_to_row(totals_ptr, row, added, top, COLUMNS: tl.constexpr, LARGEST: tl.constexpr, LANES: tl.constexpr):
    """Adds to the columns of one row; zeros are passed over."""
    column = tl.arange(0, LANES)
    ptrs = totals_ptr + row * COLUMNS + column
    tl.atomic_add(ptrs, added, mask=added != 0, sem="relaxed")
    tl.atomic_max(
        ptrs, tl.where(column == LARGEST, top, 0).to(tl.int64), mask=(column == LARGEST) & (top > 0), sem="relaxed"
    )


@triton.jit(do_not_specialize=["num_blocks", "factor", "divisor", "unscale"])
def totals_kernel(
    row_of_block_ptr,  # [num_blocks] int32
    rows_ptr,  # [num_rows, 2] int64
    totals_ptr,  # [num_rows, COLUMNS] int64
    num_blocks,
    factor,  # fp32, as the next: unscale / divisor where one product is exactly what the two operations give, else 0
    divisor,
    unscale,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    NONFINITE: tl.constexpr,
    LIMB_BITS: tl.constexpr,
    LANES: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    rows, grads = load_gradients(
        row_of_block_ptr, rows_ptr, num_blocks, GRAD_TYPE=GRAD_TYPE, ALIGNED=ALIGNED, BLOCK=BLOCK, BLOCKS=BLOCKS
    )
    others = 0  # blocks of another row than the first one
    for index in tl.static_range(BLOCKS):
        others += (rows[index] != rows[0]).to(tl.int32)
    sum = tl.zeros([LANES], tl.int64)
    largest = 0
    for index in tl.static_range(BLOCKS):
        mantissa, exponent, top, nonfinite = sums_of(grads[index], factor, divisor, unscale, GRAD, BLOCK)
        added = row_of_block_sums(mantissa, exponent, nonfinite, NONFINITE, LIMB_BITS, LANES)
        if others == 0:
            sum += added
            largest = tl.maximum(largest, top)
        else:
            add_to_row(totals_ptr, rows[index], added, top, COLUMNS, LARGEST, LANES)
    if others == 0:
        add_to_row(totals_ptr, rows[0], sum, largest, COLUMNS, LARGEST, LANES)


@triton.jit(do_not_specialize=["num_blocks"])
def count_nonfinite_kernel(
    row_of_block_ptr,  # [num_blocks] int32
    rows_ptr,  # [num_rows, 2] int64
    count_ptr,  # [1] int64
    num_blocks,
    LANES: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    _, grads = load_gradients(
        row_of_block_ptr, rows_ptr, num_blocks, GRAD_TYPE=GRAD_TYPE, ALIGNED=ALIGNED, BLOCK=BLOCK, BLOCKS=BLOCKS
    )
    bad = tl.zeros([BLOCK], tl.int32)
    for index in tl.static_range(BLOCKS):
        bits = widen(grads[index], GRAD).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bad += tl.where(bits < 0x7F800000, 0, 1)
    count, lane = tl.sum(bad, axis=0), tl.arange(0, LANES)
    added = tl.where(lane == 0, count, 0).to(tl.int64)
    tl.atomic_add(count_ptr + tl.zeros([LANES], tl.int32), added, mask=added > 0, sem="relaxed")


def add_totals(grad: Format, gradients: Gradients, factors: Factors, totals: torch.Tensor) -> None:
    # Floats: Triton would compile the kernel again for an int.
    numbers = (_factor(factors), float(factors.divisor), float(factors.unscale))
    columns = {"COLUMNS": COLUMNS, "LARGEST": LARGEST, "NONFINITE": NONFINITE, "LIMB_BITS": LIMB_BITS}
    _launch(totals_kernel, grad, gradients, totals, gradients.num_blocks, *numbers, **columns)


def _factor(factors: Factors) -> float:
    """Returns the one factor of which a product is ``grad / divisor * unscale`` to the bit, or 0 if there is none."""
    if factors.divisor == 1:
        return float(factors.unscale)
    is_power_of_two = math.frexp(factors.divisor)[0] == 0.5
    return 1 / factors.divisor if is_power_of_two and factors.unscale == 1 else 0.0


def count_nonfinite(grad: Format, gradients: Gradients, count: torch.Tensor) -> None:
    _launch(count_nonfinite_kernel, grad, gradients, count, gradients.num_blocks)


def _launch(kernel: Any, grad: Format, gradients: Gradients, *arguments: Any, **constants: int) -> None:
    """Launches once for the whole table, on the current CUDA stream of its device."""
    if gradients.num_blocks == 0:
        return
    with on(gradients.row_of_block.device):
        kernel[(triton.cdiv(gradients.num_blocks, BLOCKS_PER_PROGRAM),)](
            gradients.row_of_block,
            sent(gradients.rows, gradients.row_of_block.device),
            *arguments,
            **constants,
            LANES=LANES,
            GRAD=grad.name,
            GRAD_TYPE=GRAD_TYPES[grad.name],
            ALIGNED=gradients.aligned,
            BLOCK=BLOCK,
            BLOCKS=BLOCKS_PER_PROGRAM,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
