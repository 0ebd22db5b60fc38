"""The checksum, as Numba compiles it; ``checksum.py`` defines it and has it compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def _words_at(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(types.int64), emit


def mixing(seeds: tuple[int, int, int, int], factor: int) -> Callable[..., Any]:
    """Returns ``(address of the words, how many, address of the result)``."""
    prime = np.uint64(factor)
    seed0, seed1, seed2, seed3 = map(np.uint64, seeds)
    left, right = np.uint64(29), np.uint64(35)

    def mixed(address, count, result):
        words = _words_at(address)
        a, b, c, d = seed0, seed1, seed2, seed3
        for i in range(0, count, 4):
            a ^= words[i]
            b ^= words[i + 1]
            c ^= words[i + 2]
            d ^= words[i + 3]
            a = ((a << left) | (a >> right)) * prime
            b = ((b << left) | (b >> right)) * prime
            c = ((c << left) | (c >> right)) * prime
            d = ((d << left) | (d >> right)) * prime
        for other in (b, c, d):
            a ^= other
            a = ((a << left) | (a >> right)) * prime
        _words_at(result)[0] = a

    return mixed
