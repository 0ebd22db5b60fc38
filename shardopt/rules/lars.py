r"""LARS (You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888), with momentum.

.. math::
    \rho_t &= \eta \, \frac{\lVert \theta_{t-1} \rVert}
        {\lVert g_t \rVert + \lambda \lVert \theta_{t-1} \rVert + \epsilon} \\
    b_t &= \mu b_{t-1} + \gamma \rho_t (g_t + \lambda \theta_{t-1}) \\
    \theta_t &= \theta_{t-1} - b_t

Norms are over all elements of a param; :math:`\eta` is ``trust_coefficient``. The trust ratio :math:`\rho` is 1 where
one of the norms is 0, and for params of fewer than two dimensions unless the group says ``trust=True``.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import trusts
from .words import norm, where


def lars_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {
        "lr": group["lr"],
        "momentum": group["momentum"],
        "weight_decay": group["weight_decay"],
        "trust_coefficient": group["trust_coefficient"],
        "eps": group["eps"],
        "trusts": trusts(group),
    }


@rule(states=("momentum_buffer",), scalars=lars_scalars, counts_steps=False, of_param=("ndim",))
def lars(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    weight = norm(param)
    slope = norm(grad)
    trust = s.trust_coefficient * weight / (slope + s.weight_decay * weight + s.eps)
    # A norm that is NaN makes the param NaN: with a ratio of 1 it would go on by a step of another size.
    ratio = where((s.trusts == 0) | ((weight == 0) | (slope == 0)), 1, trust)
    # The term is skipped without decay: 0 * inf would be NaN.
    update = s.lr * ratio * where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    if flags.momentum:
        state.momentum_buffer = s.momentum * state.momentum_buffer + update
        update = state.momentum_buffer
    return param - update
