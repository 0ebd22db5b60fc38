"""Chooses how kernels are executed: native code for CPU tensors, Triton for GPU tensors; the same bits from both."""

from functools import cache
from typing import Protocol

import torch

from .formats import Format
from .reductions import BlockSums, Totals
from .spec import StepSpec
from .tables import Factors, Gradients, Streams
from .versions import require


class Backend(Protocol):
    """One way to execute kernels: ``native_backend.py`` or ``triton_backend.py``."""

    def prepare(self, spec: StepSpec, device: torch.device, aligned: bool) -> None:
        """Compiles the kernel. Called before the ranks agree on a step, so that a failure changes nothing."""

    def step(
        self,
        spec: StepSpec,
        streams: Streams,
        gradients: Gradients,
        scalars: torch.Tensor,  # 2D [num_rows, len(spec.variant.scalars)] fp32
        factors: Factors,
        noise: torch.Tensor | None = None,  # 2D [num_rows, 4] int32; None if everything is rounded to nearest
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


@cache
def backend_of(device: torch.device) -> Backend:
    """Returns the backend for tensors on ``device``, and loads its compiler at first use."""
    if device.type == "cpu":
        require("numba", "cpu tensors")
        from . import native_backend

        return native_backend
    require("triton", f"{device.type} tensors")
    from . import triton_backend

    return triton_backend
