"""How far two correct fp32 implementations of a rule may lie apart: running error analysis of its source.

The rule's own text is run on float64 values that each carry a bound of the error which fp32 rounding can have put into
them so far (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3). So the tolerance of every element
follows from its own operands: tight where nothing cancels, wide exactly where something does, infinite where fp32
overflows. Nothing is tuned by hand, and a relative error of 1e-5 in a scalar is far outside of it.
"""

import functools
from collections.abc import Mapping
from types import CodeType
from typing import Any

import numpy as np

from shardopt.rules.rule import Rule

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

U = 2.0**-24  # half an ulp of 1
SMALLEST = 2.0**-149
LARGEST = 3.4e38


class Bounded:
    """A value and how far an fp32 computation of it may be off."""

    __array_ufunc__ = None  # NumPy leaves its operators to us

    def __init__(self, value: Any, error: Any = 0.0) -> None:
        self.value: Array = np.asarray(value, np.float64)
        self.error: Array = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)

    @staticmethod
    def of(number: Any) -> "Bounded":
        return number if isinstance(number, Bounded) else Bounded(number)

    @staticmethod
    def rounded(value: Array, error: Array) -> "Bounded":
        """The result of one operation: its own rounding joins; what overflows in fp32 is unbounded."""
        total = error + U * (np.abs(value) + error) + SMALLEST
        return Bounded(value, np.where(np.abs(value) + total < LARGEST, total, np.inf))

    def __add__(self, other: Any) -> "Bounded":
        other = Bounded.of(other)
        return Bounded.rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Any) -> "Bounded":
        other = Bounded.of(other)
        return Bounded.rounded(self.value - other.value, self.error + other.error)

    def __rsub__(self, other: Any) -> "Bounded":
        return Bounded.of(other) - self

    def __mul__(self, other: Any) -> "Bounded":
        other = Bounded.of(other)
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        product = Bounded.rounded(self.value * other.value, np.where(np.isnan(error), np.inf, error))
        zero = [(each.value == 0) & (each.error == 0) for each in (self, other)]
        product.error = np.where(zero[0] | zero[1], 0.0, product.error)
        return product

    def __truediv__(self, other: Any) -> "Bounded":
        other = Bounded.of(other)
        value, least = self.value / other.value, np.abs(other.value) - other.error
        error = (self.error + np.abs(value) * other.error) / least
        return Bounded.rounded(value, np.where((least > 0) & ~np.isnan(error), error, np.inf))

    __radd__, __rmul__ = __add__, __mul__

    def __gt__(self, other: Any) -> "Truth":
        difference = self - other
        error = self.error + Bounded.of(other).error
        return Truth(difference.value > 0, (np.abs(difference.value) > error) | (error == 0))

    def __lt__(self, other: Any) -> "Truth":
        return Bounded.of(other) > self

    def __eq__(self, other: Any) -> "Truth":  # type: ignore[override]
        return Truth(self.value == Bounded.of(other).value, np.asarray(True))


class Truth:
    """A comparison, and whether rounding cannot change it."""

    def __init__(self, value: Any, certain: Any) -> None:
        self.value, self.certain = np.asarray(value), np.asarray(certain)


def where(condition: Truth, one: Any, other: Any) -> Bounded:
    one, other = Bounded.of(one), Bounded.of(other)
    either = np.maximum(one.error, other.error) + np.abs(one.value - other.value)
    chosen = np.where(condition.value, one.error, other.error)
    return Bounded(np.where(condition.value, one.value, other.value), np.where(condition.certain, chosen, either))


def maximum(one: Any, other: Any) -> Bounded:
    one, other = Bounded.of(one), Bounded.of(other)
    larger = one > other
    chosen = np.where(larger.value, one.error, other.error)
    error = np.where(larger.certain, chosen, np.maximum(one.error, other.error))
    return Bounded(np.maximum(one.value, other.value), error)


def minimum(one: Any, other: Any) -> Bounded:
    one, other = Bounded.of(one), Bounded.of(other)
    smaller = one < other
    chosen = np.where(smaller.value, one.error, other.error)
    error = np.where(smaller.certain, chosen, np.maximum(one.error, other.error))
    return Bounded(np.minimum(one.value, other.value), error)


def sqrt(number: Bounded) -> Bounded:
    least = np.sqrt(np.maximum(number.value - number.error, 0))
    most = np.sqrt(np.maximum(number.value, 0) + number.error)
    # Below 0 the one implementation may give NaN and the other not.
    value = np.sqrt(np.maximum(number.value, 0))
    error = np.where((number.value < number.error) & (number.value != 0), np.inf, most - least)
    return Bounded.rounded(value, np.where(np.isnan(error), np.inf, error))


def sign(number: Bounded) -> Bounded:
    certain = (np.abs(number.value) > number.error) | (number.error <= SMALLEST)
    return Bounded(np.sign(number.value), np.where(certain, 0.0, 2.0))


WORDS = {
    "where": where,
    "maximum": maximum,
    "minimum": minimum,
    "sqrt": sqrt,
    "sign": sign,
    "abs": lambda number: Bounded(np.abs(number.value), number.error),
    "clamp": lambda number, low, high: minimum(maximum(number, low), high),
    "fma": lambda one, other, third: one * other + third,
}


def bounded_step(
    rule: Rule,
    group: Mapping[str, Any],
    param: Array,
    grad: Array,
    states: Mapping[str, Array],
    step: int,
    carried: Mapping[str, float],
) -> dict[str, Bounded]:
    """The param ("param") and the states after update number ``step`` (from 1)."""
    variant = rule.variant(group)
    scalars, _ = rule.evaluate(variant, group, step, carried)
    names: dict[str, Any] = {**WORDS, "param": Bounded(param), "grad": Bounded(grad)}
    names |= {f"state_{name}": Bounded(states[name] if name in states else 0 * param) for name in variant.states}
    names |= {f"s_{name}": Bounded(value, U * abs(value)) for name, value in zip(variant.scalars, scalars, strict=True)}
    with np.errstate(all="ignore"):
        exec(_code(variant.source), names)
    return {name: names[f"state_{name}"] for name in variant.states} | {"param": names["param"]}


@functools.cache
def _code(source: str) -> CodeType:
    return compile(source, "<rule>", "exec")
