"""The backend for the CPU: kernels that Numba compiles, over chunks of the shard on a pool of threads.

Small tables are made in NumPy: a torch operation on a table of some size would wake torch's own threads, which then
spin for milliseconds on the cores that the pool needs.
"""

import numpy as np
import torch

from .formats import Format
from .native_reductions import compile_add_blocks, compile_block_sums, compile_count_nonfinite
from .native_step import compile_step
from .pool import run_over_blocks
from .reductions import COLUMNS, BlockSums, Totals
from .spec import StepSpec
from .tables import Factors, Gradients, Streams


def prepare(spec: StepSpec, device: torch.device, aligned: bool) -> None:
    compile_step(spec)


def step(
    spec: StepSpec,
    streams: Streams,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None = None,
) -> None:
    assert factors.divisor == 1 and (noise is not None or not spec.needs_noise)
    kernel = compile_step(spec)
    tensors = [gradients.row_of_block, gradients.rows, scalars]
    masters = [] if streams.master is None else [streams.master]
    tables = [*(tensor.data_ptr() for tensor in tensors), 0 if noise is None else noise.data_ptr()]
    scales = [each for each in streams.scales if each is not None]
    pointers = [tensor.data_ptr() for tensor in (streams.param, *masters, *streams.states, *scales)]
    numbers = (np.float32(factors.unscale), np.float32(factors.clip))
    run_over_blocks(lambda first, last: kernel(first, last, *tables, *numbers, *pointers), gradients.num_blocks)


def block_sums(grad: Format, gradients: Gradients, factors: Factors) -> BlockSums:
    kernel = compile_block_sums(grad)
    columns = [np.zeros(gradients.num_blocks, kind) for kind in (np.int64, np.int32, np.int32, np.int32)]
    tables = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr())
    numbers = (np.float32(factors.divisor), np.float32(factors.unscale))
    pointers = [column.ctypes.data for column in columns]
    run_over_blocks(lambda first, last: kernel(first, last, *tables, *numbers, *pointers), gradients.num_blocks)
    return BlockSums(*map(torch.from_numpy, columns))


def totals(sums: BlockSums, gradients: Gradients) -> Totals:
    table = np.zeros((gradients.num_rows, COLUMNS), np.int64)
    columns = (gradients.row_of_block, sums.mantissa, sums.exponent, sums.largest, sums.nonfinite)
    add_blocks = compile_add_blocks()
    add_blocks(gradients.num_blocks, *(column.data_ptr() for column in columns), table.ctypes.data)
    return Totals(torch.from_numpy(table))


def count_nonfinite(grad: Format, gradients: Gradients) -> int:
    kernel = compile_count_nonfinite(grad)
    counts = np.zeros(gradients.num_blocks, np.int32)
    pointers = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr(), counts.ctypes.data)
    run_over_blocks(lambda first, last: kernel(first, last, *pointers), gradients.num_blocks)
    return int(counts.sum())
