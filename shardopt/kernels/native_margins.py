"""Sums of squares of a gradient over rows and columns, in float64, in native code; ``products.py`` has their order.

Elements are read once, in storage order. A span is squared onto the stack, where it is folded, and added to the sums of
its band, which are added to the inner sums when the next band begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import types

from .native_words import FORMATS, TABLE, folded, load_f64, load_i64, scratch_i32, store_f64
from .products import BAND, DIMS, FIRST, INNER, INNER_STEP, OUTER, OUTER_STEP, RUN, RUNS, SLOWER, SPAN

if TYPE_CHECKING:
    from .formats import Format

_SPAN_WORDS = 2 * SPAN  # of 32 bits
_SHORT = SPAN // 4  # elements of a span that are folded where all others would be zeros


def margin_sums(grad: Format) -> Callable[..., Any]:
    """Returns ``(count, grad_at, place, band_at, unscale, clip)``; ``place`` is the address of one row of the table.

    ``band_at`` is that of as many zeros as there are inner sums: what it holds in the end has yet to be added to these.
    """
    load, widen, _, _ = FORMATS[grad.name]
    f64, i64 = types.float64, types.int64

    def margin_sums(count, grad_at, place, band_at, unscale, clip):
        span_at = scratch_i32(_SPAN_WORDS)
        first, run, dims = load_i64(place, FIRST, TABLE), load_i64(place, RUN, TABLE), load_i64(place, DIMS, TABLE)
        outer_at, inner_at = load_i64(place, OUTER, TABLE), load_i64(place, INNER, TABLE)
        outer_step, inner_step = load_i64(place, OUTER_STEP, TABLE), load_i64(place, INNER_STEP, TABLE)
        runs = load_i64(place, RUNS, TABLE)
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
            if runs == 0:
                for i in range(length):
                    scaled = f64(widen(load(grad_at, at + i, 0)) * unscale * clip)
                    square = scaled * scaled
                    into = outer + i * outer_step
                    store_f64(outer_at, into, load_f64(outer_at, into, 1) + square, 1)
                    into = inner + i * inner_step
                    store_f64(inner_at, into, load_f64(inner_at, into, 2) + square, 2)
                at += length
                continue
            index = outer % runs
            if index > 0 and index % BAND == 0:  # of the band before
                for into in range(inner - inside, inner - inside + run):
                    store_f64(inner_at, into, load_f64(inner_at, into, 2) + load_f64(band_at, into, 3), 2)
                    store_f64(band_at, into, 0.0, 3)
            total = load_f64(outer_at, outer, 1)
            done = i64(0)
            while done < length:
                low = (inside + done) % SPAN
                begin = inside + done - low
                high = min(low + length - done, i64(SPAN))
                width = min(run - begin, i64(SPAN))
                from_grad, from_band = at + done - low, inner + done - low
                for i in range(low):
                    store_f64(span_at, i, 0.0, 4)
                for i in range(low, high):
                    scaled = f64(widen(load(grad_at, from_grad + i, 0)) * unscale * clip)
                    square = scaled * scaled
                    store_f64(band_at, from_band + i, load_f64(band_at, from_band + i, 3) + square, 3)
                    store_f64(span_at, i, square, 4)
                if width <= _SHORT:
                    for i in range(high, _SHORT):
                        store_f64(span_at, i, 0.0, 4)
                    total += folded(span_at, _SHORT, 4)
                else:
                    for i in range(high, SPAN):
                        store_f64(span_at, i, 0.0, 4)
                    total += folded(span_at, SPAN, 4)
                done += high - low
            store_f64(outer_at, outer, total, 1)
            at += length

    return margin_sums
