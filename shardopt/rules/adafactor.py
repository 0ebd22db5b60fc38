r"""Adafactor (Shazeer and Stern, arXiv 1804.04235), as ``torch.optim.Adafactor`` has it.

.. math::
    \hat\beta_t &= 1 - t^{\tau}, \qquad \rho_t = \min(\gamma, 1 / \sqrt t), \qquad
        \alpha_t = \max(\epsilon_2, \mathrm{RMS}(\theta_{t-1})) \, \rho_t \\
    R_t &= \hat\beta_t R_{t-1} + (1 - \hat\beta_t) \operatorname{mean}_{\mathrm{columns}} g_t^2, \qquad
        C_t = \hat\beta_t C_{t-1} + (1 - \hat\beta_t) \operatorname{mean}_{\mathrm{rows}} g_t^2 \\
    \hat V_t &= R_t C_t / \max(\operatorname{mean} R_t, \epsilon_1), \qquad
        u_t = g_t / \max(\sqrt{\hat V_t}, \epsilon_1) \\
    \theta_t &= \theta_{t-1} (1 - \gamma\lambda) - \frac{\alpha_t}{\max(1, \mathrm{RMS}(u_t) / d)} \, u_t

For params of fewer than two dimensions :math:`\hat V_t` is the average of :math:`g_t^2` itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .factored import factored
from .rule import rule
from .scalars import lerp
from .words import maximum, mean_square, sqrt, where


def adafactor_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    eps1, eps2 = group["eps"]
    return {
        **lerp(step ** group["beta2_decay"]),
        "eps1": group["dtype_eps"] if eps1 is None else eps1,
        "eps2": eps2,
        "decay": 1 - group["lr"] * group["weight_decay"],
        "rho": min(group["lr"], step**-0.5),
        "per_threshold": 1 / group["d"],
    }


def adafactor_factors(means: Mapping[str, Any], margins: Mapping[str, Any], s: Mapping[str, float]) -> Any:
    new = {name: _lerp(margins[name], means[name], s) for name in margins}
    rows, columns = (new[name].astype(np.float64) for name in ("row_var", "col_var"))
    mean = np.maximum(rows.sum(axis=-2, keepdims=True) / max(rows.shape[-2], 1), s["eps1"])  # of a param with no rows
    return new, np.sqrt(rows / mean).astype(np.float32), np.sqrt(columns).astype(np.float32)


def _lerp(average: Any, new: Any, s: Mapping[str, float]) -> Any:
    base = new if s["lerp_from_end"] else average
    return base + np.float32(s["lerp"]) * (new - average)


@factored(product="root", means={"row_var": -1, "col_var": -2}, factors=adafactor_factors)
@rule(
    states=("root", "variance"),
    nonnegative=("root", "variance"),
    scalars=adafactor_scalars,
    of_param=("is_matrix", "dtype_eps"),
)
def adafactor(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    if flags.is_matrix:
        root = state.root
    else:
        square = grad * grad
        base = where(s.lerp_from_end > 0, square, state.variance)
        state.variance = base + s.lerp * (square - state.variance)
        root = sqrt(state.variance)
    direction = grad / maximum(root, s.eps1)
    size = maximum(s.eps2, sqrt(mean_square(param)))
    shorter = maximum(1, sqrt(mean_square(direction)) * s.per_threshold)
    return param * s.decay - s.rho * size / shorter * direction
