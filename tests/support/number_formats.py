"""The formats of ``kernels/formats.py`` by their definitions, in NumPy: what kernels and codecs must give to the bit.

Constants come from the formats themselves; every formula is written anew, one value at a time where that is clearest.
"""

from typing import Any

import numpy as np

from shardopt.kernels.formats import (
    BELOW_TOP,
    GOLDEN,
    SCALE_DROPPED_BITS,
    SMALLEST_SCALE,
    SPLIT,
    BlockFormat,
    Format,
)

BLOCK = 256
Array = np.ndarray[Any, np.dtype[Any]]
LARGEST = float(np.finfo(np.float32).max)
NAN = np.uint32(0x7FC00000)


def bits_of(values: Array) -> Array:
    """uint32, of fp32 numbers; every NaN is the same one."""
    values = np.asarray(values, np.float32)
    return np.where(np.isnan(values), NAN, values.view(np.uint32))


def number(bits: Array) -> Array:
    return np.asarray(bits).astype(np.uint32).view(np.float32)


# -- masters -----------------------------------------------------------------------------------------------------------


def dropped_bits(format: Format) -> int:
    """Of a master's 32, those that neither the param nor what is kept beside it holds."""
    return 16 - 8 * format.itemsize


def part_master(master: Array, format: Format) -> tuple[Array, Array]:
    """The bits of the bf16 param, uint16, and what is kept beside it, a signed integer."""
    dropped = dropped_bits(format)
    kept = 16 - dropped
    magnitude = bits_of(master).astype(np.int64)  # a sign bit in front changes nothing: it is far from what is rounded
    if dropped:
        magnitude = (magnitude + 2 ** (dropped - 1)) // 2**dropped
    param = (magnitude + 2 ** (kept - 1)) // 2**kept
    return param.astype(np.uint16), (magnitude - param * 2**kept).astype(np.int16 if format is SPLIT else np.int8)


def join_master(param: Array, rest: Array, format: Format) -> Array:
    whole = param.astype(np.int64) * 2**16 + rest.astype(np.int64) * 2 ** dropped_bits(format)
    return number(whole % 2**32)


# -- rounding ----------------------------------------------------------------------------------------------------------


def hashed(elements: Array, key: int, other_key: int, stream: int) -> Array:
    """32 bits for each element, as ``triton_formats.draw`` describes."""
    one, other, five, six = (np.uint64(each % 2**32) for each in (key + stream * 58169239, other_key, 15, 16))
    mask = np.uint64(2**32 - 1)
    x = (elements.astype(np.int64) % 2**32).astype(np.uint64) ^ one
    x = (x ^ x >> six) * np.uint64(2146121005) & mask
    x = x + other & mask
    x = (x ^ x >> five) * np.uint64(-2073254261 % 2**32) & mask
    return x ^ x >> six


def dithered(elements: Array, phase: int, stream: int) -> Array:
    """32 bits for each element: the fraction of a sum of multiples of the golden ratio and a phase."""
    steps = elements.astype(np.int64) % 2**32
    return (steps * GOLDEN % 2**32 + phase + stream * 58169239).astype(np.uint64) % 2**32


def noise(format: Format, elements: Array, counters: tuple[int, int, int], stream: int) -> Array:
    """What is added to what is cut off, as 32 bits behind the point: a half where nothing else is asked for."""
    if format.rounding == "random":
        return hashed(elements, *counters[:2], stream)
    return dithered(elements, counters[2], stream) if format.rounding == "dithered" else np.full(elements.shape, 2**31)


def to_bf16_by_chance(values: Array, draws: Array) -> Array:
    """uint16: up with the probability of what is cut off, by the upper half of the draw."""
    bits = bits_of(values).astype(np.int64)
    lower, chance = bits % 2**16, draws.astype(np.int64) // 2**16
    return (bits // 2**16 + (lower + chance >= 2**16)).astype(np.uint16)


def to_bf16(values: Array) -> Array:
    """uint16: to nearest, ties to even."""
    bits = bits_of(values).astype(np.int64)
    upper, lower = bits // 2**16, bits % 2**16
    return (upper + (lower > 2**15) + ((lower == 2**15) & (upper % 2 == 1))).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return number(bits.astype(np.uint32) * np.uint32(2**16))


# -- blocks in 8 bits --------------------------------------------------------------------------------------------------


def fractions(format: BlockFormat) -> Array:
    """What each code stands for before the scale, fp32, in ascending order; negative ones have a sign bit above."""
    step, first = np.uint32(2 ** (23 - format.mantissa)), bits_of(np.float32(format.offset))
    return number(first + np.arange(format.top + 1, dtype=np.uint32) * step) - np.float32(format.offset)


def magnitudes(values: Array, format: BlockFormat) -> Array:
    """fp32; a value that is negative and should not be counts as zero, a NaN stays one."""
    values = number(bits_of(values))
    return np.abs(values) if format.has_sign else np.where(values < 0, np.float32(0), np.abs(values))


def scales_of(blocks: Array, format: BlockFormat) -> Array:
    """fp32 [blocks] of the magnitudes [blocks, up to 256]."""
    found = []
    for block in blocks:
        largest = np.float32(np.nan) if np.isnan(block).any() else block.max(initial=np.float32(0))
        if largest == 0 or not np.isfinite(largest):
            found.append(largest)
            continue
        top = float(fractions(format)[-1])
        scale = np.float32(largest * np.float32(1 / top))
        mantissa, exponent = np.frexp(np.float64(scale))
        digits = 2.0 ** (24 - SCALE_DROPPED_BITS)  # of a normal number
        normal = np.ldexp(np.floor(mantissa * digits + 0.5) / digits, exponent)
        if normal * top > LARGEST:  # the next smaller one
            normal -= np.ldexp(1 / digits, exponent)
        found.append(np.float32(max(normal, SMALLEST_SCALE)))
    return np.array(found, np.float32)


def encode_blocks(values: Array, format: BlockFormat, added: Array | None = None) -> tuple[Array, Array]:
    """uint8 codes and fp32 scales of one param's values, or some of them from a block on.

    ``added`` before the lower bits are cut off, 32 bits each; None: halves, so to nearest.
    """
    size = np.abs(magnitudes(values, format))
    padded = np.zeros(-(-len(size) // BLOCK) * BLOCK, np.float32)
    padded[: len(size)] = size
    blocks = padded.reshape(-1, BLOCK)
    with np.errstate(all="ignore"):
        scales = scales_of(blocks, format)
        inverses = np.float32(1) / np.maximum(scales, np.float32(SMALLEST_SCALE))
        near = bits_of(blocks * inverses[:, None] + np.float32(format.offset)).astype(np.int64)
    step = 2 ** (23 - format.mantissa)
    up = np.full(padded.shape, step // 2)
    if added is not None:
        up[: len(values)] = added.astype(np.int64) * step // 2**32
    near -= int(bits_of(np.float32(format.offset)))
    codes = np.minimum((near + up.reshape(near.shape)) // step, format.top)
    codes[near >= format.top * step - BELOW_TOP] = format.top
    if format.has_sign:
        signs = np.zeros(padded.shape, np.int64)
        signs[: len(values)] = np.signbit(values)
        codes += (format.top + 1) * signs.reshape(codes.shape)
    else:
        codes = np.maximum(codes, blocks > 0)
    return codes.reshape(-1)[: len(values)].astype(np.uint8), scales


def decode_blocks(codes: Array, scales: Array, format: BlockFormat) -> Array:
    table = fractions(format)
    with np.errstate(all="ignore"):
        values = table[codes & format.top] * np.repeat(scales, BLOCK)[: len(codes)]
    assert values.dtype == np.float32
    return np.where(codes > format.top, -values, values)
