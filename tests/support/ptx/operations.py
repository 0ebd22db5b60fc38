"""The arithmetic of PTX as a table: every opcode in full, the kinds of its operands, what NumPy makes of them.

An opcode that is not here is refused, so that no modifier is passed over. Immediate operands come as arrays too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .numbers import TYPES, Array, bits_of, one_nan, width_of

Compute = Callable[..., Array]


@dataclass(frozen=True)
class Operation:
    result: str
    operands: tuple[str, ...]
    compute: Compute

    def __call__(self, *values: Array) -> Array:
        with np.errstate(all="ignore"):
            found = self.compute(*values)
        return found.astype(TYPES[self.result], copy=False)


SIGNED, UNSIGNED = ("s16", "s32", "s64"), ("u16", "u32", "u64")
BITS = ("b16", "b32", "b64")
# Two numbers in a register: opcode -> kind of each, operation.
PAIRS: dict[str, tuple[str, Compute]] = {"add.s16x2": ("s16", np.add), "sub.s16x2": ("s16", np.subtract)}
COMPARISONS: dict[str, Compute] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


# -- integers ----------------------------------------------------------------------------------------------------------


def multiply_wide(one: Array, other: Array) -> Array:
    wider = np.dtype(f"{one.dtype.kind}{2 * one.dtype.itemsize}")
    return one.astype(wider) * other.astype(wider)


def multiply_high(one: Array, other: Array) -> Array:
    return multiply_wide(one, other) >> (8 * one.dtype.itemsize)


def quotient(one: Array, other: Array) -> Array:
    """Rounded toward zero; what a division by zero gives is not defined, and is 0 here."""
    whole = np.abs(one) // np.abs(other)
    return np.where((one < 0) != (other < 0), -whole, whole) if one.dtype.kind == "i" else whole


def remainder(one: Array, other: Array) -> Array:
    return one - quotient(one, other) * other


def add_product(multiply: Compute) -> Compute:
    return lambda one, other, third: multiply(one, other) + third


def shift_left(value: Array, by: Array) -> Array:
    width = 8 * value.dtype.itemsize
    return np.where(by < width, value << np.minimum(by, width - 1).astype(value.dtype), 0)


def shift_right(value: Array, by: Array) -> Array:
    """Zeros come in from above, or the sign; all bits are shifted out from the width on."""
    width = 8 * value.dtype.itemsize
    shifted = value >> np.minimum(by, width - 1).astype(value.dtype)
    return shifted if value.dtype.kind == "i" else np.where(by < width, shifted, 0)


def extract_field(value: Array, start: Array, length: Array) -> Array:
    ones = shift_left(np.full_like(value, 1), length) - value.dtype.type(1)
    return shift_right(value, start) & ones


def insert_field(source: Array, into: Array, start: Array, length: Array) -> Array:
    ones = shift_left(np.full_like(source, 1), length) - source.dtype.type(1)
    mask = shift_left(ones, start)
    return (shift_left(source, start) & mask) | (into & ~mask)


def permute(low: Array, high: Array, selector: Array) -> Array:
    """Four bytes of eight: a digit of the selector names one, its highest bit asks for the byte's sign instead."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << 32
    whole = np.zeros_like(low)
    for index in range(4):
        digit = selector >> (4 * index)
        byte = (both >> ((digit & 7) * 8).astype(np.uint64)) & 255
        byte = np.where(digit & 8, np.where(byte & 128, 255, 0), byte)
        whole |= byte.astype(np.uint32) << (8 * index)
    return whole


def look_up(one: Array, other: Array, third: Array, table: Array) -> Array:
    """Each bit of the result is the bit of the table that three bits name."""
    whole = np.zeros_like(one)
    for index in range(8):
        met = (one if index & 4 else ~one) & (other if index & 2 else ~other) & (third if index & 1 else ~third)
        whole |= np.where(table >> index & 1, met, 0).astype(one.dtype)
    return whole


def on_pairs(kind: str, compute: Compute) -> Compute:
    return lambda one, other: compute(one.view(TYPES[kind]), other.view(TYPES[kind])).view(np.uint32)


def integers() -> Iterator[tuple[str, Operation]]:
    for kind in (*SIGNED, *UNSIGNED):
        two, three = (kind,) * 2, (kind,) * 3
        yield f"add.{kind}", Operation(kind, two, np.add)
        yield f"sub.{kind}", Operation(kind, two, np.subtract)
        yield f"min.{kind}", Operation(kind, two, np.minimum)
        yield f"max.{kind}", Operation(kind, two, np.maximum)
        yield f"mul.lo.{kind}", Operation(kind, two, np.multiply)
        yield f"div.{kind}", Operation(kind, two, quotient)
        yield f"rem.{kind}", Operation(kind, two, remainder)
        yield f"mad.lo.{kind}", Operation(kind, three, add_product(np.multiply))
        yield f"shr.{kind}", Operation(kind, (kind, "u32"), shift_right)
        for name, compare in COMPARISONS.items():
            yield f"setp.{name}.{kind}", Operation("pred", two, compare)
        if width_of(kind) < 64:
            wide = f"{kind[0]}{2 * width_of(kind)}"
            yield f"mul.wide.{kind}", Operation(wide, two, multiply_wide)
            yield f"mul.hi.{kind}", Operation(kind, two, multiply_high)
            yield f"mad.wide.{kind}", Operation(wide, (*two, wide), add_product(multiply_wide))
    for kind in SIGNED:
        yield f"neg.{kind}", Operation(kind, (kind,), np.negative)
        yield f"abs.{kind}", Operation(kind, (kind,), np.abs)
    for kind in (*BITS, "pred"):
        yield f"and.{kind}", Operation(kind, (kind,) * 2, np.bitwise_and)
        yield f"or.{kind}", Operation(kind, (kind,) * 2, np.bitwise_or)
        yield f"xor.{kind}", Operation(kind, (kind,) * 2, np.bitwise_xor)
        yield f"not.{kind}", Operation(kind, (kind,), np.invert)
    for kind in BITS:
        yield f"shl.{kind}", Operation(kind, (kind, "u32"), shift_left)
        yield f"shr.{kind}", Operation(kind, (kind, "u32"), shift_right)
        yield f"setp.eq.{kind}", Operation("pred", (kind,) * 2, np.equal)
        yield f"setp.ne.{kind}", Operation("pred", (kind,) * 2, np.not_equal)
    for opcode, (kind, compute) in PAIRS.items():
        yield opcode, Operation("b32", ("b32",) * 2, on_pairs(kind, compute))
    yield "popc.b32", Operation("u32", ("b32",), np.bitwise_count)
    yield "bfe.u32", Operation("u32", ("u32",) * 3, extract_field)
    yield "bfi.b32", Operation("b32", ("b32",) * 2 + ("u32",) * 2, insert_field)
    yield "prmt.b32", Operation("b32", ("b32",) * 3, permute)
    yield "lop3.b32", Operation("b32", ("b32",) * 4, look_up)


# -- floats ------------------------------------------------------------------------------------------------------------


def fuse(one: Array, other: Array, third: Array) -> Array:
    """The sum of a product and a number, rounded once to fp32.

    The product is exact in float64. Their sum is rounded there to odd, which leaves the second rounding as if it were
    the only one (Boldo and Melquiond, IEEE TC 57(4), 2008).
    """
    product, addend = one.astype(np.float64) * other, third.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    is_even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & is_even & np.isfinite(total), odd, total).astype(np.float32)


def approximate_quotient(one: Array, other: Array) -> Array:
    """One of the values within 2 ulp that ``div.full`` may give."""
    return one * (np.float32(1) / other)


def lesser(one: Array, other: Array) -> Array:
    """The smaller one; the one that is a number; -0 of two zeros."""
    zeros = (one.view(np.uint32) | other.view(np.uint32)).view(np.float32)
    return np.where(one == other, zeros, np.fmin(one, other))


def greater(one: Array, other: Array) -> Array:
    zeros = (one.view(np.uint32) & other.view(np.uint32)).view(np.float32)
    return np.where(one == other, zeros, np.fmax(one, other))


def greater_or_nan(one: Array, other: Array) -> Array:
    zeros = (one.view(np.uint32) & other.view(np.uint32)).view(np.float32)
    return np.where(one == other, zeros, np.maximum(one, other))


def without_nan(compute: Compute) -> Compute:
    return lambda *values: one_nan(compute(*values))


def flushing(compute: Compute) -> Compute:
    """Subnormal operands and results become zeros of their sign."""

    def flush(values: Array) -> Array:
        return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)

    return lambda *values: flush(compute(*map(flush, values)))


ROUNDED: dict[str, tuple[int, Compute]] = {  # opcode -> operands, what it computes
    "add.rn": (2, np.add),
    "sub.rn": (2, np.subtract),
    "mul.rn": (2, np.multiply),
    "div.rn": (2, np.divide),
    "fma.rn": (3, fuse),
    "sqrt.rn": (1, np.sqrt),
    "min": (2, lesser),
    "max": (2, greater),
    "max.NaN": (2, greater_or_nan),
    "abs": (1, np.abs),
    "neg": (1, np.negative),
}


def floats() -> Iterator[tuple[str, Operation]]:
    """Without ``.rn`` a sum or a product may be contracted by what reads the PTX, so that it is not here."""
    for name, (count, compute) in ROUNDED.items():
        yield f"{name}.f32", Operation("f32", ("f32",) * count, without_nan(compute))
        yield f"{name}.ftz.f32", Operation("f32", ("f32",) * count, without_nan(flushing(compute)))
    for name in ("add.rn", "mul.rn"):
        yield f"{name}.f64", Operation("f64", ("f64",) * 2, without_nan(ROUNDED[name][1]))
    yield "div.full.f32", Operation("f32", ("f32",) * 2, without_nan(approximate_quotient))
    yield "div.full.ftz.f32", Operation("f32", ("f32",) * 2, without_nan(flushing(approximate_quotient)))
    yield "abs.f16x2", Operation("b32", ("b32",), lambda value: value & 0x7FFF7FFF)
    for name, compare in COMPARISONS.items():
        yield f"setp.{name}.f32", Operation("pred", ("f32",) * 2, ordered(compare))
        yield f"setp.{name}u.f32", Operation("pred", ("f32",) * 2, lambda a, b, c=compare: ~ordered(negated(c))(a, b))
    yield "setp.num.f32", Operation("pred", ("f32",) * 2, lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    yield "setp.nan.f32", Operation("pred", ("f32",) * 2, lambda a, b: np.isnan(a) | np.isnan(b))


def ordered(compare: Compute) -> Compute:
    """False wherever one is no number, for ``ne`` too."""
    return lambda one, other: compare(one, other) & ~(np.isnan(one) | np.isnan(other))


def negated(compare: Compute) -> Compute:
    opposite = {"eq": "ne", "lt": "ge", "le": "gt"}
    pairs = [*opposite.items(), *((other, one) for one, other in opposite.items())]
    return {COMPARISONS[one]: COMPARISONS[other] for one, other in pairs}[compare]


# -- from one kind to another ------------------------------------------------------------------------------------------


def truncate(value: Array) -> Array:
    """What is too large becomes the largest int, a NaN becomes 0."""
    whole = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0)
    return np.clip(whole, -(2.0**31), 2.0**31 - 1).astype(np.int32)


def two_halves(upper: Array, lower: Array) -> Array:
    halves = (bits_of(one_nan(each.astype(np.float16))).astype(np.uint32) for each in (upper, lower))
    return next(halves) << 16 | next(halves)


def conversions() -> Iterator[tuple[str, Operation]]:
    whole = [f"{letter}{width}" for letter in "us" for width in (8, 16, 32, 64)]
    for source in whole:
        for result in whole:
            yield f"cvt.{result}.{source}", Operation(result, (source,), lambda value: value)
        yield f"cvt.rn.f32.{source}", Operation("f32", (source,), lambda value: value)
    yield "cvt.f32.f16", Operation("f32", ("f16",), lambda value: value)  # exact, and a NaN keeps its payload
    yield "cvt.f64.f32", Operation("f64", ("f32",), lambda value: value)
    yield "cvt.rn.f16.f32", Operation("f16", ("f32",), lambda value: one_nan(value.astype(np.float16)))
    yield "cvt.rn.f16x2.f32", Operation("b32", ("f32", "f32"), two_halves)
    yield "cvt.rzi.s32.f32", Operation("s32", ("f32",), truncate)


def choose(one: Array, other: Array, is_first: Array) -> Array:
    return np.where(is_first, one, other)


def choices() -> Iterator[tuple[str, Operation]]:
    for kind in (*BITS, *UNSIGNED, *SIGNED, "f32", "f64", "pred"):
        yield f"mov.{kind}", Operation(kind, (kind,), lambda value: value)
        yield (
            f"selp.{kind}",
            Operation(kind, (kind, kind, "pred"), lambda one, other, is_first: np.where(is_first, one, other)),
        )


OPERATIONS: dict[str, Operation] = dict([*integers(), *floats(), *conversions(), *choices()])
# What a warp reduces to one value: opcode -> its kind, and the operation on two of them.
REDUCTIONS: dict[str, tuple[str, np.ufunc]] = {
    f"redux.sync.{name}.{kind}": (kind, reduce)
    for kind in ("s32", "u32", "b32")
    for name, reduce in {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }.items()
}
# What is done to a word of global memory in one go: opcode -> its kind, and the operation.
ATOMICS: dict[str, tuple[str, np.ufunc]] = {
    "atom.global.gpu.relaxed.add.u64": ("u64", np.add),
    "atom.global.gpu.relaxed.max.s64": ("s64", np.maximum),
}
