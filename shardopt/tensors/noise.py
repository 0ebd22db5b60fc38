"""Noise of parts, drawn by element: the same values on whichever rank and in however many slices.

An element draws ``hash(element, key)``, the hash of stochastic rounding (``draw`` in ``kernels/native_formats.py``),
computed by torch on the part's device. The key names the draw: the optimizer's seed, the param, its step, and the
number of the draw in that step. Ranks that draw in one order draw one noise, wherever torch's own generators are.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fetched_view import by_name

_aten = torch.ops.aten
_MASK = 2**32 - 1
_CHUNK = 1 << 20  # elements that are drawn at a time
_DIGITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}  # of a number below 1


@dataclass(frozen=True)
class _Drawing:
    """The elements that are drawn.

    Attributes:
        places: 1D int64, their indices in the param.
        digits: of a uniform number.
    """

    places: Tensor
    keys: tuple[int, int]
    digits: int

    def bits(self, stream: int = 0) -> Tensor:
        """Returns 32 random bits of each element, as int64."""
        key, other_key = self.keys
        x = (self.places & _MASK) ^ ((key + stream * 58169239 + (self.places >> 32) * 0x9E3779B1) & _MASK)
        x = ((x ^ (x >> 16)) * 2146121005) & _MASK
        x = (x + other_key) & _MASK
        x = ((x ^ (x >> 15)) * -2073254261) & _MASK
        return x ^ (x >> 16)

    def uniform(self, digits: int = 32, stream: int = 0) -> Tensor:
        """Returns numbers in [0, 1) of so many digits, as float64."""
        return (self.bits(stream) >> (32 - digits)).double() * 2.0**-digits

    def normal(self) -> Tensor:
        """Returns normal numbers: Box and Muller's, in float64, so that devices differ in hardly any last bit."""
        radius = (-2 * (1 - self.uniform()).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(stream=1)).cos()


def _integers(drawn: _Drawing, low: int, high: int | None) -> Tensor:
    return drawn.bits() % ((2**drawn.digits if high is None else high) - low) + low


_Way = Callable[[_Drawing, Mapping[str, Any]], Tensor]
_WAYS: dict[Any, _Way] = {
    _aten.rand_like: lambda drawn, _: drawn.uniform(drawn.digits),
    _aten.randn_like: lambda drawn, _: drawn.normal(),
    _aten.randint_like: lambda drawn, its: _integers(drawn, its.get("low", 0), its["high"]),
    _aten.normal_: lambda drawn, its: its.get("mean", 0.0) + its.get("std", 1.0) * drawn.normal(),
    _aten.uniform_: lambda drawn, its: (
        its.get("from", 0.0) + (its.get("to", 1.0) - its.get("from", 0.0)) * drawn.uniform(drawn.digits)
    ),
    _aten.bernoulli_: lambda drawn, its: drawn.uniform() < its.get("p", 0.5),
    _aten.bernoulli: lambda drawn, its: drawn.uniform() < its["p"],
    _aten.random_: lambda drawn, its: _integers(drawn, its.get("from", 0), its.get("to")),
    # Never 0, as torch's: -log of it is a Gumbel's.
    _aten.exponential_: lambda drawn, its: -(1 - drawn.uniform() - 2.0**-33).log() / its.get("lambd", 1.0),
    _aten.log_normal_: lambda drawn, its: (its.get("mean", 1.0) + its.get("std", 2.0) * drawn.normal()).exp(),
    _aten.geometric_: lambda drawn, its: ((1 - drawn.uniform()).log() / math.log1p(-its["p"])).ceil().clamp(min=1),
    _aten.cauchy_: lambda drawn, its: (
        its.get("median", 0.0) + its.get("sigma", 1.0) * (math.pi * (drawn.uniform() - 0.5)).tan()
    ),
}


@dataclass(frozen=True)
class Noise:
    """The values of one draw.

    Attributes:
        words: name the draw, and how it was drawn.
        dtype: of the values.
    """

    packet: Any
    named: Mapping[str, Any]
    words: str
    key: str
    dtype: torch.dtype

    def slice(self, start: int, count: int, device: torch.device) -> Tensor:
        """Returns the values of some elements, 1D, from the index ``start`` in the param's storage on."""
        keys = struct.unpack("<II", hashlib.blake2b(self.key.encode(), digest_size=8).digest())
        digits, found = _DIGITS.get(self.dtype, 32), torch.empty(count, dtype=self.dtype, device=device)
        for first in range(0, count, _CHUNK):
            some = found[first : first + _CHUNK]
            places = torch.arange(start + first, start + first + some.numel(), device=device)
            some.copy_(_WAYS[self.packet](_Drawing(places, keys, digits), self.named))
        return found

    def whole(self, size: torch.Size, stride: tuple[int, ...], device: torch.device) -> Tensor:
        """Returns the values of all elements of a param."""
        return self.slice(0, size.numel(), device).as_strided(size, stride)


def noise_of(function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], like: Any) -> Noise | None:
    """Returns the next noise that a function draws for a part; None for another function, or a generator's noise."""
    packet = function.overloadpacket
    if packet not in _WAYS or like.draws is None:
        return None
    named = by_name(function, arguments, keywords)
    del named[function._schema.arguments[0].name]
    is_of_numbers = not any(isinstance(each, Tensor | torch.Generator) for each in named.values())
    if not is_of_numbers or (packet is _aten.bernoulli and "p" not in named):
        return None
    key = like.draws()
    if key is None:
        return None
    numbers = {name: each for name, each in named.items() if type(each) in (int, float)}
    return Noise(packet, numbers, f"{packet.__name__} {numbers} of draw {key}", key, named.get("dtype") or like.dtype)
