"""Triton spellings of the formats that take more than a cast; ``formats.py`` defines them.

A tile is a block, 2D [1, 256]; its scale is a number.
"""

import triton
import triton.language as tl

from .formats import BELOW_TOP, GOLDEN, INFINITY_BITS, LARGEST_FP32, NAN_BITS, SCALE_DROPPED_BITS, SMALLEST_SCALE

_NAN = tl.constexpr(NAN_BITS)
_INFINITY = tl.constexpr(INFINITY_BITS)
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


# -- masters beside a param --------------------------------------------------------------------------------------------


@triton.jit
def follow(param, master, ties):
    """Returns the master if it rounds to the bf16 param, which comes as it is widened, else the param.

    A tie is rounded to the even number; if ``ties`` is 1 and not 0, it may also be rounded away from zero.
    """
    upper = bits_of(param)
    distance, odd = bits_of(master) - upper, shr(upper, 16) & 1
    is_near = (distance >= (odd & (1 - ties)) - 0x8000) & (distance <= 0x8000 - odd)
    return tl.where(is_near & (master == master), master, param)


# -- masters: the param is the upper half ------------------------------------------------------------------------------


@triton.jit
def join(param, rest, MASTER: tl.constexpr):
    """Returns the fp32 master; the param comes as it is widened."""
    upper = bits_of(param)
    low = rest.to(tl.int32) if MASTER == "split" else rest.to(tl.int32) << 8
    # Added to the magnitude, between zero and infinity: see ``formats.py``.
    magnitude = upper & 0x7FFFFFFF
    joined = tl.minimum(tl.maximum(magnitude + low, 0), tl.maximum(magnitude, _INFINITY))
    return from_bits(joined | (upper & -0x80000000))


@triton.jit
def part_master(x, MASTER: tl.constexpr):
    """Returns the bits of the bf16 param, and the master's low bits that are stored beside it."""
    bits = one_nan_bits(x)
    if MASTER == "split":
        upper = shr(bits + 0x8000, 16)
        return upper.to(tl.int16), (bits - (upper << 16)).to(tl.int16)
    else:
        # Both bytes are cut out of a sum: the upper half of the rounded bits plus 0x80 << 8.
        return shr(bits + 0x8080, 16).to(tl.int16), shr(bits + 0x80, 8).to(tl.int8)


# -- stochastic rounding and dither ------------------------------------------------------------------------------------


@triton.jit
def draw(first, places, key, other_key, STREAM: tl.constexpr):
    """Returns 32 random bits: lowbias32 (https://nullprogram.com/blog/2018/07/31) with a key before each half.

    An element is the block's first one, a multiple of 256, plus its place. So the place is all that differs within a
    block before the first product, and what is done to the bits above it is done once.
    """
    # Any odd factor will do: it gives the streams of one element (param and states) other bits each.
    x = first ^ (key + STREAM * 58169239)
    x = ((x ^ shr(x, 16)) ^ places) * 2146121005
    x = x + other_key
    x = (x ^ shr(x, 15)) * -2073254261
    return x ^ shr(x, 16)


@triton.jit
def dither(first, places, phase, STREAM: tl.constexpr):
    """Returns 32 bits that are spread evenly over elements and steps."""
    return (first * _GOLDEN + (phase + STREAM * 58169239)) + places * _GOLDEN


@triton.jit
def narrow_up(x, bits):
    """Rounds to bf16: up if the upper half of ``bits`` plus the part that is cut off overflow."""
    return shr(one_nan_bits(x) + shr(bits, 16), 16).to(tl.int16)


# -- blocks in 8 bits --------------------------------------------------------------------------------------------------


@triton.jit
def load_codes(pointer, block, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """Returns the codes of a block [1, BLOCK], each in the upper bits of an int32; other codes lie below it."""
    BITS: tl.constexpr = NUMBERS[6]
    first = (pointer + block * (BLOCK * BITS // 8)).to(tl.pointer_type(tl.int32))
    words = tl.load(first + tl.arange(0, BLOCK * BITS // 32)[None, :])
    if BITS == 8:
        return tl.reshape(tl.join(tl.join(words << 24, words << 8), tl.join(words << 16, words)), (1, BLOCK))
    else:
        even = tl.join(tl.join(words << 28, words << 12), tl.join(words << 20, words << 4))
        odd = tl.join(tl.join(words << 24, words << 8), tl.join(words << 16, words))
        return tl.reshape(tl.join(even, odd), (1, BLOCK))


@triton.jit
def store_codes(pointer, block, codes, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """Stores the codes of a block [1, BLOCK], a byte each; of 4 bits two in a byte, the first in the lower bits."""
    BITS: tl.constexpr = NUMBERS[6]
    if BITS == 4:
        even, odd = tl.split(tl.reshape(codes, (1, BLOCK // 2, 2)))
        codes = even | (odd << 4)
    tl.store(pointer + block * (BLOCK * BITS // 8) + tl.arange(0, BLOCK * BITS // 8)[None, :], codes)


@triton.jit
def decode(codes, scale, unknown_zero, NUMBERS: tl.constexpr):
    HAS_SIGN: tl.constexpr = NUMBERS[0]
    SHIFT: tl.constexpr = NUMBERS[1]
    OFFSET_BITS: tl.constexpr = NUMBERS[2]
    OFFSET: tl.constexpr = NUMBERS[3]
    BITS: tl.constexpr = NUMBERS[6]
    TOP: tl.constexpr = (1 << (BITS - HAS_SIGN)) - 1
    # A sum that the compiler cannot know stays in a register: one instruction takes no two constants.
    offset_bits = OFFSET_BITS + unknown_zero
    fraction = from_bits((codes >> (32 - BITS - SHIFT)) & (TOP << SHIFT) | offset_bits) - OFFSET
    value = fraction * scale
    if HAS_SIGN:
        return from_bits(bits_of(value) | (codes & -(2**31)))
    else:
        return value


@triton.jit
def encode(x, start, end_ptr, is_whole, noise, NUMBERS: tl.constexpr, ROUNDING: tl.constexpr):
    """Returns the codes of a block and its scale. Noise is 32 bits an element, where it is dithered.

    Elements behind the end of the param do not count. Only in a program that has none of them the masks cost nothing.
    """
    HAS_SIGN: tl.constexpr = NUMBERS[0]
    SHIFT: tl.constexpr = NUMBERS[1]
    OFFSET_BITS: tl.constexpr = NUMBERS[2]
    OFFSET: tl.constexpr = NUMBERS[3]
    TO_SCALE: tl.constexpr = NUMBERS[4]
    LARGEST_SCALE: tl.constexpr = NUMBERS[5]
    BITS: tl.constexpr = NUMBERS[6]
    TOP: tl.constexpr = (1 << (BITS - HAS_SIGN)) - 1
    if HAS_SIGN:  # noqa: SIM108  decided when it is compiled
        magnitude = bits_of(x) & 0x7FFFFFFF
    else:  # a NaN may have a sign, and must not become zero
        magnitude = bits_of(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))
    magnitude = magnitude.to(tl.uint32, bitcast=True)
    if is_whole:
        if HAS_SIGN:  # an operation on floats leaves out the signs of both operands at no cost
            one, other = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
            larger = tl.maximum(tl.abs(one), tl.abs(other), propagate_nan=tl.PropagateNan.ALL)
            top = tl.max(bits_of(larger).to(tl.uint32, bitcast=True))
        else:
            top = tl.max(magnitude)
    else:
        left = tl.load(end_ptr, cache_modifier=".cg") - start
        top = tl.max(tl.where(tl.arange(0, x.shape[1])[None, :] < left, magnitude, 0))
    largest = from_bits(tl.minimum(top, _NAN))
    rounded = from_bits((bits_of(largest * TO_SCALE) + _HALF_SCALE) & _KEPT_OF_SCALE)
    rounded = tl.where(rounded < LARGEST_SCALE, rounded, LARGEST_SCALE)
    rounded = tl.where(rounded < _SMALLEST_SCALE, _SMALLEST_SCALE, rounded)
    scale = tl.where(largest == 0.0, 0.0, tl.where(largest <= _LARGEST_FP32, rounded, largest))
    inverse = tl.div_rn(1.0, tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale))
    bits = bits_of(from_bits(magnitude) * inverse + OFFSET)
    if ROUNDING == "dithered":
        up = tl.maximum(shr(noise, 32 - SHIFT), bits - (OFFSET_BITS + (TOP << SHIFT) - 2 * _BELOW_TOP))
    else:  # the largest has the top code by itself
        up = 1 << (SHIFT - 1)
    # In one addition with a limit, and unsigned: a NaN is the largest, with a sign too.
    most: tl.constexpr = OFFSET_BITS + ((TOP + 1) << SHIFT) - 1
    bits = tl.minimum((bits + up).to(tl.uint32, bitcast=True), most).to(tl.int32, bitcast=True)
    if HAS_SIGN:
        codes = shr(bits - OFFSET_BITS, SHIFT) | (shr(bits_of(x), 32 - BITS) & (TOP + 1))
    else:
        bits = tl.where(magnitude > 0, tl.maximum(bits, OFFSET_BITS + (1 << SHIFT)), bits)
        codes = shr(bits - OFFSET_BITS, SHIFT)
    return codes.to(tl.uint8), scale
