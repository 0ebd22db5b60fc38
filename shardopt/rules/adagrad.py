r"""Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011).

.. math::
    g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
    G_t &= G_{t-1} + g_t^2 \\
    \theta_t &= \theta_{t-1} - \frac{\gamma}{1 + (t - 1) \eta} \frac{g_t}{\sqrt{G_t} + \epsilon}

:math:`\eta` is ``lr_decay``; :math:`G_0` is ``initial_accumulator_value``.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .words import sqrt, where


def adagrad_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {
        "first": float(step == 1),
        "weight_decay": group["weight_decay"],
        "initial_accumulator_value": group["initial_accumulator_value"],
        "step_size": group["lr"] / (1 + (step - 1) * group["lr_decay"]),
        "eps": group["eps"],
    }


# The sum only grows: what a step adds is soon less than half the gap between two numbers of any shorter format.
@rule(
    states=("sum",),
    nonnegative=("sum",),
    tolerates={"sum": "fp32"},
    scalars=adagrad_scalars,
    initial={"sum": "initial_accumulator_value"},
)
def adagrad(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    # As torch, which skips the term: 0 * inf would be NaN.
    grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    # A script may write the sum before the first step, or set the count back.
    begun = where(state.sum > 0, state.sum, s.initial_accumulator_value)
    state.sum = where(s.first > 0, begun, state.sum) + grad * grad
    return param - s.step_size * grad / (sqrt(state.sum) + s.eps)
