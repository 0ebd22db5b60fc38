"""Native twin of the block sums; ``reductions.py`` says what they are."""

import functools
from collections.abc import Callable

import numba
from numba import njit, types

from .formats import Format
from .native_words import (
    COMPILE_OPTIONS,
    FORMATS,
    TABLE,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    to_bits,
)
from .tables import BLOCK


@functools.cache
def compile_block_sums(grad: Format) -> Callable[..., None]:
    """The kernel ``(first, last, row_of_block, rows, unscale, mantissa, exponent, largest, nonfinite)``."""
    load, widen, _, _ = FORMATS[grad.name]
    widen = widen or _same
    i32, u32, i64 = types.int32, types.uint32, types.int64

    def block_sums(first, last, row_of_block, rows, unscale, mantissa, exponent, largest, nonfinite):
        for block in range(first, last):
            row = load_i32(row_of_block, block, TABLE)
            start = block * BLOCK
            stop = start + min(load_i64(rows, row * 2 + 1, TABLE) - start, BLOCK)
            grad_at = load_i64(rows, row * 2, TABLE)
            top = i32(0)
            bad = i32(0)
            for i in range(start, stop):
                bits = to_bits(widen(load(grad_at, i, 0)) * unscale) & i32(0x7FFFFFFF)
                finite = bits < i32(0x7F800000)
                bad += i32(0) if finite else i32(1)
                top = max(top, bits if finite else i32(0))
            grid = max(top >> i32(23), i32(1))
            total = i64(0)
            for i in range(start, stop):
                bits = to_bits(widen(load(grad_at, i, 0)) * unscale) & i32(0x7FFFFFFF)
                bits = bits if bits < i32(0x7F800000) else i32(0)
                raised = max(bits >> i32(23), i32(1))
                whole = (bits & i32(0x7FFFFF)) | (i32(0x800000) if bits > i32(0x7FFFFF) else i32(0))
                q = u32(whole << i32(3)) >> u32(min(grid - raised, i32(31)))
                total += i64(q) * i64(q)
            store_i64(mantissa, block, total, 1)
            store_i32(exponent, block, grid, 2)
            store_i32(largest, block, top, 3)
            store_i32(nonfinite, block, bad, 4)

    signature = types.void(*[types.int64] * 4, types.float32, *[types.int64] * 4)
    return njit(signature, **COMPILE_OPTIONS)(block_sums)  # type: ignore[no-any-return]


@functools.cache
def compile_count_nonfinite(grad: Format) -> Callable[..., None]:
    """The kernel ``(first, last, row_of_block, rows, counts)``."""
    load, widen, _, _ = FORMATS[grad.name]
    widen = widen or _same
    i32 = types.int32

    def count_nonfinite(first, last, row_of_block, rows, counts):
        for block in range(first, last):
            row = load_i32(row_of_block, block, TABLE)
            start = block * BLOCK
            stop = start + min(load_i64(rows, row * 2 + 1, TABLE) - start, BLOCK)
            grad_at = load_i64(rows, row * 2, TABLE)
            bad = i32(0)
            for i in range(start, stop):
                bad += i32((to_bits(widen(load(grad_at, i, 0))) & i32(0x7FFFFFFF)) >= i32(0x7F800000))
            store_i32(counts, block, bad, 1)

    signature = types.void(*[types.int64] * 5)
    return numba.njit(signature, **COMPILE_OPTIONS)(count_nonfinite)  # type: ignore[no-any-return]


@njit(**COMPILE_OPTIONS)
def _same(x):
    return x
