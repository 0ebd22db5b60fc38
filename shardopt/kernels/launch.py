"""Chooses how kernels are executed: native code for CPU tensors, Triton for GPU tensors; the same bits from both."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from .formats import Format
from .pool import run_over_blocks
from .reductions import COLUMNS, BlockSums, Totals
from .spec import StepSpec
from .tables import Factors, Gradients, Noise, Streams
from .versions import require


class Backend(Protocol):
    """One way to execute kernels."""

    def prepare(self, spec: StepSpec, device: torch.device, aligned: bool) -> None:
        """Compiles the kernel. Called before the ranks agree on a step, so that a failure changes nothing."""

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,  # 2D [num_rows, len(spec.variant.scalars)] fp32
        factors: Factors,
        noise: Noise | None = None,  # None if everything is rounded to nearest
    ) -> None:
        """Updates the shard in place: ``rule(param, grad * unscale * clip, states)``.

        The divisor must be 1 here: gradients were divided before, or their divisor is :meth:`Factors.folded`. A
        quotient an element would be 5 to 7 % of AdamW's step on a CPU.
        """

    def block_sums(self, grad: Format, gradients: Gradients, factors: Factors) -> BlockSums:
        """Returns sums of squares, largest magnitudes and non-finite counts of ``grad / divisor * unscale``.

        ``factors.clip`` is ignored: it follows from the norm that these sums are for.
        """

    def totals(self, sums: BlockSums, gradients: Gradients) -> Totals:
        """Adds up the blocks' sums, for each row of the table that they were taken with."""

    def count_nonfinite(self, grad: Format, gradients: Gradients) -> int:
        """Returns how many elements of the gradients are Inf or NaN."""


class Native:
    """Compiled by Numba for the CPU, over chunks of the shard on a pool of threads.

    Small tables are made in NumPy: a torch operation on a table of some size would wake torch's own threads, which then
    spin for milliseconds on the cores that the pool needs.
    """

    def prepare(self, spec: StepSpec, device: torch.device, aligned: bool) -> None:
        from .native_step import compile_step

        compile_step(spec)

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,
        factors: Factors,
        noise: Noise | None = None,
    ) -> None:
        from .native_step import compile_step

        assert factors.divisor == 1 and (noise is not None or not spec.needs_noise)
        kernel = compile_step(spec)
        tensors = [gradients.row_of_block, gradients.rows, scalars]
        masters = [] if streams.master is None else [streams.master]
        tables = [*(tensor.data_ptr() for tensor in tensors), 0 if noise is None else noise.rows.data_ptr()]
        scales = [each for each in streams.scales if each is not None]
        pointers = [tensor.data_ptr() for tensor in (streams.param, *masters, *streams.states, *scales)]
        numbers = (np.float32(factors.unscale), np.float32(factors.clip))
        run_over_blocks(lambda first, last: kernel(first, last, *tables, *numbers, *pointers), gradients.num_blocks)

    def block_sums(self, grad: Format, gradients: Gradients, factors: Factors) -> BlockSums:
        from .native_reductions import compile_block_sums

        kernel = compile_block_sums(grad)
        columns = [np.zeros(gradients.num_blocks, kind) for kind in (np.int64, np.int32, np.int32, np.int32)]
        tables = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr())
        numbers = (np.float32(factors.divisor), np.float32(factors.unscale))
        pointers = [column.ctypes.data for column in columns]
        run_over_blocks(lambda first, last: kernel(first, last, *tables, *numbers, *pointers), gradients.num_blocks)
        return BlockSums(*map(torch.from_numpy, columns))

    def totals(self, sums: BlockSums, gradients: Gradients) -> Totals:
        from .native_reductions import compile_add_blocks

        table = np.zeros((gradients.num_rows, COLUMNS), np.int64)
        columns = (gradients.row_of_block, sums.mantissa, sums.exponent, sums.largest, sums.nonfinite)
        add_blocks = compile_add_blocks()
        add_blocks(gradients.num_blocks, *(column.data_ptr() for column in columns), table.ctypes.data)
        return Totals(torch.from_numpy(table))

    def count_nonfinite(self, grad: Format, gradients: Gradients) -> int:
        from .native_reductions import compile_count_nonfinite

        kernel = compile_count_nonfinite(grad)
        counts = np.zeros(gradients.num_blocks, np.int32)
        pointers = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr(), counts.ctypes.data)
        run_over_blocks(lambda first, last: kernel(first, last, *pointers), gradients.num_blocks)
        return int(counts.sum())


class Triton:
    """Compiled by Triton; one launch for a shard on the current stream of its device."""

    def prepare(self, spec: StepSpec, device: torch.device, aligned: bool) -> None:
        from .triton_step import compile_by_empty_launch

        with self._on(device):
            compile_by_empty_launch(spec, device, aligned)

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,
        factors: Factors,
        noise: Noise | None = None,
    ) -> None:
        from .triton_step import launch_step

        assert factors.divisor == 1
        with self._on(streams.param.device):
            launch_step(spec, streams, gradients, scalars, factors, noise)

    def block_sums(self, grad: Format, gradients: Gradients, factors: Factors) -> BlockSums:
        from .triton_reductions import launch_block_sums

        sums = BlockSums.empty(gradients)
        with self._on(gradients.rows.device):
            launch_block_sums(grad, gradients, factors, sums)
        return sums

    def totals(self, sums: BlockSums, gradients: Gradients) -> Totals:
        return sums.totals(gradients)

    def count_nonfinite(self, grad: Format, gradients: Gradients) -> int:
        from .triton_reductions import launch_count_nonfinite

        counts = torch.zeros_like(gradients.row_of_block)
        with self._on(counts.device):
            launch_count_nonfinite(grad, gradients, counts)
        return int(counts.sum())

    @staticmethod
    def _on(device: torch.device) -> AbstractContextManager[Any]:
        # Triton launches on the current device, whatever the device of the pointers.
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def backend_of(device: torch.device) -> Backend:
    """Returns the backend for tensors on ``device``, and loads its compiler at first use."""
    native = device.type == "cpu"
    require("numba" if native else "triton", f"{device.type} tensors")
    return Native() if native else Triton()
