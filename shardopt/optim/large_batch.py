"""Optimizers for large batches, whose steps follow the norm of each param; torch has none of them.

Their rules look at whole params, so that a step takes two passes over the shards with one all-reduce between them
(:mod:`shardopt.rules.passes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from ..rules.lamb import lamb
from ..rules.lars import lars
from .like import in_range, like
from .optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ..config import OptionKeywords
    from .param_groups import Params

__all__ = ["ShardedLAMB", "ShardedLARS"]


class ShardedLAMB(ShardedOptimizer):
    r"""LAMB (You et al., Large Batch Optimization for Deep Learning, arXiv 1904.00962, algorithm 2), sharded.

    .. math::
        u_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda \theta_{t-1} \\
        \theta_t &= \theta_{t-1} - \gamma \, \frac{\lVert \theta_{t-1} \rVert}{\lVert u_t \rVert} \, u_t

    with Adam's moments :math:`m` and :math:`v`. Norms are over whole params, on however many ranks their elements lie.
    Their quotient is 1 where one of them is 0.

    Args:
        params: as for every torch optimizer.
        lr: of the order of 1e-3 whatever the batch, as steps are fractions of the params.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: added to the update, before its norm is taken.
        trust: takes the quotient for params of fewer than two dimensions too (biases, gains of norms), for which it
            is 1 by default. A param group may say otherwise.
        maximize: ascend instead of descend.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedLAMB(model.parameters(), lr=2e-3, weight_decay=0.01)
    """

    @like(in_range, rule=lamb)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust: bool = False,
        maximize: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedLARS(ShardedOptimizer):
    r"""LARS (You et al., Large Batch Training of Convolutional Networks, arXiv 1708.03888), with momentum, sharded.

    .. math::
        b_t &= \mu b_{t-1} + \gamma \, \eta \, \frac{\lVert \theta_{t-1} \rVert}
            {\lVert g_t \rVert + \lambda \lVert \theta_{t-1} \rVert + \epsilon} \, (g_t + \lambda \theta_{t-1}) \\
        \theta_t &= \theta_{t-1} - b_t

    Norms are over whole params, on however many ranks their elements lie. The factor after :math:`\gamma` is 1 where
    one of the norms is 0.

    Args:
        params: as for every torch optimizer.
        lr: the global rate, :math:`\gamma`.
        momentum: 0 keeps no state.
        weight_decay: added to the gradient.
        trust_coefficient: :math:`\eta`, how much of its norm a param may move in a step of ``lr=1``.
        eps: keeps norms of nearly zero from dividing.
        trust: takes the factor for params of fewer than two dimensions too (biases, gains of norms), for which it is
            1 by default. A param group may say otherwise.
        maximize: ascend instead of descend.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedLARS(model.parameters(), lr=8.0, weight_decay=1e-4)
    """

    @like(in_range, rule=lars)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        *,
        trust: bool = False,
        maximize: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...
