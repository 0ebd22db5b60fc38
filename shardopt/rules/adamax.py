r"""Adamax: Adam on the infinity norm (Kingma and Ba, arXiv 1412.6980, section 7).

.. math::
    g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
    m_t &= m_{t-1} + (1 - \beta_1) (g_t - m_{t-1}) \\
    u_t &= \max(\beta_2 u_{t-1}, |g_t| + \epsilon) \\
    \theta_t &= \theta_{t-1} - \frac{\gamma}{1 - \beta_1^t} \frac{m_t}{u_t}
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import lerp, one_minus_power
from .words import abs, maximum, where


def adamax_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {
        **lerp(1 - beta1),
        "weight_decay": group["weight_decay"],
        "beta2": beta2,
        "eps": group["eps"],
        "step_size": group["lr"] / one_minus_power(beta1, step),
    }


@rule(states=("exp_avg", "exp_inf"), nonnegative=("exp_inf",), scalars=adamax_scalars)
def adamax(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    # As torch, which skips the term: 0 * inf would be NaN.
    grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    base = where(s.lerp_from_end > 0, grad, state.exp_avg)
    state.exp_avg = base + s.lerp * (grad - state.exp_avg)
    state.exp_inf = maximum(s.beta2 * state.exp_inf, abs(grad) + s.eps)
    return param - s.step_size * state.exp_avg / state.exp_inf
