"""Runs a step of any rule on one shard that holds whole params, for benchmarks and comparisons of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..kernels.launch import run_kernel
from ..kernels.pass_spec import PassSpec
from ..kernels.reductions import COLUMNS
from ..rules.rule import Variant
from ..step.first_passes import results_of
from ..step.pass_specs import pass_specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kernels.launch import Backend
    from ..kernels.spec import StepSpec
    from ..kernels.tables import Factors, Gradients


def run_alone(
    backend: Backend,
    spec: StepSpec,
    streams: Any,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None,
    numels: Sequence[int],
) -> None:
    """Runs all passes of a rule, or its one kernel; the arguments are those of :meth:`Backend.step`.

    Args:
        numels: the elements of the param of each row.
    """
    specs, variant = pass_specs(spec), spec.variant
    if isinstance(variant, Variant) and variant.reductions:
        scalars = torch.nn.functional.pad(scalars, (0, len(variant.reductions)))
    for each in specs:
        totals = None
        if isinstance(each, PassSpec) and each.variant.measured:
            shape = (len(each.variant.measured), gradients.num_rows, COLUMNS)
            totals = torch.zeros(shape, dtype=torch.int64, device=gradients.row_of_block.device)
        run_kernel(backend, each, streams, gradients, scalars, factors, noise, totals)
        if totals is not None:
            assert isinstance(each, PassSpec) and isinstance(variant, Variant)
            for number, found in zip(each.variant.measured, totals.cpu().numpy(), strict=True):
                values = results_of(found, numels)[variant.reductions[number]]
                scalars[:, len(variant.scalars) + number] = torch.from_numpy(values).to(scalars)
