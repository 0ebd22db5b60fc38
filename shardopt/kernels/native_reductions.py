"""Block sums, as Numba compiles them; ``reductions.py`` defines them, ``native_sums.py`` has them compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import njit, types

from ..compilers.native import COMPILE_OPTIONS
from .formats import FP32
from .native_formats import decode_signed, decode_unsigned
from .native_words import (
    BYTES_BY_TURNS,
    FORMATS,
    TABLE,
    both,
    differ,
    either,
    from_bits,
    in_wide_vectors,
    larger,
    largest_magnitude,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    scratch_i32,
    store_f32,
    store_i32,
    store_i64,
    sum_of_squares,
    to_bits,
)
from .reductions import COLUMNS, LARGEST, LIMB_BITS, NONFINITE
from .tables import BLOCK

if TYPE_CHECKING:
    from .formats import BlockFormat, Format

_INFINITY = {"fp32": 0x7F800000, "bf16": 0x7F80, "fp16": 0x7C00}  # bits, by the format of a gradient


def block_sums(grad: Format) -> Callable[..., Any]:
    """Returns ``(first, last, row_of_block, rows, divisor, unscale, mantissa, exponent, largest, nonfinite)``.

    Two things keep its loops in full vectors: ``both`` and ``larger``, where Numba's own operators widen int32 to
    int64; and loops of their own for Inf, NaN, and blocks of such small numbers that they take two factors.
    """
    load, widen, _, _ = FORMATS[grad.name]
    f32, i32 = types.float32, types.int32

    def block_sums(first, last, row_of_block, rows, divisor, unscale, mantissa, exponent, largest, nonfinite):
        scaled = scratch_i32(BLOCK)  # bits of one block's magnitudes: divided once, read twice
        for block in range(first, last):
            row = load_i32(row_of_block, block, TABLE)
            start = block * BLOCK
            count = max(min(load_i64(rows, row * 2 + 1, TABLE) - start, BLOCK), 0)
            grad_at = load_i64(rows, row * 2, TABLE)
            top = i32(0)
            bad = i32(0)
            for i in range(count):
                value = widen(load(grad_at, start + i, 0))
                if divisor != f32(1.0):
                    value = value / divisor
                bits = both(to_bits(value * unscale), i32(0x7FFFFFFF))
                top = larger(top, bits)
                store_i32(scaled, i, bits, 5)
            if top >= i32(0x7F800000):
                top = i32(0)
                for i in range(count):
                    bits = load_i32(scaled, i, 5)
                    finite = bits < i32(0x7F800000)
                    bad += i32(0) if finite else i32(1)
                    bits = bits if finite else i32(0)
                    top = larger(top, bits)
                    store_i32(scaled, i, bits, 5)
            grid = max(top >> i32(23), i32(1))
            # 2**(153 - grid), in two factors because it can pass fp32's range; both products are exact.
            raised = i32(153) - grid
            if raised > i32(127):
                second_factor = from_bits(raised << i32(23))
                for i in range(count):
                    store_f32(scaled, i, load_f32(scaled, i, 5) * second_factor, 5)
            for i in range(count, BLOCK):
                store_i32(scaled, i, i32(0), 5)
            first_factor = from_bits((min(raised, i32(127)) + i32(127)) << i32(23))
            store_i64(mantissa, block, sum_of_squares(scaled, first_factor, BLOCK, 5), 1)
            store_i32(exponent, block, grid, 2)
            store_i32(largest, block, top, 3)
            store_i32(nonfinite, block, bad, 4)

    return block_sums


def add_blocks() -> Callable[..., Any]:
    """Returns ``(num_blocks, row_of_block, mantissa, exponent, largest, nonfinite, totals)``; it adds to totals."""
    low_mask = (1 << LIMB_BITS) - 1
    i64 = types.int64

    def add_blocks(num_blocks, row_of_block, mantissa, exponent, largest, nonfinite, totals):
        for block in range(num_blocks):
            row_at = i64(load_i32(row_of_block, block, TABLE)) * i64(COLUMNS)
            bit = i64(2) * max(i64(load_i32(exponent, block, 1)), i64(1)) - i64(2)
            limb, shift = row_at + (bit >> i64(5)), bit & i64(31)
            total = load_i64(mantissa, block, 2)
            low, high = (total & low_mask) << shift, (total >> i64(LIMB_BITS)) << shift
            store_i64(totals, limb, load_i64(totals, limb, 5) + (low & low_mask), 5)
            middle = (low >> i64(LIMB_BITS)) + (high & low_mask)
            store_i64(totals, limb + 1, load_i64(totals, limb + 1, 5) + middle, 5)
            store_i64(totals, limb + 2, load_i64(totals, limb + 2, 5) + (high >> i64(LIMB_BITS)), 5)
            top = max(load_i64(totals, row_at + LARGEST, 5), i64(load_i32(largest, block, 3)))
            store_i64(totals, row_at + LARGEST, top, 5)
            bad = load_i64(totals, row_at + NONFINITE, 5) + i64(load_i32(nonfinite, block, 4))
            store_i64(totals, row_at + NONFINITE, bad, 5)

    return add_blocks


def count_nonfinite(grad: Format) -> Callable[..., Any]:
    """Returns ``(first, last, row_of_block, rows, counts)``.

    The blocks of one row are looked at in one loop, whose start and end cost as much as half a block; they are counted
    one by one only where the largest magnitude is not finite. Their count is stored at the first of the blocks; the
    other counts stay what they are.
    """
    load, widen, _, _ = FORMATS[grad.name]
    i32, itemsize = types.int32, grad.itemsize
    infinity, at_once = _INFINITY[grad.name], BYTES_BY_TURNS // itemsize

    @njit(**COMPILE_OPTIONS)
    def count(grad_at, start, stop):
        bad = i32(0)
        for i in range(start, stop):
            bad += i32((to_bits(widen(load(grad_at, i, 0))) & i32(0x7FFFFFFF)) >= i32(0x7F800000))
        return bad

    def count_nonfinite(first, last, row_of_block, rows, counts):
        in_wide_vectors()
        block = first
        while block < last:
            row = load_i32(row_of_block, block, TABLE)
            start, end = block * BLOCK, load_i64(rows, row * 2 + 1, TABLE)
            following = min(max((end + BLOCK - 1) // BLOCK, block + 1), last)  # a row of no gradient ends at 0
            grad_at = load_i64(rows, row * 2, TABLE)
            stop = min(end, following * BLOCK)
            lines = max(stop - start, 0) // at_once
            rest = start + lines * at_once
            bad = count(grad_at, rest, stop)
            if lines > 0 and largest_magnitude(grad_at + start * itemsize, lines, itemsize, 0) >= infinity:
                bad += count(grad_at, start, rest)
            store_i32(counts, block, bad, 1)
            block = following

    return count_nonfinite


def is_decoded(kept: Format, format: BlockFormat) -> Callable[..., Any]:
    """Returns ``(first, last, shown, codes, scales, apart)``: stores, at the first block, bits other than 0 if any
    element of these blocks is not what its code stands for, to the bit."""
    load, _, _, narrow = FORMATS[kept.name]
    decode = decode_signed if format.has_sign else decode_unsigned
    shift, offset_bits, offset, bits = format.shift, format.offset_bits, format.offset, format.bits
    assert bits == 8
    i32 = types.int32
    bits_of = to_bits if kept is FP32 else i32

    def is_decoded(first, last, shown, codes, scales, apart):
        found = i32(0)
        for block in range(first, last):
            scale = load_f32(scales, block, TABLE)
            for i in range(block * BLOCK, block * BLOCK + BLOCK):
                value = decode(load_u8(codes, i, 1), scale, shift, offset_bits, offset, bits)
                found = either(found, differ(bits_of(load(shown, i, 0)), bits_of(narrow(value))))
        store_i32(apart, first, found, TABLE)

    return is_decoded
