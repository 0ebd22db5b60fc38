r"""RMSprop (Hinton, Neural Networks for Machine Learning, lecture 6, 2012).

.. math::
    g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
    v_t &= \alpha v_{t-1} + (1 - \alpha) g_t^2 \\
    b_t &= \mu b_{t-1} + \frac{g_t}{\sqrt{v_t} + \epsilon} \\
    \theta_t &= \theta_{t-1} - \gamma b_t

The centered form (Graves, arXiv 1308.0850) takes the root of :math:`v_t - a_t^2`, with
:math:`a_t = a_{t-1} + (1 - \alpha)(g_t - a_{t-1})`. As in torch, :math:`\epsilon` is added outside the root.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import lerp
from .words import sqrt, where


def rmsprop_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {
        **lerp(1 - group["alpha"]),
        "weight_decay": group["weight_decay"],
        "alpha": group["alpha"],
        "one_minus_alpha": 1 - group["alpha"],
        "eps": group["eps"],
        "momentum": group["momentum"],
        "lr": group["lr"],
    }


# The variance that a centered update divides by is a difference of nearly equal numbers, and must not be negative.
@rule(
    states=("square_avg", "momentum_buffer", "grad_avg"),
    nonnegative=("square_avg",),
    tolerates={"square_avg": "fp32", "grad_avg": "fp32"},
    scalars=rmsprop_scalars,
)
def rmsprop(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    # As torch, which skips the term: 0 * inf would be NaN.
    grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    state.square_avg = s.alpha * state.square_avg + s.one_minus_alpha * grad * grad
    variance = state.square_avg
    if flags.centered:
        base = where(s.lerp_from_end > 0, grad, state.grad_avg)
        state.grad_avg = base + s.lerp * (grad - state.grad_avg)
        variance = variance - state.grad_avg * state.grad_avg
    denominator = sqrt(variance) + s.eps
    if flags.momentum:
        state.momentum_buffer = s.momentum * state.momentum_buffer + grad / denominator
        step = s.lr * state.momentum_buffer
    else:
        step = s.lr * grad / denominator
    return param - step
