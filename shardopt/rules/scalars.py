"""Arithmetic that the scalars of several rules share, in float64 on the host."""

import math
from collections.abc import Mapping
from typing import Any


def one_minus_power(beta: float, step: int) -> float:
    """Returns ``1 - beta ** step``, without cancellation for betas near 1, for any step up to 2**53."""
    return 1.0 if beta == 0.0 else -math.expm1(step * math.log(beta))


def lerp(weight: float) -> dict[str, float]:
    """Returns the scalars with which a rule spells ``average.lerp_(value, weight)``::

        base = where(s.lerp_from_end > 0, grad, state.average)
        state.average = base + s.lerp * (grad - state.average)

    As in torch, the nearer end is the base. So a weight of 1 (``beta1 = 0``) gives the gradient itself. With the old
    average as the base, a gradient far smaller than it would be lost in ``average + (grad - average)``.
    """
    from_end = weight >= 0.5
    return {"lerp": weight - 1 if from_end else weight, "lerp_from_end": float(from_end)}


def trusts(group: Mapping[str, Any]) -> float:
    """Returns 1 if the trust ratio of a param (``ndim`` dimensions) is that of its norms, 0 if it is 1."""
    return float(bool(group["trust"]) or group["ndim"] >= 2)
