"""The vocabulary of rules: a dozen words on fp32 scalars, given here in NumPy.

A rule is never run from this file during training: its source is translated to Triton and to native code. These are
the definitions that both translations must equal bit for bit, and what the tests run in float64 as the oracle.
``minimum`` and ``maximum`` return a NaN when either side is one, as ``torch.minimum`` does.
"""

from typing import Any

import numpy as np

Value = Any  # np.float32 or np.float64, a scalar or an array


def sqrt(x: Value) -> Value:
    """Square root, correctly rounded."""
    return np.sqrt(x)


def abs(x: Value) -> Value:
    """Magnitude: clears the sign bit."""
    return np.abs(x)


def sign(x: Value) -> Value:
    """-1, 0 or 1; 0 for a NaN, as ``torch.sign``."""
    return where(x > 0, 1.0, where(x < 0, -1.0, 0.0)).astype(np.asarray(x).dtype)


def minimum(x: Value, y: Value) -> Value:
    """The smaller one; a NaN wins."""
    return where((x < y) | (x != x), x, y)


def maximum(x: Value, y: Value) -> Value:
    """The larger one; a NaN wins."""
    return where((x > y) | (x != x), x, y)


def clamp(x: Value, low: Value, high: Value) -> Value:
    """``minimum(maximum(x, low), high)``."""
    return minimum(maximum(x, low), high)


def where(condition: Value, x: Value, y: Value) -> Value:
    """``x`` where the condition holds, else ``y``; both are evaluated."""
    return np.where(condition, x, y)


# word -> number of arguments; what a rule may call.
WORDS = {"sqrt": 1, "abs": 1, "sign": 1, "minimum": 2, "maximum": 2, "clamp": 3, "where": 3}
