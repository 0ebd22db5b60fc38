"""Adafactor, with torch's name and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ..rules.adafactor import adafactor
from .like import like
from .optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ..config import OptionKeywords
    from .param_groups import Params

__all__ = ["ShardedAdafactor"]


class ShardedAdafactor(ShardedOptimizer):
    r"""Adafactor (Shazeer and Stern, arXiv 1804.04235), sharded: second moments of rows and columns, not of elements.

    .. math::
        R_t &= \hat\beta_t R_{t-1} + (1 - \hat\beta_t) \operatorname{mean}_{\mathrm{columns}} g_t^2, \qquad
            C_t = \hat\beta_t C_{t-1} + (1 - \hat\beta_t) \operatorname{mean}_{\mathrm{rows}} g_t^2 \\
        u_t &= g_t / \max(\sqrt{R_t C_t / \max(\operatorname{mean} R_t, \epsilon_1)}, \epsilon_1), \qquad
            \hat\beta_t = 1 - t^{\tau} \\
        \theta_t &= \theta_{t-1} (1 - \gamma\lambda)
            - \frac{\max(\epsilon_2, \mathrm{RMS}(\theta_{t-1})) \min(\gamma, 1 / \sqrt t)}
                {\max(1, \mathrm{RMS}(u_t) / d)} \, u_t

    Arguments are those of :class:`torch.optim.Adafactor`: ``beta2_decay`` is :math:`\tau`, and an :math:`\epsilon_1` of
    None the distance from 1 to the next number of the param's dtype. The last two dimensions of a param are factored.
    Of params with fewer the moments are those of elements.

    The states ``row_var`` and ``col_var``, 4 (rows + columns) bytes a matrix, are whole on every rank, in host memory
    and in fp32. Their sums are of float64. A step takes two all-reduces: of squares over rows and columns, and of both
    mean squares.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdafactor(model, lr=1e-2, stage=2)
    """

    @like(torch.optim.Adafactor, rule=adafactor)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...
