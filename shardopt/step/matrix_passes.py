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
from ..rules.matrix import MatrixVariant, matrices_of
from ..rules.passes import passes_of

if TYPE_CHECKING:
    from ..domain.shard import Shard
    from ..kernels.formats import Format
    from ..rules import Variant


class Apply(NamedTuple):
    """The second pass of a launch, but for where its updates lie."""

    spec: Spec
    scalars: torch.Tensor  # 2D [num_rows, len(spec.scalars)] fp32
    noise: torch.Tensor | None  # 2D [num_rows, 4] int32; None if everything is rounded to nearest


def shape_for(variant: Variant, group: Mapping[str, Any]) -> Callable[[Sequence[int]], tuple[int, int]] | None:
    """Returns a function from the shape of a param to that of its matrices; None for a rule of no matrices."""
    if not isinstance(variant, MatrixVariant):
        return None
    return lambda shape: matrices_of(shape, group.get("matrices"))[1]


def accumulate_spec(shard: Shard, variant: MatrixVariant, grad: Format) -> Spec:
    """Returns the spec of the kernel that writes updates in bf16, of gradients of this format."""
    states = tuple(shard.formats.states[name] for name in variant.accumulate.states)
    return Spec(passes_of(variant.accumulate), BF16, grad, None, states)


def plan_apply(
    shard: Shard,
    variant: MatrixVariant,
    scalars: Iterable[tuple[Sequence[float], Sequence[int]]],
    noise: Callable[[], torch.Tensor],
) -> Apply:
    """Makes the second pass, its kernel compiled.

    Args:
        scalars: those of both passes, the first one's first, and the rows that have them.
        noise: makes the table of noise.
    """
    spec, device = shard.spec(variant.apply, BF16), shard.home.device
    backend_of(device).prepare(spec, device, True)
    table = np.zeros((shard.tables.num_rows, len(variant.apply.scalars)), dtype=np.float32)
    for values, rows in scalars:
        table[rows] = values[len(variant.accumulate.scalars) :]
    return Apply(spec, torch.from_numpy(table), noise() if spec.needs_noise else None)
