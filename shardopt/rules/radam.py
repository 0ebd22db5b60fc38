r"""RAdam: Adam whose adaptive step waits until the second moment can be trusted (Liu et al., arXiv 1908.03265).

.. math::
    m_t &= m_{t-1} + (1 - \beta_1) (g_t - m_{t-1}), \qquad \hat m_t = m_t / (1 - \beta_1^t) \\
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
    \rho_\infty &= \frac{2}{1 - \beta_2} - 1, \qquad
    \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t} \\
    \theta_t &= \theta_{t-1} - \gamma \hat m_t \, r_t \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v_t} + \epsilon},
    \qquad r_t = \sqrt{\frac{(\rho_t - 4)(\rho_t - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho_t}}

and :math:`\theta_t = \theta_{t-1} - \gamma \hat m_t` while :math:`\rho_t \le 5`. The weight decay is Adam's, or AdamW's
with ``decoupled_weight_decay``.
"""

import math
from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import lerp, one_minus_power
from .words import sqrt, where


def rectification(beta2: float, step: int) -> float:
    """Returns :math:`r_t`, or 0 while :math:`\\rho_t \\le 5`."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / one_minus_power(beta2, step)
    if length <= 5:
        return 0.0
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


def radam_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {
        **lerp(1 - beta1),
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "decay": 1 - group["lr"] * group["weight_decay"],
        "weight_decay": group["weight_decay"],
        "bias_correction1": one_minus_power(beta1, step),
        "bias_correction2_sqrt": math.sqrt(one_minus_power(beta2, step)),
        "rectification": rectification(beta2, step),
        "lr": group["lr"],
        "eps": group["eps"],
    }


@rule(states=("exp_avg", "exp_avg_sq"), nonnegative=("exp_avg_sq",), scalars=radam_scalars)
def radam(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    if flags.decoupled_weight_decay:
        param = param * s.decay
    else:
        # As torch, which skips the term: 0 * inf would be NaN.
        grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    base = where(s.lerp_from_end > 0, grad, state.exp_avg)
    state.exp_avg = base + s.lerp * (grad - state.exp_avg)
    state.exp_avg_sq = s.beta2 * state.exp_avg_sq + s.one_minus_beta2 * grad * grad
    step = state.exp_avg / s.bias_correction1 * s.lr
    adaptive = s.bias_correction2_sqrt / (sqrt(state.exp_avg_sq) + s.eps)
    return param - where(s.rectification > 0, step * adaptive * s.rectification, step)
