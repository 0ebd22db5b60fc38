r"""Adam and AdamW.

.. math::
    m_t &= m_{t-1} + (1 - \beta_1) (g_t - m_{t-1}) \\
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
    \theta_t &= \theta_{t-1} (1 - \gamma\lambda)
        - \frac{\gamma}{1 - \beta_1^t} \frac{m_t}{\sqrt{v_t} / \sqrt{1 - \beta_2^t} + \epsilon}

Adam (Kingma and Ba, arXiv 1412.6980) adds the decay to the gradient, :math:`g_t + \lambda\theta`, and drops the factor
in front; AdamW (Loshchilov and Hutter, arXiv 1711.05101) decays the param itself. AMSGrad (Reddi, Kale and Kumar, 2018)
divides by the root of the largest :math:`v` so far.
"""

import math
from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import lerp, one_minus_power
from .words import maximum, sqrt, where


def adam_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {
        **lerp(1 - beta1),
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "decay": 1 - group["lr"] * group["weight_decay"],
        "weight_decay": group["weight_decay"],
        "step_size": group["lr"] / one_minus_power(beta1, step),
        "bias_correction2_sqrt": math.sqrt(one_minus_power(beta2, step)),
        "eps": group["eps"],
    }


@rule(
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    nonnegative=("exp_avg_sq", "max_exp_avg_sq"),
    scalars=adam_scalars,
)
def adam(param, grad, state, s, flags):
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
    second = state.exp_avg_sq
    if flags.amsgrad:
        state.max_exp_avg_sq = maximum(state.max_exp_avg_sq, state.exp_avg_sq)
        second = state.max_exp_avg_sq
    change = s.step_size * state.exp_avg
    denominator = sqrt(second) / s.bias_correction2_sqrt + s.eps
    return param - change / denominator
