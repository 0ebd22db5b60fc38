r"""LAMB (You et al., Large Batch Optimization for Deep Learning, arXiv 1904.00962, algorithm 2), with bias correction.

.. math::
    m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
    u_t &= \frac{m_t}{1 - \beta_1^t} \Big/ \left( \sqrt{\frac{v_t}{1 - \beta_2^t}} + \epsilon \right)
        + \lambda \theta_{t-1} \\
    \theta_t &= \theta_{t-1} - \gamma \, \frac{\lVert \theta_{t-1} \rVert}{\lVert u_t \rVert} \, u_t

Norms are over all elements of a param. Their quotient, the trust ratio, is 1 where one of them is 0, and for params of
fewer than two dimensions (biases, gains of norms) unless the group says ``trust=True``.
"""

import math
from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import one_minus_power, trusts
from .words import norm, sqrt, where


def lamb_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    correction1 = one_minus_power(beta1, step)
    return {
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        # Of the quotient, both sides of which are multiplied by 1 - beta1 ** t: each pass has it for every element.
        "correction": correction1 / math.sqrt(one_minus_power(beta2, step)),
        "eps": group["eps"] * correction1,
        "weight_decay": group["weight_decay"],
        "lr": group["lr"],
        "trusts": trusts(group),
    }


@rule(
    states=("exp_avg", "exp_avg_sq"),
    nonnegative=("exp_avg_sq",),
    scalars=lamb_scalars,
    of_param=("ndim",),
)
def lamb(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    state.exp_avg = s.beta1 * state.exp_avg + s.one_minus_beta1 * grad
    state.exp_avg_sq = s.beta2 * state.exp_avg_sq + s.one_minus_beta2 * grad * grad
    direction = state.exp_avg / (s.correction * sqrt(state.exp_avg_sq) + s.eps)
    # The term is skipped without decay: 0 * inf would be NaN.
    direction = where(s.weight_decay == 0, direction, direction + s.weight_decay * param)
    weight = norm(param)
    length = norm(direction)
    # A norm that is NaN makes the param NaN: with a ratio of 1 it would go on by a step of another size.
    ratio = where((s.trusts == 0) | ((weight == 0) | (length == 0)), 1, weight / length)
    return param - s.lr * ratio * direction
