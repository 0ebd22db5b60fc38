"""How is it executed? The native kernel for CPU tensors, Triton's for GPU tensors; the same bits from both."""

from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import numpy as np
import torch

from .formats import Format
from .pool import run_over_blocks
from .reductions import BlockSums
from .spec import StepSpec
from .tables import Gradients, Streams
from .versions import require


class Backend(Protocol):
    """One way to execute."""

    def prepare(self, spec: StepSpec) -> None:
        """Compiles what can be compiled before the first launch, so that a failure changes nothing."""

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,  # 2D [num_rows, len(spec.variant.scalars)] fp32
        unscale: float,
        clip: float,
    ) -> None:
        """Updates the shard in place: ``rule(param, grad * unscale * clip, states)``, each product rounded to fp32."""

    def block_sums(self, grad: Format, gradients: Gradients, unscale: float) -> BlockSums:
        """Sums of squares, largest magnitudes and counts of non-finite elements of ``grad * unscale``."""

    def count_nonfinite(self, grad: Format, gradients: Gradients) -> torch.Tensor:
        """How many elements of the gradients are Inf or NaN; 0-d int64."""


class Native:
    """Compiled by Numba for the CPU, over chunks of the shard on a pool of threads."""

    def prepare(self, spec: StepSpec) -> None:
        from .native_step import compile_step

        compile_step(spec)

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,
        unscale: float,
        clip: float,
    ) -> None:
        from .native_step import compile_step

        kernel = compile_step(spec)
        tensors = [gradients.row_of_block, gradients.rows, scalars]
        masters = [] if streams.master is None else [streams.master]
        tables = [tensor.data_ptr() for tensor in tensors]
        pointers = [tensor.data_ptr() for tensor in (streams.param, *masters, *streams.states)]
        factors = (np.float32(unscale), np.float32(clip))
        run_over_blocks(lambda first, last: kernel(first, last, *tables, *factors, *pointers), gradients.num_blocks)

    def block_sums(self, grad: Format, gradients: Gradients, unscale: float) -> BlockSums:
        from .native_reductions import compile_block_sums

        kernel = compile_block_sums(grad)
        sums = BlockSums.empty(gradients)
        tables = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr(), np.float32(unscale))
        columns = [column.data_ptr() for column in (sums.mantissa, sums.exponent, sums.largest, sums.nonfinite)]
        run_over_blocks(lambda first, last: kernel(first, last, *tables, *columns), gradients.num_blocks)
        return sums

    def count_nonfinite(self, grad: Format, gradients: Gradients) -> torch.Tensor:
        from .native_reductions import compile_count_nonfinite

        kernel = compile_count_nonfinite(grad)
        counts = torch.zeros_like(gradients.row_of_block)
        pointers = (gradients.row_of_block.data_ptr(), gradients.rows.data_ptr(), counts.data_ptr())
        run_over_blocks(lambda first, last: kernel(first, last, *pointers), gradients.num_blocks)
        return counts.sum()


class Triton:
    """Compiled by Triton; one launch for a shard on the current stream of its device."""

    def prepare(self, spec: StepSpec) -> None:
        from .triton_step import rule_function

        rule_function(spec.variant)

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,
        unscale: float,
        clip: float,
    ) -> None:
        from .triton_step import launch_step

        self._on_device_of(streams.param, partial(launch_step, spec, streams, gradients, scalars, unscale, clip))

    def block_sums(self, grad: Format, gradients: Gradients, unscale: float) -> BlockSums:
        from .triton_reductions import launch_block_sums

        sums = BlockSums.empty(gradients)
        self._on_device_of(gradients.rows, partial(launch_block_sums, grad, gradients, unscale, sums))
        return sums

    def count_nonfinite(self, grad: Format, gradients: Gradients) -> torch.Tensor:
        from .triton_reductions import launch_count_nonfinite

        counts = torch.zeros_like(gradients.row_of_block)
        self._on_device_of(counts, partial(launch_count_nonfinite, grad, gradients, counts))
        return counts.sum()

    @staticmethod
    def _on_device_of(tensor: torch.Tensor, launch: Callable[[], None]) -> None:
        # Triton launches on the current device, whatever the device of the pointers.
        if tensor.device.type == "cuda":
            with torch.cuda.device(tensor.device):
                launch()
        else:
            launch()


@cache
def backend_of(device: torch.device) -> Backend:
    """The backend for tensors on ``device``; its compiler is loaded here, at first use."""
    native = device.type == "cpu"
    require("numba" if native else "triton", f"{device.type} tensors")
    return Native() if native else Triton()
