"""Chooses how kernels are executed: native code for CPU tensors, Triton for GPU tensors; the same bits from both."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .pass_spec import PassSpec
from .reductions import new_totals
from .versions import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .formats import Format
    from .products import MarginPiece
    from .spec import StepSpec
    from .tables import Factors, Gradients


class Backend(Protocol):
    """One way to execute kernels: ``native_backend.py`` or ``triton_backend.py``.

    Attributes:
        joins_shards: True if one call of ``step`` takes the streams of several shards.
    """

    joins_shards: bool

    def prepare(self, spec: StepSpec, device: torch.device, aligned: bool) -> None:
        """Compiles the kernel. Called before the ranks agree on a step, so that a failure changes nothing."""

    def step(
        self,
        spec: StepSpec,
        streams: Any,  # Streams; or JoinedStreams, if it joins shards
        gradients: Gradients,
        scalars: torch.Tensor,  # 2D [num_rows, len(spec.variant.scalars)] fp32
        factors: Factors,
        noise: torch.Tensor | None = None,  # 2D [num_rows, 4] int32; None if everything is rounded to nearest
    ) -> None:
        """Updates the shard in place: ``rule(param, grad * unscale * clip, states)``. Tables are in host memory.

        The divisor must be 1 here: gradients were divided before, or their divisor is :meth:`Factors.folded`. A
        quotient an element would be 5 to 7 % of AdamW's step on a CPU.
        """

    def prepare_pass(self, spec: PassSpec, device: torch.device, aligned: bool) -> None:
        """Compiles the kernel of a pass, as ``prepare`` does that of a step."""

    def run_pass(
        self,
        spec: PassSpec,
        streams: Any,
        gradients: Gradients,
        scalars: torch.Tensor,
        factors: Factors,
        noise: torch.Tensor | None,
        totals: torch.Tensor | None,
        products: torch.Tensor | None = None,
    ) -> None:
        """Runs one pass of a rule over the shard, as ``step`` does a whole one. No device is waited for.

        Args:
            products: 2D [num_rows, products.COLUMNS] int64 in host memory, for a rule that reads a product; the
                factors lie where the kernel runs.
            totals: 3D [len(spec.variant.measured), num_rows, COLUMNS] int64, to which the block sums of each measured
                value are added, row by row; where the kernel runs. None if the pass measures nothing.
        """

    def add_totals(self, grad: Format, gradients: Gradients, factors: Factors, totals: torch.Tensor) -> None:
        """Adds what the blocks of ``grad / divisor * unscale`` sum up to, row by row of the table.

        ``factors.clip`` is ignored: it follows from the norm that these sums are for. No device is waited for.

        Args:
            totals: 2D [num_rows, COLUMNS] int64, as :mod:`.reductions` has it; on the device of the table.
        """

    def prepare_margin_sums(self, grad: Format, device: torch.device) -> None:
        """Compiles what ``add_margin_sums`` needs for gradients on ``device``."""

    def add_margin_sums(self, pieces: Sequence[MarginPiece], factors: Factors) -> None:
        """Adds squares of ``grad * unscale * clip`` to sums of rows and columns; see :class:`.products.MarginPiece`."""

    def count_nonfinite(self, grad: Format, gradients: Gradients, count: torch.Tensor) -> None:
        """Adds to ``count``, 1D [1] int64, how many elements of the gradients are Inf or NaN."""


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


def totals_of(grad: Format, gradients: Gradients, factors: Factors) -> torch.Tensor:
    """Returns the totals of gradients, as :func:`new_totals` has them, on their device; the host does not wait."""
    found = new_totals(gradients.num_rows, gradients.row_of_block.device)
    backend_of(found.device).add_totals(grad, gradients, factors, found)
    return found


def prepare(spec: StepSpec, device: torch.device, aligned: bool) -> None:
    """Compiles the kernel of a step or of a pass for tensors on ``device``; see :meth:`Backend.prepare`."""
    backend = backend_of(device)
    if isinstance(spec, PassSpec):
        backend.prepare_pass(spec, device, aligned)
    else:
        backend.prepare(spec, device, aligned)


def run_kernel(
    backend: Backend,
    spec: StepSpec,
    streams: Any,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None,
    totals: torch.Tensor | None,
    products: torch.Tensor | None = None,
) -> None:
    """Runs a step, or a pass; ``totals`` are None for a step and for a pass that measures nothing."""
    if isinstance(spec, PassSpec):
        backend.run_pass(spec, streams, gradients, scalars, factors, noise, totals, products)
    else:
        backend.step(spec, streams, gradients, scalars, factors, noise)
