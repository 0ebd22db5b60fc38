"""What is the arithmetic?

A rule is one update, written once on fp32 scalars, in a file of its own. ``rule.py`` has the decorator that makes
rules, ``words.py`` the words that a rule may use, and ``language.py`` reads it. Nothing here knows a kernel, a rank or
a tier.
"""

from .rule import Rule, Variant, rule
from .words import abs, clamp, maximum, minimum, sign, sqrt, where

__all__ = ["Rule", "Variant", "abs", "clamp", "maximum", "minimum", "rule", "sign", "sqrt", "where"]
