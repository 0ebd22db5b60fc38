r"""Adadelta (Zeiler, arXiv 1212.5701).

.. math::
    g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
    v_t &= \rho v_{t-1} + (1 - \rho) g_t^2 \\
    \Delta_t &= \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} \, g_t \\
    u_t &= \rho u_{t-1} + (1 - \rho) \Delta_t^2 \\
    \theta_t &= \theta_{t-1} - \gamma \Delta_t
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .words import sqrt, where


def adadelta_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {
        "weight_decay": group["weight_decay"],
        "rho": group["rho"],
        "one_minus_rho": 1 - group["rho"],
        "eps": group["eps"],
        "lr": group["lr"],
    }


@rule(states=("square_avg", "acc_delta"), nonnegative=("square_avg", "acc_delta"), scalars=adadelta_scalars)
def adadelta(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    # As torch, which skips the term: 0 * inf would be NaN.
    grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    state.square_avg = s.rho * state.square_avg + s.one_minus_rho * grad * grad
    delta = sqrt(state.acc_delta + s.eps) / sqrt(state.square_avg + s.eps) * grad
    state.acc_delta = s.rho * state.acc_delta + s.one_minus_rho * delta * delta
    return param - s.lr * delta
