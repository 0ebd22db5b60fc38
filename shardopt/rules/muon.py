r"""Muon: momentum whose singular values are all made about 1 (Jordan et al., 2024).

.. math::
    B_t &= \mu B_{t-1} + (1 - \mu) g_t, \qquad
        \tilde B_t = (1 - \mu) g_t + \mu B_t \ \text{(Nesterov)} \\
    O_t &= \mathrm{NS}_k(\tilde B_t) \\
    \theta_t &= \theta_{t-1} (1 - \gamma\lambda) - \gamma r(\theta) O_t

:math:`\mathrm{NS}_k` is :math:`k` steps of a Newton-Schulz iteration in bf16, which begins with
:math:`X = B / \max(\lVert B \rVert_F, \epsilon)`, transposed where it has more rows than columns:

.. math::
    A = X X^\top, \qquad X \leftarrow a X + (b A + c A^2) X

The factor :math:`r` of a matrix of R rows and C columns is :math:`\sqrt{\max(1, R / C)}` ("original"; Jordan), or
:math:`0.2 \sqrt{\max(R, C)}` ("match_rms_adamw"; Liu et al., arXiv 2502.16982). Both passes are spelled as torch rounds
them, so that the bits are those of ``torch.optim.Muon``.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .matrix import matrix_rule
from .rule import rule
from .words import fma, where


def _rounded_lerp(name: str, weight: float) -> dict[str, float]:
    """The scalars of ``lerp_(end, weight)``, as torch computes them: in fp32, from the nearer end."""
    rounded = np.float32(weight)
    from_end = abs(rounded) >= 0.5
    return {name: float(rounded - np.float32(1) if from_end else rounded), f"{name}_from_end": float(from_end)}


def muon_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    momentum, lr = group["momentum"], group["lr"]
    if len(group["ns_coefficients"]) != 3 or group["ns_steps"] >= 100:  # written to the group since it was checked
        raise ValueError("ns_coefficients takes three numbers, ns_steps a number below 100")
    return {
        **_rounded_lerp("lerp", 1 - momentum),
        **_rounded_lerp("nesterov_lerp", momentum),
        "decay": 1 - lr * group["weight_decay"],
        "minus_lr": -lr * _ratio(group["adjust_lr_fn"], *group["shape"]),
    }


def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


@rule(states=("momentum_buffer",), scalars=muon_scalars, counts_steps=False)
def accumulate(param, grad, state, s, flags):
    base = where(s.lerp_from_end > 0, grad, state.momentum_buffer)
    state.momentum_buffer = fma(s.lerp, grad - state.momentum_buffer, base)
    update = state.momentum_buffer
    if flags.nesterov:
        base = where(s.nesterov_lerp_from_end > 0, state.momentum_buffer, grad)
        update = fma(s.nesterov_lerp, state.momentum_buffer - grad, base)
    return update


@rule(scalars=muon_scalars, counts_steps=False)
def apply(param, update, state, s):
    return fma(s.minus_lr, update, param * s.decay)


@matrix_rule(accumulate=accumulate, apply=apply)
def muon(update: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    a, b, c = group["ns_coefficients"]
    is_tall = update.size(0) > update.size(1)
    x = update.T if is_tall else update
    x.div_(x.norm().clamp(min=group["eps"]))
    for _ in range(int(group["ns_steps"])):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
