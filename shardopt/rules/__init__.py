"""What is the arithmetic?

A rule is one update, written once on fp32 scalars, in a file of its own. ``rule.py`` has the decorator that makes
rules, ``words.py`` the words that a rule may use, and ``language.py`` reads it. Nothing here knows a kernel, a rank or
a tier.
"""

from .rule import Rule, Variant, rule
from .words import Value, abs, clamp, fma, max_abs, maximum, mean_square, minimum, norm, sign, sqrt, where

__all__ = [
    "Rule",
    "Value",
    "Variant",
    "abs",
    "clamp",
    "fma",
    "max_abs",
    "maximum",
    "mean_square",
    "minimum",
    "norm",
    "rule",
    "sign",
    "sqrt",
    "where",
]
