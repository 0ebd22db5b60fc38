r"""ASGD: averaged stochastic gradient descent (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992).

.. math::
    g_t &\leftarrow g_t + w \theta_{t-1} \\
    \theta_t &= \theta_{t-1} (1 - \lambda \eta_t) - \eta_t g_t \\
    a_t &= a_{t-1} + \mu_t (\theta_t - a_{t-1}) \\
    \eta_{t+1} &= \frac{\gamma}{(1 + \lambda \gamma t)^\alpha}, \qquad \eta_1 = \gamma \\
    \mu_{t+1} &= \frac{1}{\max(1, t - t_0)}, \qquad \mu_1 = 1

:math:`w` is ``weight_decay`` and :math:`\lambda` is ``lambd``. :math:`\eta` and :math:`\mu` are carried: as in torch,
each step computes those of the next one, so that a scheduled learning rate acts one step late.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .words import where


def asgd_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    lr, lambd = group["lr"], group["lambd"]
    eta = carried.get("eta", lr)
    return {
        "weight_decay": group["weight_decay"],
        "decay": 1 - lambd * eta,
        "step_size": eta,
        "averaging": carried.get("mu", 1.0),
        "eta": lr / (1 + lambd * lr * step) ** group["alpha"],
        "mu": 1 / max(1, step - group["t0"]),
    }


# The average is over more and more steps: what one of them changes is soon lost in any shorter format.
@rule(states=("ax",), carried=("eta", "mu"), tolerates={"ax": "fp32"}, scalars=asgd_scalars)
def asgd(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    # As torch, which skips the term: 0 * inf would be NaN.
    grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    param = param * s.decay - s.step_size * grad
    state.ax = where(s.averaging == 1, param, state.ax + (param - state.ax) * s.averaging)
    return param
