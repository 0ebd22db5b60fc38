"""Triton spellings of the formats that take more than a cast; ``formats.py`` defines them.

Blocks are rows: tiles are 2D [BLOCKS, 256], scales 1D [BLOCKS].
"""

import triton
import triton.language as tl

from .formats import (
    BELOW_TOP,
    GOLDEN,
    LARGEST_FP32,
    NAN_BITS,
    SCALE_DROPPED_BITS,
    SMALLEST_SCALE,
)

_NAN = tl.constexpr(NAN_BITS)
_HALF_SCALE = tl.constexpr(1 << (SCALE_DROPPED_BITS - 1))
_KEPT_OF_SCALE = tl.constexpr(-1 << SCALE_DROPPED_BITS)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_BELOW_TOP = tl.constexpr(BELOW_TOP)
_GOLDEN = tl.constexpr(GOLDEN - 2**32)  # as an int32
_LARGEST_FP32 = tl.constexpr(LARGEST_FP32)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def shr(bits, width: tl.constexpr):
    """Shifts right; zeros come in from above."""
    return (bits.to(tl.uint32, bitcast=True) >> width).to(tl.int32, bitcast=True)


@triton.jit
def one_nan_bits(x):
    """Returns the bits of x, the same ones for every NaN: rounding cannot turn them into infinity or -0."""
    return tl.where(x != x, _NAN, bits_of(x))


# -- masters: the param is the upper half ------------------------------------------------------------------------------


@triton.jit
def join(param, rest, MASTER: tl.constexpr):
    """Returns the fp32 master; the param comes as its bits in int16."""
    upper = param.to(tl.int32) << 16
    if MASTER == "split":
        return from_bits(upper + rest.to(tl.int32))
    else:
        return from_bits(upper + (rest.to(tl.int32) << 8))


@triton.jit
def part_master(x, MASTER: tl.constexpr):
    """Returns the bits of the bf16 param, and the master's low bits that are stored beside it."""
    bits = one_nan_bits(x)
    if MASTER == "split":
        upper = shr(bits + 0x8000, 16)
        return upper.to(tl.int16), (bits - (upper << 16)).to(tl.int16)
    else:
        bits = shr(bits + 0x80, 8)
        upper = shr(bits + 0x80, 8)
        return upper.to(tl.int16), (bits - (upper << 8)).to(tl.int8)


# -- stochastic rounding and dither ------------------------------------------------------------------------------------


@triton.jit
def draw(element, key, other_key, STREAM: tl.constexpr):
    """Returns 32 random bits: lowbias32 (https://nullprogram.com/blog/2018/07/31) with a key before each half."""
    # Any odd factor will do: it gives the streams of one element (param and states) other bits each.
    x = element ^ (key + STREAM * 58169239)
    x = (x ^ shr(x, 16)) * 2146121005
    x = x + other_key
    x = (x ^ shr(x, 15)) * -2073254261
    return x ^ shr(x, 16)


@triton.jit
def dither(element, phase, STREAM: tl.constexpr):
    """Returns 32 bits that are spread evenly over elements and steps."""
    return element * _GOLDEN + (phase + STREAM * 58169239)


@triton.jit
def narrow_up(x, bits):
    """Rounds to bf16: up if the upper half of ``bits`` plus the part that is cut off overflow."""
    return shr(one_nan_bits(x) + shr(bits, 16), 16).to(tl.int16)


# -- blocks in 8 bits --------------------------------------------------------------------------------------------------


@triton.jit
def decode(codes, scales, FORMAT: tl.constexpr):
    HAS_SIGN: tl.constexpr = FORMAT[1]
    SHIFT: tl.constexpr = FORMAT[2]
    OFFSET_BITS: tl.constexpr = FORMAT[3]
    OFFSET: tl.constexpr = FORMAT[4]
    bits = codes.to(tl.int32)
    if HAS_SIGN:
        fraction = from_bits(((bits & 127) << SHIFT) + OFFSET_BITS) - OFFSET
        return from_bits(bits_of(fraction * scales[:, None]) | ((bits & 128) << 24))
    else:
        return (from_bits((bits << SHIFT) + OFFSET_BITS) - OFFSET) * scales[:, None]


@triton.jit
def encode(x, valid, noise, FORMAT: tl.constexpr):
    """Returns codes and the scales of their blocks; invalid elements do not count. Noise is 32 bits an element."""
    HAS_SIGN: tl.constexpr = FORMAT[1]
    SHIFT: tl.constexpr = FORMAT[2]
    OFFSET_BITS: tl.constexpr = FORMAT[3]
    OFFSET: tl.constexpr = FORMAT[4]
    TO_SCALE: tl.constexpr = FORMAT[5]
    LARGEST_SCALE: tl.constexpr = FORMAT[6]
    if HAS_SIGN:  # noqa: SIM108  decided when it is compiled
        magnitude = bits_of(x) & 0x7FFFFFFF
    else:
        magnitude = tl.maximum(one_nan_bits(x), 0)  # a NaN may have a sign, and must not become zero
    largest = from_bits(tl.minimum(tl.max(tl.where(valid, magnitude, 0), axis=1), _NAN))
    rounded = from_bits((bits_of(largest * TO_SCALE) + _HALF_SCALE) & _KEPT_OF_SCALE)
    rounded = tl.where(rounded < LARGEST_SCALE, rounded, LARGEST_SCALE)
    rounded = tl.where(rounded < _SMALLEST_SCALE, _SMALLEST_SCALE, rounded)
    scales = tl.where(largest == 0.0, 0.0, tl.where(largest <= _LARGEST_FP32, rounded, largest))
    inverses = tl.div_rn(1.0, tl.where(scales < _SMALLEST_SCALE, _SMALLEST_SCALE, scales))
    bits = bits_of(from_bits(magnitude) * inverses[:, None] + OFFSET) - OFFSET_BITS
    TOP: tl.constexpr = 127 if HAS_SIGN else 255
    up = tl.maximum(shr(noise, 32 - SHIFT), bits - ((TOP << SHIFT) - 2 * _BELOW_TOP))
    codes = shr(bits + up, SHIFT)
    if HAS_SIGN:
        codes = tl.minimum(codes, 127) | (shr(bits_of(x), 31) << 7)
    else:
        codes = tl.maximum(tl.minimum(codes, 255), tl.minimum(magnitude, 1))
    return codes.to(tl.uint8), scales
