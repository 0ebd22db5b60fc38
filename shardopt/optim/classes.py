"""The public optimizers of elementwise rules: ``Sharded`` and the torch name, with torch's arguments, then our own.

A class here is its signature: :func:`.like.like` lets the torch class of the same name check the arguments. The
keywords after torch's are those of :class:`shardopt.config.Options`; ``scripts/options.py`` writes them into each
docstring, and ``help()`` shows their meanings.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ..rules.adadelta import adadelta
from ..rules.adagrad import adagrad
from ..rules.adam import adam
from ..rules.adamax import adamax
from ..rules.asgd import asgd
from ..rules.lion import lion
from ..rules.nadam import nadam
from ..rules.radam import radam
from ..rules.rmsprop import rmsprop
from ..rules.rprop import rprop
from ..rules.sgd import sgd
from .like import in_range, like
from .optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ..config import OptionKeywords
    from ..rules.rule import Rule
    from .param_groups import Params

__all__ = [
    "ShardedASGD",
    "ShardedAdadelta",
    "ShardedAdagrad",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedAdamax",
    "ShardedLion",
    "ShardedNAdam",
    "ShardedRAdam",
    "ShardedRMSprop",
    "ShardedRprop",
    "ShardedSGD",
]


def _stable_adamw() -> Rule:
    from ..rules.stable_adamw import stable_adamw  # not at the top: test_fresh_process.py limits what an import loads

    return stable_adamw


class ShardedAdamW(ShardedOptimizer):
    r"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), sharded.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \theta_t &= \theta_{t-1} (1 - \gamma\lambda)
            - \gamma \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Arguments are those of :class:`torch.optim.AdamW`, and ``clip_update`` (StableAdamW, arXiv 2304.13013): where the
    root of the mean of :math:`g_t^2 / \max(\hat v_t, \epsilon^2)` over a whole param passes it (1.0 is usual), the
    param's learning rate is divided by their quotient. A step takes two passes over the shards then.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    """

    # As in torch: the states of an Adam do not turn this into one.
    _fixed = MappingProxyType({"decoupled_weight_decay": True})

    @like(torch.optim.AdamW, rule=adam, chosen_by={"clip_update": _stable_adamw})
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        clip_update: float | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdam(ShardedOptimizer):
    r"""Adam (Kingma and Ba, arXiv 1412.6980), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \theta_t &= \theta_{t-1} - \gamma \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Arguments are those of :class:`torch.optim.Adam`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    """

    @like(torch.optim.Adam, rule=adam)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedSGD(ShardedOptimizer):
    r"""Stochastic gradient descent with momentum (Sutskever, Martens, Dahl and Hinton, 2013), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
        b_t &= \mu b_{t-1} + (1 - \tau) g_t, \qquad b_1 = g_1 \\
        \theta_t &= \theta_{t-1} - \gamma b_t

    Arguments are those of :class:`torch.optim.SGD`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedSGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    @like(torch.optim.SGD, rule=sgd)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdagrad(ShardedOptimizer):
    r"""Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1}, \qquad G_t = G_{t-1} + g_t^2 \\
        \theta_t &= \theta_{t-1} - \frac{\gamma}{1 + (t - 1) \eta} \frac{g_t}{\sqrt{G_t} + \epsilon}

    Arguments are those of :class:`torch.optim.Adagrad`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdagrad(model.parameters(), lr=0.01)
    """

    @like(torch.optim.Adagrad, rule=adagrad)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedRMSprop(ShardedOptimizer):
    r"""RMSprop (Hinton, lecture 6 of Neural Networks for Machine Learning, 2012), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1}, \qquad v_t = \alpha v_{t-1} + (1 - \alpha) g_t^2 \\
        b_t &= \mu b_{t-1} + g_t / (\sqrt{v_t} + \epsilon) \\
        \theta_t &= \theta_{t-1} - \gamma b_t

    Arguments are those of :class:`torch.optim.RMSprop`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedRMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True)
    """

    @like(torch.optim.RMSprop, rule=rmsprop)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedNAdam(ShardedOptimizer):
    r"""NAdam (Dozat, Incorporating Nesterov Momentum into Adam, 2016), sharded.

    .. math::
        \mu_t &= \beta_1 (1 - \tfrac{1}{2} \, 0.96^{t \psi}) \\
        \hat m_t &= \frac{\mu_{t+1} m_t}{1 - \prod_{i \le t+1} \mu_i}
            + \frac{(1 - \mu_t) g_t}{1 - \prod_{i \le t} \mu_i} \\
        \theta_t &= \theta_{t-1} - \gamma \frac{\hat m_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    with Adam's moments :math:`m` and :math:`v`. Arguments are those of :class:`torch.optim.NAdam`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedNAdam(model.parameters(), lr=2e-3)
    """

    @like(torch.optim.NAdam, rule=nadam)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedRAdam(ShardedOptimizer):
    r"""RAdam (Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, arXiv 1908.03265), sharded.

    .. math::
        \theta_t = \theta_{t-1} - \gamma \frac{m_t}{1 - \beta_1^t}
            \cdot r_t \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v_t} + \epsilon}

    with Adam's moments :math:`m` and :math:`v`; the factor after the dot is omitted while the variance of the second
    moment is intractable, :math:`\rho_t \le 5`. Arguments are those of :class:`torch.optim.RAdam`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedRAdam(model.parameters(), lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
    """

    @like(torch.optim.RAdam, rule=radam)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdamax(ShardedOptimizer):
    r"""Adamax (Kingma and Ba, arXiv 1412.6980, section 7), sharded.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad u_t = \max(\beta_2 u_{t-1}, |g_t| + \epsilon) \\
        \theta_t &= \theta_{t-1} - \frac{\gamma}{1 - \beta_1^t} \frac{m_t}{u_t}

    Arguments are those of :class:`torch.optim.Adamax`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdamax(model.parameters(), lr=2e-3)
    """

    @like(torch.optim.Adamax, rule=adamax)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdadelta(ShardedOptimizer):
    r"""Adadelta (Zeiler, arXiv 1212.5701), sharded.

    .. math::
        v_t &= \rho v_{t-1} + (1 - \rho) g_t^2, \qquad
        \Delta_t = \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} \, g_t \\
        u_t &= \rho u_{t-1} + (1 - \rho) \Delta_t^2, \qquad \theta_t = \theta_{t-1} - \gamma \Delta_t

    Arguments are those of :class:`torch.optim.Adadelta`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdadelta(model.parameters(), rho=0.95)
    """

    @like(torch.optim.Adadelta, rule=adadelta)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedASGD(ShardedOptimizer):
    r"""Averaged stochastic gradient descent (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992), sharded.

    .. math::
        \theta_t &= \theta_{t-1} (1 - \lambda \eta_t) - \eta_t g_t, \qquad
        \eta_{t+1} = \gamma / (1 + \lambda \gamma t)^\alpha \\
        a_t &= a_{t-1} + \mu_t (\theta_t - a_{t-1}), \qquad \mu_{t+1} = 1 / \max(1, t - t_0)

    The average :math:`a` is the state ``ax``. Arguments are those of :class:`torch.optim.ASGD`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedASGD(model.parameters(), lr=0.01, t0=1000)
    """

    @like(torch.optim.ASGD, rule=asgd)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedRprop(ShardedOptimizer):
    r"""Rprop (Riedmiller and Braun, ICNN 1993), sharded.

    .. math::
        \Delta_t &= \operatorname{clamp}(\eta_t \Delta_{t-1}, \Delta_{\min}, \Delta_{\max}), \qquad \Delta_0 = \gamma \\
        \theta_t &= \theta_{t-1} - \operatorname{sign}(g_t) \Delta_t

    :math:`\eta_t` is ``etas[1]`` where the gradient kept its sign, ``etas[0]`` where it changed (:math:`g_t` then
    counts as 0), else 1. Arguments are those of :class:`torch.optim.Rprop`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedRprop(model.parameters(), lr=0.01)
    """

    @like(torch.optim.Rprop, rule=rprop)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedLion(ShardedOptimizer):
    r"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675), sharded.

    .. math::
        \theta_t &= \theta_{t-1} (1 - \gamma\lambda)
            - \gamma \operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t) \\
        m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t

    Args:
        params: as for every torch optimizer.
        lr: a third to a tenth of AdamW's, as every element moves by all of it.
        betas: of the interpolation and of the momentum.
        weight_decay: decoupled, as AdamW's; three to ten times as large for the same ``lr * weight_decay``.
        maximize: ascend instead of descend.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedLion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    @like(in_range, rule=lion)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...
