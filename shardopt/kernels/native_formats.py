"""Numba spellings of the formats that take more than a cast: split masters, stochastic rounding, blocks in 8 bits.

``formats.py`` defines them; ``codecs.py`` and ``triton_formats.py`` give the same bits. All words are int32: Numba's
own operators would widen to 64 bits, and halve the width of a vector.
"""

from typing import Any

from numba import njit, types

from ..compilers.native import COMPILE_OPTIONS
from .formats import BELOW_TOP, GOLDEN, INFINITY_BITS, LARGEST_FP32, NAN_BITS, SCALE_DROPPED_BITS, SMALLEST_SCALE
from .native_words import (
    abs,
    add,
    both,
    differ,
    either,
    f32_to_half,
    from_bits,
    half_to_f32,
    larger,
    mul,
    one_nan,
    shl,
    shr,
    smaller,
    sub,
    to_bits,
    where,
)

i32, f32, i8, u8, i16, u16 = types.int32, types.float32, types.int8, types.uint8, types.int16, types.uint16

_HALF_SCALE, _KEPT_OF_SCALE = 1 << (SCALE_DROPPED_BITS - 1), -1 << SCALE_DROPPED_BITS


# -- masters beside a param --------------------------------------------------------------------------------------------


@njit(**COMPILE_OPTIONS)
def follow_bf16(param: Any, master: Any, ties: Any) -> Any:
    """Returns the master if it rounds to the param, else the param.

    A tie is rounded to the even number; if ``ties`` is 1 and not 0, it may also be rounded away from zero.
    """
    upper, odd = shl(i32(param), i32(16)), both(i32(param), i32(1))
    distance = sub(to_bits(master), upper)
    below, above = add(i32(-0x8000), both(odd, sub(i32(1), ties))), sub(i32(0x8000), odd)
    is_near = smaller(larger(distance, below), above) == distance
    return where(is_near & (master == master), master, from_bits(upper))


@njit(**COMPILE_OPTIONS)
def apart_bf16(param: Any, master: Any) -> Any:
    """Returns bits whose upper half is 0 if the master, rounded to nearest and ties to even, is the param."""
    bits = to_bits(master)
    rounded = add(add(bits, i32(0x7FFF)), both(shr(bits, i32(16)), i32(1)))  # of some NaN it is a zero
    return either(sub(rounded, shl(i32(param), i32(16))), sub(i32(0), i32(master != master)))


@njit(**COMPILE_OPTIONS)
def apart_fp16(param: Any, master: Any) -> Any:
    """Returns bits whose upper half is 0 if the master, rounded to nearest and ties to even, is the param."""
    return shl(sub(i32(f32_to_half(master)), i32(param)), i32(16))


@njit(**COMPILE_OPTIONS)
def follow_fp16(param: Any, master: Any, ties: Any) -> Any:
    return where(f32_to_half(master) == param, master, half_to_f32(param))


# -- masters: the param is the upper half ------------------------------------------------------------------------------


@njit(**COMPILE_OPTIONS)
def join_split(param: Any, rest: Any) -> Any:
    return _joined(shl(i32(param), i32(16)), i32(rest))


@njit(**COMPILE_OPTIONS)
def join_split24(param: Any, rest: Any) -> Any:
    return _joined(shl(i32(param), i32(16)), shl(i32(rest), i32(8)))


@njit(**COMPILE_OPTIONS)
def _joined(upper: Any, rest: Any) -> Any:
    """Adds the rest to the magnitude, between zero and infinity; see ``formats.py``."""
    magnitude = both(upper, i32(0x7FFFFFFF))
    joined = smaller(larger(add(magnitude, rest), i32(0)), larger(magnitude, i32(INFINITY_BITS)))
    return from_bits(either(joined, both(upper, i32(-0x80000000))))


@njit(**COMPILE_OPTIONS)
def rounded_split(x: Any) -> Any:
    """Returns the master's bits."""
    return to_bits(one_nan(x))


@njit(**COMPILE_OPTIONS)
def rounded_split24(x: Any) -> Any:
    """Returns the master's upper 24 bits, rounded to nearest, ties away from zero."""
    return shr(add(to_bits(one_nan(x)), i32(0x80)), i32(8))


@njit(**COMPILE_OPTIONS)
def upper_split(bits: Any) -> Any:
    return u16(shr(add(bits, i32(0x8000)), i32(16)))


@njit(**COMPILE_OPTIONS)
def upper_split24(bits: Any) -> Any:
    return u16(shr(add(bits, i32(0x80)), i32(8)))


@njit(**COMPILE_OPTIONS)
def rest_split(bits: Any) -> Any:
    return i16(sub(bits, shl(i32(upper_split(bits)), i32(16))))


@njit(**COMPILE_OPTIONS)
def rest_split24(bits: Any) -> Any:
    return i8(sub(bits, shl(i32(upper_split24(bits)), i32(8))))


# -- stochastic rounding and dither ------------------------------------------------------------------------------------


@njit(**COMPILE_OPTIONS)
def draw(element: Any, key: Any, other_key: Any, stream: Any) -> Any:
    """Returns 32 random bits: lowbias32 (https://nullprogram.com/blog/2018/07/31) with a key before each half."""
    # Any odd factor will do: it gives the streams of one element (param and states) other bits each.
    x = differ(i32(element), add(key, mul(i32(stream), i32(58169239))))
    x = mul(differ(x, shr(x, i32(16))), i32(2146121005))
    x = add(x, other_key)
    x = mul(differ(x, shr(x, i32(15))), i32(-2073254261))
    return differ(x, shr(x, i32(16)))


@njit(**COMPILE_OPTIONS)
def dither(element: Any, phase: Any, stream: Any) -> Any:
    """Returns 32 bits that are spread evenly over elements and steps."""
    return add(add(mul(i32(element), i32(GOLDEN)), phase), mul(i32(stream), i32(58169239)))


@njit(**COMPILE_OPTIONS)
def narrow_bf16_up(x: Any, bits: Any) -> Any:
    """Rounds to bf16: up if the upper half of ``bits`` plus the part that is cut off overflow.

    Infinity is next to the largest number.
    """
    return u16(shr(add(to_bits(one_nan(x)), shr(bits, i32(16))), i32(16)))


# -- blocks in 8 bits --------------------------------------------------------------------------------------------------


@njit(**COMPILE_OPTIONS)
def decode_signed(code: Any, scale: Any, shift: Any, offset_bits: Any, offset: Any, width: Any) -> Any:
    bits = i32(code)
    magnitude = both(bits, i32((1 << (width - 1)) - 1))
    fraction = from_bits(add(shl(magnitude, i32(shift)), i32(offset_bits))) - f32(offset)
    sign = both(shl(bits, i32(32 - width)), i32(-0x80000000))
    return from_bits(either(to_bits(fraction * scale), sign))


@njit(**COMPILE_OPTIONS)
def decode_unsigned(code: Any, scale: Any, shift: Any, offset_bits: Any, offset: Any, width: Any) -> Any:
    return (from_bits(add(shl(i32(code), i32(shift)), i32(offset_bits))) - f32(offset)) * scale


@njit(**COMPILE_OPTIONS)
def _at_least_zero(x: Any) -> Any:
    """Returns the larger of x and 0; a NaN stays a NaN. LLVM makes x86's ``max`` of this spelling, one operation."""
    return where(f32(0.0) > x, f32(0.0), x)


@njit(**COMPILE_OPTIONS)
def magnitude_unsigned(x: Any) -> Any:
    # abs() last: the NaN of 0 * Inf has a sign on x86, and its bits would count as less than zero.
    return to_bits(abs(_at_least_zero(x)))


@njit(**COMPILE_OPTIONS)
def scale_of(largest: Any, to_scale: Any, largest_scale: Any) -> Any:
    """Returns a block's scale, from the bits of its largest magnitude."""
    magnitude = from_bits(smaller(largest, i32(NAN_BITS)))
    scale = magnitude * f32(to_scale)
    rounded = from_bits(both(add(to_bits(scale), i32(_HALF_SCALE)), i32(_KEPT_OF_SCALE)))
    smallest, most = f32(SMALLEST_SCALE), f32(largest_scale)
    rounded = where(rounded < smallest, smallest, where(rounded < most, rounded, most))
    return where(magnitude == f32(0.0), f32(0.0), where(magnitude <= f32(LARGEST_FP32), rounded, magnitude))


@njit(**COMPILE_OPTIONS)
def inverse_of(scale: Any) -> Any:
    smallest = f32(SMALLEST_SCALE)
    return f32(1.0) / where(scale < smallest, smallest, scale)


@njit(**COMPILE_OPTIONS)
def least_of(largest: Any) -> Any:
    """Returns the smallest code of a value above zero: 1 in a block that holds one, else 0.

    LLVM would turn a constant 1 into a comparison and three more operations for each vector.
    """
    return shr(sub(i32(0), largest), i32(31))


# LLVM does not know that ``zero`` is 0, so sums with it stay in registers, or on the stack. It loads constants anew for
# each vector, each from a 64-bit address: that took 5 % of AdamW's step.


@njit(**COMPILE_OPTIONS)
def encode_signed(
    x: Any, inverse: Any, noise: Any, least: Any, zero: Any, shift: Any, offset_bits: Any, width: Any
) -> Any:
    bits = to_bits(abs(x) * inverse + from_bits(add(zero, i32(offset_bits))))
    rounding = add(shr(noise, i32(32 - shift)), add(zero, i32(-offset_bits)))
    code = smaller(shr(add(bits, rounding), i32(shift)), i32((1 << (width - 1)) - 1))
    return u8(either(code, shl(shr(to_bits(x), i32(31)), i32(width - 1))))


@njit(**COMPILE_OPTIONS)
def encode_unsigned(
    x: Any, inverse: Any, noise: Any, least: Any, zero: Any, shift: Any, offset_bits: Any, width: Any
) -> Any:
    value, top = _at_least_zero(x), (1 << width) - 1
    bits = to_bits(value * inverse + from_bits(add(zero, i32(offset_bits))))
    # Only dither needs this: rounded to nearest, as in encode_signed, the largest has the top code by itself.
    to_top = add(bits, add(zero, i32(2 * BELOW_TOP - (top << shift) - offset_bits)))
    above = add(add(bits, add(zero, i32(-offset_bits))), larger(shr(noise, i32(32 - shift)), to_top))
    code = larger(shr(above, i32(shift)), smaller(to_bits(value), least))
    return u8(smaller(code, i32(top)))  # known, so that LLVM knows that a code fits in a byte
