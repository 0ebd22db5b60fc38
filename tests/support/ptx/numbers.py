"""The kinds of numbers that PTX names, as NumPy types: ``b`` bits, ``u`` and ``s`` integers, ``f`` floats, ``pred``."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_LETTERS = {"b": "uint", "u": "uint", "s": "int", "f": "float"}
TYPES: dict[str, Any] = {
    f"{letter}{width}": np.dtype(f"{name}{width}")
    for letter, name in _LETTERS.items()
    for width in (8, 16, 32, 64)
    if (letter, width) != ("f", 8)
}
TYPES["pred"] = np.dtype(bool)
TYPES["f16x2"] = TYPES["b32"]
# Of every NaN that arithmetic makes.
CANONICAL_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FFFFFFFFFFFFFFF}


class PtxError(Exception):
    """What a GPU would refuse or leave undefined, or what is not known here."""


def width_of(kind: str) -> int:
    """Bits of a register of this kind."""
    return 1 if kind == "pred" else 8 * int(TYPES[kind].itemsize)


def bits_of(values: Array) -> Array:
    """The same bits as unsigned integers; predicates stay as they are."""
    return values if values.dtype == bool else values.view(f"u{values.dtype.itemsize}")


def one_nan(values: Array) -> Array:
    """Floats with the canonical NaN for every NaN."""
    width = 8 * values.dtype.itemsize
    nan = np.array(CANONICAL_NAN[width], f"u{width // 8}").view(values.dtype)
    return np.where(np.isnan(values), nan, values)
