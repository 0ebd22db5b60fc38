"""The backend for GPUs: kernels that Triton compiles; one launch for a shard on the current stream of its device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .formats import Format
from .reductions import BlockSums, Totals
from .spec import StepSpec
from .tables import Factors, Gradients, Streams
from .triton_reductions import launch_block_sums, launch_count_nonfinite
from .triton_step import compile_by_empty_launch, launch_step


def prepare(spec: StepSpec, device: torch.device, aligned: bool) -> None:
    with _on(device):
        compile_by_empty_launch(spec, device, aligned)


def step(
    spec: StepSpec,
    streams: Streams,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None = None,
) -> None:
    assert factors.divisor == 1
    with _on(streams.param.device):
        launch_step(spec, streams, gradients, scalars, factors, noise)


def block_sums(grad: Format, gradients: Gradients, factors: Factors) -> BlockSums:
    sums = BlockSums.empty(gradients)
    with _on(gradients.rows.device):
        launch_block_sums(grad, gradients, factors, sums)
    return sums


def totals(sums: BlockSums, gradients: Gradients) -> Totals:
    return sums.totals(gradients)


def count_nonfinite(grad: Format, gradients: Gradients) -> int:
    counts = torch.zeros_like(gradients.row_of_block)
    with _on(counts.device):
        launch_count_nonfinite(grad, gradients, counts)
    return int(counts.sum())


def _on(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device, whatever the device of the pointers.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
