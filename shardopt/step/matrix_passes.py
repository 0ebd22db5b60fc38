"""The two passes of a rule of whole matrices, as launches: what each reads and writes.

::

    accumulate   gradient, states       -> states, update       the update, bf16, stands where the param would
    apply        param, states, update  -> param, states        the function's result, bf16, stands for the gradient

The update of a shard lies in a buffer of its own, 1D [shard_numel] bf16, at the places of its params.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..kernels.formats import BF16
from ..kernels.launch import backend_of
from ..kernels.spec import Spec
from ..kernels.tables import BLOCK
from ..rules.matrix import MatrixScalars, check_runs, matrices_of, scalars_of_matrices
from ..rules.passes import passes_of

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..kernels.formats import Format
    from ..rules import Rule, Variant


class Apply(NamedTuple):
    """The second pass of a launch, but for where its updates lie."""

    spec: Spec
    scalars: torch.Tensor  # 2D [num_rows, len(spec.scalars)] fp32
    noise: torch.Tensor | None  # 2D [num_rows, 4] int32; None if everything is rounded to nearest


def shapes_for(
    variant: Variant, group: Mapping[str, Any]
) -> Callable[[Sequence[int]], tuple[tuple[int, int], ...]] | None:
    """Returns a function from the shape of a param to those of its matrices; None for a rule of no matrices."""
    if variant.around is None:
        return None
    # An empty stack has no matrix, but scalars as if it had one.
    return lambda shape: tuple(matrices_of(shape, group.get("matrices"))) or ((shape[-2], shape[-1]),)


def runs_of(
    rule: Rule, variant: Variant, group: Mapping[str, Any], entry: ParamRecord, shapes: Sequence[tuple[int, int]]
) -> tuple[MatrixScalars, ...]:
    """Returns the scalars of the matrices of one param; none where all matrices share them.

    Raises:
        ShardoptError: no kernel can tell the elements of the matrices apart.
    """
    assert variant.around is not None
    runs = scalars_of_matrices(
        shapes, lambda shape: rule.evaluate(variant, {**group, "shape": shape}, entry.step + 1, entry.carried)[0]
    )
    is_whole = tuple(entry.param.shape) == tuple(entry.shape)  # no slice of a DTensor
    lie_in_rows = is_whole and entry.shard.strides(entry.index)[-2:] == (shapes[0][1], 1)
    check_runs(runs, BLOCK, lie_in_rows, len(variant.around[0].scalars))
    return tuple(runs) if len(runs) > 1 else ()


def spec_of(shard: Shard, variant: Variant, grad: Format) -> Spec:
    """Returns what a launch runs on gradients of this format; of a rule of matrices the first pass, in bf16."""
    if variant.around is None:
        return shard.spec(variant, grad)
    accumulate, _ = variant.around
    return Spec(
        passes_of(accumulate), BF16, grad, None, tuple(shard.formats.states[name] for name in accumulate.states)
    )


def plan_apply(
    shard: Shard,
    around: tuple[Variant, Variant],
    scalars: Iterable[tuple[Sequence[float], Sequence[int]]],
    noise: Callable[[], torch.Tensor],
) -> Apply:
    """Makes the second pass of a rule of matrices, its kernel compiled.

    Args:
        around: the passes before and after the function of the matrix.
        scalars: those of both passes, the first one's first, and the rows that have them.
        noise: makes the table of noise.
    """
    accumulate, apply = around
    spec, device = shard.spec(apply, BF16), shard.home.device
    backend_of(device).prepare(spec, device, True)
    table = np.zeros((shard.tables.num_rows, len(apply.scalars)), dtype=np.float32)
    for values, rows in scalars:
        table[rows] = values[len(accumulate.scalars) :]
    return Apply(spec, torch.from_numpy(table), noise() if spec.needs_noise else None)
