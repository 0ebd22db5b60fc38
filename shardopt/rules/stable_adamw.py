r"""AdamW with update clipping (StableAdamW: Wortsman et al., arXiv 2304.13013, algorithm 2).

.. math::
    \mathrm{RMS}_t &= \sqrt{\operatorname{mean}\left( g_t^2 / \max(\hat v_t, \epsilon^2) \right)}, \qquad
        \gamma_t = \frac{\gamma}{\max(1, \mathrm{RMS}_t / d)} \\
    \theta_t &= \theta_{t-1} (1 - \gamma_t\lambda) - \gamma_t \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon}

:math:`\hat m` and :math:`\hat v` are Adam's moments, corrected for their bias, and the mean is over all elements of a
param; :math:`d` is ``clip_update``. Where gradients are larger than the second moment knows yet, the whole param takes
a shorter step.
"""

from collections.abc import Mapping
from typing import Any

from .adam import adam_scalars
from .rule import rule
from .words import maximum, mean_square, sqrt, where


def stable_adamw_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {
        **adam_scalars(group, step, carried),
        "decay_rate": group["lr"] * group["weight_decay"],
        "per_threshold": 1 / group["clip_update"],
    }


@rule(
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    nonnegative=("exp_avg_sq", "max_exp_avg_sq"),
    scalars=stable_adamw_scalars,
)
def stable_adamw(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    base = where(s.lerp_from_end > 0, grad, state.exp_avg)
    state.exp_avg = base + s.lerp * (grad - state.exp_avg)
    state.exp_avg_sq = s.beta2 * state.exp_avg_sq + s.one_minus_beta2 * grad * grad
    second = state.exp_avg_sq
    if flags.amsgrad:
        state.max_exp_avg_sq = maximum(state.max_exp_avg_sq, state.exp_avg_sq)
        second = state.max_exp_avg_sq
    root = sqrt(second) / s.bias_correction2_sqrt
    # A gradient of zero counts as zero where the second moment and eps are zeros too.
    ratio = where(grad == 0, 0, grad / maximum(root, s.eps))
    shorter = maximum(1, sqrt(mean_square(ratio)) * s.per_threshold)
    param = param * (1 - s.decay_rate / shorter)
    return param - s.step_size / shorter * state.exp_avg / (root + s.eps)
