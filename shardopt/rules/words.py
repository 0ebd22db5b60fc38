"""The vocabulary of rules: words on fp32 scalars, defined here in NumPy.

Training never runs a rule from this file: the rule's source is translated to Triton and to native code. Both
translations must equal these definitions bit for bit, and the tests run them in float64 as the oracle.
``minimum`` and ``maximum`` return a NaN when either side is one, as ``torch.minimum`` does.
"""

from typing import Any

import numpy as np

Value = Any  # np.float32 or np.float64, a scalar or an array


def sqrt(x: Value) -> Value:
    """Returns the square root, correctly rounded."""
    return np.sqrt(x)


def abs(x: Value) -> Value:
    """Returns the magnitude: clears the sign bit."""
    return np.abs(x)


def sign(x: Value) -> Value:
    """Returns -1, 0 or 1; 0 for a NaN, as ``torch.sign``."""
    return where(x > 0, 1.0, where(x < 0, -1.0, 0.0)).astype(np.asarray(x).dtype)


def minimum(x: Value, y: Value) -> Value:
    """Returns the smaller one; a NaN wins."""
    return where((x < y) | (x != x), x, y)


def maximum(x: Value, y: Value) -> Value:
    """Returns the larger one; a NaN wins."""
    return where((x > y) | (x != x), x, y)


def clamp(x: Value, low: Value, high: Value) -> Value:
    """Returns ``minimum(maximum(x, low), high)``."""
    return minimum(maximum(x, low), high)


def where(condition: Value, x: Value, y: Value) -> Value:
    """Returns ``x`` where the condition holds, else ``y``; both are evaluated."""
    return np.where(condition, x, y)


# Word that a rule may call -> number of its arguments.
WORDS = {"sqrt": 1, "abs": 1, "sign": 1, "minimum": 2, "maximum": 2, "clamp": 3, "where": 3}
