"""The backend for the CPU: kernels that Numba compiles, over chunks of the shard on a pool of threads.

Small tables are made in NumPy: a torch operation on a table of some size would wake torch's own threads, which then
spin for milliseconds on the cores that the pool needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .formats import format_of
from .native_step import compile_step
from .native_sums import (
    compile_add_blocks,
    compile_block_sums,
    compile_count_nonfinite,
    compile_is_decoded,
    compile_margin_sums,
)
from .pool import run_each, run_over_blocks
from .reductions import BlockSums

if TYPE_CHECKING:
    from .formats import BlockFormat, Format
    from .products import MarginPiece
    from .spec import Spec
    from .tables import Factors, Gradients, Streams, Tables

joins_shards = False  # a call costs little, and a shard travels to the other ranks once it is updated
# Blocks whose sums are made before they are added up: few enough to take little memory (20 bytes each and measured
# value), enough for all threads, each of which takes BLOCKS_PER_RANGE or more.
_ADDRESS = torch.Tensor.data_ptr
_BLOCKS_SUMMED = 1 << 16


def prepare(spec: Spec, device: torch.device, aligned: bool) -> None:
    for number in range(len(spec.passes)):
        spec.kernels[number] = compile_step(spec, number)


def run(spec: Spec, number: int, streams: Streams, tables: Tables) -> None:
    gradients, scalars, factors, noise, products, totals, ties = tables
    assert factors.divisor == 1
    assert (noise is not None or not spec.needs_noise) and (products is not None) == spec.has_product
    if number not in spec.kernels:
        spec.kernels[number] = compile_step(spec, number)
    kernel = spec.kernels[number]
    small = [gradients.row_of_block, gradients.rows, scalars]
    there = [streams.param, streams.master, *streams.states, *streams.scales, products]
    arguments = [
        *map(_ADDRESS, small),
        0 if noise is None else noise.data_ptr(),
        np.float32(factors.unscale),
        np.float32(factors.clip),
        int(ties),
        *[_ADDRESS(each) for each in there if each is not None],
    ]
    if totals is None:
        run_over_blocks(lambda first, last: kernel(first, last, *arguments), gradients.num_blocks)
        return
    for first in range(0, gradients.num_blocks, _BLOCKS_SUMMED):
        count = min(first + _BLOCKS_SUMMED, gradients.num_blocks) - first
        sums = [BlockSums(count) for _ in totals]
        at = [address for each in sums for address in each.addresses(first)]
        run_over_blocks(partial(_run_from, kernel, first, [*arguments, *at]), count)
        for each, into in zip(sums, totals, strict=True):
            add_blocks(each, gradients.row_of_block, into, first)


def _run_from(kernel: Callable[..., None], first: int, arguments: Sequence[Any], start: int, stop: int) -> None:
    kernel(first + start, first + stop, *arguments)


def prepare_margin_sums(grad: Format, device: torch.device) -> None:
    compile_margin_sums(grad)


def add_margin_sums(pieces: Sequence[MarginPiece], factors: Factors) -> None:
    assert factors.divisor == 1
    scaling = np.float32(factors.unscale), np.float32(factors.clip)

    def add(each: MarginPiece) -> None:
        outer, inner = (each.rows, each.columns) if each.geometry.outer_is_row else (each.columns, each.rows)
        place = np.array([each.start, outer.data_ptr(), inner.data_ptr(), *each.geometry.columns])
        band = np.zeros(len(inner) if each.geometry.runs else 0)
        kernel = compile_margin_sums(format_of(each.grad.dtype, "a gradient"))
        kernel(each.grad.numel(), each.grad.data_ptr(), place.ctypes.data, band.ctypes.data, *scaling)
        if len(band):
            inner.numpy()[:] += band

    # The longest first. One thread goes over all of a piece, so that the order of addition is that of its elements.
    run_each([partial(add, each) for each in sorted(pieces, key=lambda each: -each.grad.numel())])


def block_sums(
    grad: Format, gradients: Gradients, factors: Factors, first: int = 0, last: int | None = None
) -> BlockSums:
    """Sums up blocks [first, last) of the table, by default all."""
    kernel, last = compile_block_sums(grad), gradients.num_blocks if last is None else last
    sums = BlockSums(last - first)
    tables = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr())
    numbers = (np.float32(factors.divisor), np.float32(factors.unscale))
    pointers = sums.addresses(first)
    run_over_blocks(lambda start, stop: kernel(first + start, first + stop, *tables, *numbers, *pointers), last - first)
    return sums


def add_blocks(sums: BlockSums, row_of_block: torch.Tensor, totals: torch.Tensor, first: int = 0) -> None:
    """Adds the sums of blocks, from block ``first`` of the table on, to the rows that they belong to."""
    rows = row_of_block.data_ptr() + first * row_of_block.itemsize
    add = compile_add_blocks()
    add(sums.num_blocks, rows, *sums.addresses(), totals.data_ptr())


def add_totals(grad: Format, gradients: Gradients, factors: Factors, totals: torch.Tensor) -> None:
    for first in range(0, gradients.num_blocks, _BLOCKS_SUMMED):
        last = min(first + _BLOCKS_SUMMED, gradients.num_blocks)
        sums = block_sums(grad, gradients, factors, first, last)
        add_blocks(sums, gradients.row_of_block, totals, first)


def count_nonfinite(grad: Format, gradients: Gradients, count: torch.Tensor) -> None:
    kernel = compile_count_nonfinite(grad)
    counts = np.zeros(gradients.num_blocks, np.int32)
    pointers = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr(), counts.ctypes.data)
    run_over_blocks(lambda first, last: kernel(first, last, *pointers), gradients.num_blocks)
    count.numpy()[0] += counts.sum()


def is_decoded(
    shown: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kept: Format, format: BlockFormat
) -> bool:
    """Returns whether ``shown``, 1D whole blocks of format ``kept``, is to the bit what these codes decode to."""
    kernel, num_blocks = compile_is_decoded(kept, format), scales.numel()
    apart = np.zeros(num_blocks, np.int32)
    pointers = (shown.data_ptr(), codes.data_ptr(), scales.data_ptr(), apart.ctypes.data)
    run_over_blocks(lambda first, last: kernel(first, last, *pointers), num_blocks)
    return not apart.any()
