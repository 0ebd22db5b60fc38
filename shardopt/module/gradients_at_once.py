"""Gradients that are reduced at once, outside of a backward: the sums of many micro-batches, tied weights of pipelines.

Backwards under ``no_sync()`` accumulate in ``param.grad``, as in one process. So do schedules of pipelines that compute
the gradients of weights apart from those of inputs (zero bubble): they assign ``param.grad``, and no hook fires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import agree_on_call
from ..domain.dtensors import local_tensor
from ..tensors.gradient import GradientPart
from ..tensors.strides import flattened

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..partition.comm.group import Ranks
    from .rounds import Rounds


_TIED = "summing gradients of tied weights"


def reduce_together(domain: Domain, rounds: Rounds | None) -> None:
    """Collective: one round of the gradients that each rank has accumulated.

    Raises:
        ShardoptError: gradients were reduced in part only.
        DisagreementError: another rank has an error, or makes another call.
    """

    def check() -> dict[str, str]:
        if rounds is not None:
            rounds.check_reduced()
        return {}

    agree_on_call("reduce_gradients()", check, domain.mesh.world)
    if rounds is not None and domain.reducer is not None:
        rounds.reduce_now()


def sum_tied(param: torch.nn.Parameter, ranks: Ranks) -> None:
    """Collective over ``ranks`` and, where its gradient is a part, over those that share it: see ``sum_tied()``.

    Raises:
        DisagreementError: another rank has no gradient, or one of another shape.
    """
    grad: Any = None if param.grad is None else local_tensor(param.grad)  # tensor mates hold the same slices
    agree_on_call("sum_tied()", lambda: {"shape": list(param.shape), "has a gradient": grad is not None}, ranks)
    if grad is None:
        return
    if not isinstance(grad, GradientPart):
        ranks.all_reduce(grad, _TIED)
        return
    own = grad.whole_slice()
    own.show_mean()
    # Each stage has buckets of its own, which cut the weight at other places.
    whole = flattened(grad.shaped(own.total).clone() if own.gather is None else own.gather(own.total))
    ranks.all_reduce(whole, _TIED)
    own.replace(whole[own.start : own.start + own.total.numel()])
