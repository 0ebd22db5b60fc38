r"""Rprop: resilient backpropagation (Riedmiller and Braun, ICNN 1993).

.. math::
    \eta_t &= \eta_+ \text{ where } g_{t-1} g_t > 0, \quad \eta_- \text{ where } g_{t-1} g_t < 0, \quad
        \text{else } 1 \\
    \Delta_t &= \min(\max(\Delta_{t-1} \eta_t, \Delta_{\min}), \Delta_{\max}), \qquad \Delta_0 = \gamma \\
    g_t &\leftarrow 0 \text{ where } g_{t-1} g_t < 0 \\
    \theta_t &= \theta_{t-1} - \operatorname{sign}(g_t) \Delta_t

The learning rate is each element's first step size; later changes of it have no effect, as in torch.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .words import clamp, sign, where


def rprop_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    eta_minus, eta_plus = group["etas"]
    step_size_min, step_size_max = group["step_sizes"]
    return {
        "first": float(step == 1),
        "lr": group["lr"],
        "eta_minus": eta_minus,
        "eta_plus": eta_plus,
        "step_size_min": step_size_min,
        "step_size_max": step_size_max,
    }


# The sign of a small gradient decides, and a block's scale would make zero of it; bf16 has the range of fp32.
@rule(
    states=("prev", "step_size"),
    tolerates={"prev": "bf16", "step_size": "bf16"},
    scalars=rprop_scalars,
)
def rprop(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    agreement = grad * state.prev
    factor = where(agreement > 0, s.eta_plus, where(agreement < 0, s.eta_minus, 1.0))
    # A script may set the count back, and then the sizes stay: no clamped one is zero.
    begun = where(state.step_size > 0, state.step_size, s.lr)
    step_size = where(s.first > 0, begun, state.step_size) * factor
    state.step_size = clamp(step_size, s.step_size_min, s.step_size_max)
    state.prev = where(agreement < 0, 0.0, grad)
    return param - sign(state.prev) * state.step_size
