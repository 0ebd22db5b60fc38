r"""Stochastic gradient descent, with momentum.

.. math::
    g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
    b_t &= \mu b_{t-1} + (1 - \tau) g_t, \qquad b_1 = g_1 \\
    \theta_t &= \theta_{t-1} - \gamma b_t

:math:`\mu` is the momentum, :math:`\tau` the dampening, which spares the first step. Without momentum the gradient
takes the place of :math:`b_t`; with Nesterov's (Sutskever, Martens, Dahl and Hinton, 2013) :math:`g_t + \mu b_t` does.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .words import where


def sgd_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {
        "first": float(step == 1),
        "weight_decay": group["weight_decay"],
        "momentum": group["momentum"],
        "one_minus_dampening": 1 - group["dampening"],
        "lr": group["lr"],
    }


@rule(states=("momentum_buffer",), scalars=sgd_scalars, counts_steps=False)
def sgd(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    # As torch, which skips the term: 0 * inf would be NaN.
    grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    update = grad
    if flags.momentum:
        next_buffer = s.momentum * state.momentum_buffer + s.one_minus_dampening * grad
        state.momentum_buffer = where(s.first > 0, grad, next_buffer)
        update = state.momentum_buffer
        if flags.nesterov:
            update = grad + s.momentum * state.momentum_buffer
    return param - s.lr * update
