"""What is the arithmetic? One rule a file; the vocabulary; the decorator for rules of one's own."""

from .rule import Rule, Variant, rule
from .words import abs, clamp, maximum, minimum, sign, sqrt, where

__all__ = ["Rule", "Variant", "abs", "clamp", "maximum", "minimum", "rule", "sign", "sqrt", "where"]
