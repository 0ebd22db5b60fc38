"""The vocabulary of rules: words on fp32 scalars, defined here in NumPy.

Training never runs a rule from this file: the rule's source is translated to Triton and to native code. Both
translations must equal these definitions bit for bit, and the tests run them in float64 as the oracle.
``minimum`` and ``maximum`` return a NaN when either side is one, as ``torch.minimum`` does.

``norm``, ``mean_square`` and ``max_abs`` look at all elements of the param, wherever they lie: the compiler cuts a rule
into passes at each of them (``passes.py``).
"""

from collections.abc import Callable
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


def fma(x: Value, y: Value, z: Value) -> Value:
    """Returns ``x * y + z``, of fp32 rounded once, as torch's ``lerp`` and ``add(alpha=)``; of float64 twice."""
    product = np.multiply(x, y, dtype=np.float64)  # exact for fp32
    total = product + z
    if np.result_type(x, y, z) != np.float32:
        return total
    # What the float64 sum lost (Knuth's two-sum) makes its last bit odd, so that rounding to fp32 cannot meet a false
    # tie (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    part = total - product
    lost = (product - (total - part)) + (z - part)
    is_even = (np.asarray(total).view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    is_nudged = is_even & (lost != 0) & np.isfinite(lost) & np.isfinite(total)
    return np.where(is_nudged, np.nextafter(total, towards), total).astype(np.float32)


def norm(x: Value) -> Value:
    """Returns the 2-norm over all elements of the param; a NaN if one of them is Inf or NaN."""
    return _of_all(x, lambda wide: np.sqrt(np.square(wide).sum()))


def mean_square(x: Value) -> Value:
    """Returns the mean of the squares over all elements of the param; a NaN if one of them is Inf or NaN."""
    return _of_all(x, lambda wide: np.square(wide).sum() / max(wide.size, 1))


def max_abs(x: Value) -> Value:
    """Returns the largest magnitude over all elements of the param; a NaN if one of them is Inf or NaN."""
    return _of_all(x, lambda wide: np.abs(wide).max(initial=0.0))


def _of_all(x: Value, reduce: Callable[[Value], Value]) -> Value:
    elements = np.asarray(x)
    found = reduce(elements.astype(np.float64)) if np.isfinite(elements).all() else np.nan
    return np.asarray(found).astype(elements.dtype)[()]


# Word that a rule may call -> number of its arguments.
WORDS = {"sqrt": 1, "abs": 1, "sign": 1, "minimum": 2, "maximum": 2, "clamp": 3, "where": 3, "fma": 3}
# Words on all elements of a param.
REDUCTIONS = {"norm": 1, "mean_square": 1, "max_abs": 1}
