"""Runs a step of any rule on one shard that holds whole params, for benchmarks and comparisons of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..kernels.reductions import COLUMNS
from ..step.norms import results_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kernels.launch import Backend
    from ..kernels.spec import Spec
    from ..kernels.tables import Tables


def run_alone(backend: Backend, spec: Spec, streams: Any, tables: Tables, numels: Sequence[int]) -> None:
    """Runs all passes of a rule, as :meth:`Backend.run` does one of them.

    Args:
        tables: without totals; results of reductions need no columns in the scalars.
        numels: the elements of the param of each row.
    """
    gradients, scalars = tables.gradients, tables.scalars
    scalars = torch.nn.functional.pad(scalars, (0, len(spec.scalars) - scalars.shape[1]))
    for number, part in enumerate(spec.passes):
        shape = (len(part.measured), gradients.num_rows, COLUMNS)
        totals = torch.zeros(shape, dtype=torch.int64, device=gradients.row_of_block.device)
        told = tables._replace(scalars=scalars, totals=totals if part.measured else None)
        backend.run(spec, number, streams, told)
        for each, word, column in zip(totals.cpu().numpy(), part.words, part.results, strict=True):
            scalars[:, column] = torch.from_numpy(results_of(each, numels)[word]).to(scalars)
