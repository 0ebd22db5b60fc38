"""What is the arithmetic?

A rule is one update, written once on fp32 scalars: a file for each; ``words.py`` has the vocabulary, ``rule.py`` the
decorator for rules of one's own. Nothing here knows a kernel, a rank or a tier.
"""

from .rule import Rule, Variant, rule
from .words import abs, clamp, maximum, minimum, sign, sqrt, where

__all__ = ["Rule", "Variant", "abs", "clamp", "maximum", "minimum", "rule", "sign", "sqrt", "where"]
