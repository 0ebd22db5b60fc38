r"""Lion: the sign of an interpolated momentum (Chen et al., arXiv 2302.06675).

.. math::
    c_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
    \theta_t &= \theta_{t-1} (1 - \gamma\lambda) - \gamma \operatorname{sign}(c_t) \\
    m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .words import sign


def lion_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "decay": 1 - group["lr"] * group["weight_decay"],
        "lr": group["lr"],
    }


@rule(states=("exp_avg",), scalars=lion_scalars, counts_steps=False)
def lion(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    update = sign(s.beta1 * state.exp_avg + s.one_minus_beta1 * grad)
    state.exp_avg = s.beta2 * state.exp_avg + s.one_minus_beta2 * grad
    return param * s.decay - s.lr * update
