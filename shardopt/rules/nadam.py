r"""NAdam: Adam with Nesterov momentum (Dozat, ICLR workshop 2016).

.. math::
    \mu_t &= \beta_1 \left(1 - \tfrac{1}{2} \, 0.96^{t \psi}\right) \\
    m_t &= m_{t-1} + (1 - \beta_1) (g_t - m_{t-1}) \\
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
    \theta_t &= \theta_{t-1} - \gamma \left(
        \frac{1 - \mu_t}{1 - \prod_{i \le t} \mu_i} \, g_t
        + \frac{\mu_{t+1}}{1 - \prod_{i \le t+1} \mu_i} \, m_t
        \right) \Big/ \left(\sqrt{v_t / (1 - \beta_2^t)} + \epsilon\right)

:math:`\psi` is ``momentum_decay``. The weight decay is Adam's, or AdamW's with ``decoupled_weight_decay``. The product
of the momenta is carried from step to step, so it follows a ``beta1`` that changes on the way.
"""

from collections.abc import Mapping
from typing import Any

from .rule import rule
from .scalars import lerp, one_minus_power
from .words import sqrt, where


def nadam_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    mu = beta1 * (1 - 0.5 * 0.96 ** (step * group["momentum_decay"]))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * group["momentum_decay"]))
    mu_product = carried.get("mu_product", 1.0) * mu
    return {
        **lerp(1 - beta1),
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "decay": 1 - group["lr"] * group["weight_decay"],
        "weight_decay": group["weight_decay"],
        "bias_correction2": one_minus_power(beta2, step),
        "eps": group["eps"],
        "grad_step_size": group["lr"] * (1 - mu) / (1 - mu_product),
        "exp_avg_step_size": group["lr"] * mu_next / (1 - mu_product * mu_next),
        "mu_product": mu_product,
    }


@rule(states=("exp_avg", "exp_avg_sq"), nonnegative=("exp_avg_sq",), carried=("mu_product",), scalars=nadam_scalars)
def nadam(param, grad, state, s, flags):
    if flags.maximize:
        grad = -grad
    if flags.decoupled_weight_decay:
        param = param * s.decay
    else:
        # As torch, which skips the term: 0 * inf would be NaN.
        grad = where(s.weight_decay == 0, grad, grad + s.weight_decay * param)
    base = where(s.lerp_from_end > 0, grad, state.exp_avg)
    state.exp_avg = base + s.lerp * (grad - state.exp_avg)
    state.exp_avg_sq = s.beta2 * state.exp_avg_sq + s.one_minus_beta2 * grad * grad
    denominator = sqrt(state.exp_avg_sq / s.bias_correction2) + s.eps
    param = param - s.grad_step_size * grad / denominator
    return param - s.exp_avg_step_size * state.exp_avg / denominator
