"""Sums of squares of a gradient over rows and columns, in float64, in native code; see ``products.py``.

A run adds to one sum and to as many as it has elements. The one is that of a row of a contiguous param: its elements
are added in 64 lanes on the stack, which is as fast as LLVM's vectors, and always in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from numba import njit, types

from .native_words import COMPILE_OPTIONS, FORMATS, TABLE, load_f64, load_i64, scratch_i32, store_f64
from .products import DIMS, FIRST, INNER, INNER_STEP, OUTER, OUTER_STEP, RUN, SLOWER

if TYPE_CHECKING:
    from .formats import Format

_LANES = 64
_LANE_WORDS = 2 * _LANES  # of 32 bits
_LONG = 4 * _LANES  # elements of a run, from which on the lanes are worth their end


@functools.cache
def compile_margin_sums(grad: Format) -> Callable[..., None]:
    """Compiles ``(count, grad_at, place, unscale, clip)``; ``place`` is the address of one row of the table."""
    load, widen, _, _ = FORMATS[grad.name]
    f64, i64 = types.float64, types.int64

    def margin_sums(count, grad_at, place, unscale, clip):
        lanes = scratch_i32(_LANE_WORDS)
        first, run, dims = load_i64(place, FIRST, TABLE), load_i64(place, RUN, TABLE), load_i64(place, DIMS, TABLE)
        outer_at, inner_at = load_i64(place, OUTER, TABLE), load_i64(place, INNER, TABLE)
        outer_step, inner_step = load_i64(place, OUTER_STEP, TABLE), load_i64(place, INNER_STEP, TABLE)
        at = i64(0)
        while at < count:
            number = (at + first) // run
            inside = at + first - number * run
            outer, inner = inside * outer_step, inside * inner_step
            for dim in range(dims):
                slower = i64(SLOWER) + i64(3) * dim
                size = load_i64(place, slower, TABLE)
                digit = number % size
                number = number // size
                outer += digit * load_i64(place, slower + 1, TABLE)
                inner += digit * load_i64(place, slower + 2, TABLE)
            length = min(run - inside, count - at)
            if outer_step != 0 or inner_step != 1:
                for i in range(length):
                    scaled = f64(widen(load(grad_at, at + i, 0)) * unscale * clip)
                    square = scaled * scaled
                    into = outer + i * outer_step
                    store_f64(outer_at, into, load_f64(outer_at, into, 1) + square, 1)
                    into = inner + i * inner_step
                    store_f64(inner_at, into, load_f64(inner_at, into, 2) + square, 2)
                at += length
                continue
            total, done = f64(0.0), i64(0)
            if length >= _LONG:
                for lane in range(_LANES):
                    store_f64(lanes, lane, 0.0, 3)
                done = length // _LANES * _LANES
                for base in range(0, done, _LANES):
                    for lane in range(_LANES):
                        scaled = f64(widen(load(grad_at, at + base + lane, 0)) * unscale * clip)
                        square = scaled * scaled
                        into = inner + base + lane
                        store_f64(inner_at, into, load_f64(inner_at, into, 2) + square, 2)
                        store_f64(lanes, lane, load_f64(lanes, lane, 3) + square, 3)
                for lane in range(_LANES):
                    total += load_f64(lanes, lane, 3)
            for i in range(done, length):
                scaled = f64(widen(load(grad_at, at + i, 0)) * unscale * clip)
                square = scaled * scaled
                total += square
                store_f64(inner_at, inner + i, load_f64(inner_at, inner + i, 2) + square, 2)
            store_f64(outer_at, outer, load_f64(outer_at, outer, 1) + total, 1)
            at += length

    signature = types.void(*[types.int64] * 3, *[types.float32] * 2)
    return njit(signature, **COMPILE_OPTIONS)(margin_sums)  # type: ignore[no-any-return]
