"""Numba spellings of the words that kernels use: memory by address, bits, rounding, the vocabulary of rules.

Kernels take raw addresses: a NumPy array takes a microsecond to unbox, and its wrap-around indexing keeps LLVM from
using full vectors. Loads and stores of different streams are marked as not aliasing; without the mark the vectoriser
gives up beyond a few streams (its run-time checks grow with their square).
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compilers.native import COMPILE_OPTIONS
from .formats import NAN_BITS

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT, _LONG = ir.IntType(32), ir.IntType(64)
_LLVM_TYPES = {
    types.float32: _FLOAT,
    types.float64: ir.DoubleType(),
    types.uint8: ir.IntType(8),
    types.int8: ir.IntType(8),
    types.uint16: ir.IntType(16),
    types.int16: ir.IntType(16),
    types.int32: ir.IntType(32),
    types.int64: ir.IntType(64),
}
# Streams that a kernel may hold: gradient, param, master, states, new values of each state. Stream TABLE is for tables
# and for all that a block has one of.
MAX_STREAMS = 32
TABLE = MAX_STREAMS - 1


def _mark_stream(builder: Any, instruction: Any, stream: int) -> None:
    """Marks an access: it touches memory of its stream only (LLVM's scoped no-alias metadata)."""
    module = builder.module
    domain = module.add_metadata(["shardopt streams"])
    scopes = [module.add_metadata([f"stream {index}", domain]) for index in range(MAX_STREAMS)]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[stream]]))
    others = [scope for index, scope in enumerate(scopes) if index != stream]
    instruction.set_metadata("noalias", module.add_metadata(others))


def _element(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(address, _LLVM_TYPES[kind].as_pointer()), [index], inbounds=True)


def _make_load(kind: Any) -> Any:
    @intrinsic(prefer_literal=True)
    def load(typing_context: Any, address: Any, index: Any, stream: Any) -> Any:
        number = stream.literal_value

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_element(builder, arguments[0], arguments[1], kind), align=kind.bitwidth // 8)
            _mark_stream(builder, value, number)
            return value

        return kind(types.int64, types.int64, stream), emit

    return load


def _make_store(kind: Any) -> Any:
    @intrinsic(prefer_literal=True)
    def store(typing_context: Any, address: Any, index: Any, value: Any, stream: Any) -> Any:
        number = stream.literal_value

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target = _element(builder, arguments[0], arguments[1], kind)
            _mark_stream(builder, builder.store(arguments[2], target, align=kind.bitwidth // 8), number)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind, stream), emit

    return store


def _make_unary(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def word(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, arguments[0])

        return result(argument), generate

    return word


def _llvm_unary(name: str) -> Callable[[Any, Any], Any]:
    def emit(builder: Any, x: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", [_FLOAT]), [x])

    return emit


load_f32, store_f32 = _make_load(types.float32), _make_store(types.float32)
load_f64, store_f64 = _make_load(types.float64), _make_store(types.float64)
load_u8, store_u8 = _make_load(types.uint8), _make_store(types.uint8)
load_u16, store_u16 = _make_load(types.uint16), _make_store(types.uint16)
load_i8, store_i8 = _make_load(types.int8), _make_store(types.int8)
load_i16, store_i16 = _make_load(types.int16), _make_store(types.int16)
load_i32, store_i32 = _make_load(types.int32), _make_store(types.int32)
load_i64, store_i64 = _make_load(types.int64), _make_store(types.int64)

to_bits = _make_unary(types.int32, types.float32, lambda builder, x: builder.bitcast(x, ir.IntType(32)))
from_bits = _make_unary(types.float32, types.int32, lambda builder, x: builder.bitcast(x, _FLOAT))
half_to_f32 = _make_unary(
    types.float32, types.uint16, lambda builder, x: builder.fpext(builder.bitcast(x, _HALF), _FLOAT)
)
f32_to_half = _make_unary(
    types.uint16, types.float32, lambda builder, x: builder.bitcast(builder.fptrunc(x, _HALF), ir.IntType(16))
)
same = _make_unary(types.float32, types.float32, lambda builder, x: x)
sqrt = _make_unary(types.float32, types.float32, _llvm_unary("sqrt"))
abs = _make_unary(types.float32, types.float32, _llvm_unary("fabs"))


def _make_i32(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Makes a word on two int32. Numba's own operators widen to 64 bits, which halves the width of a vector."""

    @intrinsic
    def word(typing_context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, *arguments)

        return types.int32(types.int32, types.int32), generate

    return word


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _larger_unsigned(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", x, y), x, y)


def _smaller(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed("<", x, y), x, y)


add, sub, mul = _make_i32(ir.IRBuilder.add), _make_i32(ir.IRBuilder.sub), _make_i32(ir.IRBuilder.mul)
both, either, differ = _make_i32(ir.IRBuilder.and_), _make_i32(ir.IRBuilder.or_), _make_i32(ir.IRBuilder.xor)
shl, shr = _make_i32(ir.IRBuilder.shl), _make_i32(ir.IRBuilder.lshr)
larger, smaller, larger_unsigned = _make_i32(_larger), _make_i32(_smaller), _make_i32(_larger_unsigned)


@intrinsic
def in_wide_vectors(typing_context: Any) -> Any:
    """Asks LLVM for vectors of 512 bits in the function that calls this, where the processor has them.

    For Intel's it takes 256 by itself: the first ones with AVX-512 ran at a lower clock rate with more. Those with
    VBMI2 do not, and an update in 8 bits takes a tenth less. llvmlite knows no attributes with a value.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if get_host_cpu_features().get("avx512vbmi2"):
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line of an address, which is written soon. The address may be any."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        at = builder.inttoptr(arguments[0], pointer)
        builder.call(ask, [at, *(ir.Constant(_INT, number) for number in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def where(typing_context: Any, condition: Any, x: Any, y: Any) -> Any:
    """Selects, never branches: a branch inside the loop would stop it from being vectorised."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return types.float32(types.boolean, types.float32, types.float32), emit


@intrinsic
def fma(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """Multiplies and adds with one rounding, which nothing else here does."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic(prefer_literal=True)
def scratch_i32(typing_context: Any, count: Any) -> Any:
    """Returns the address of ``count`` (a Python constant) int32 or fp32 on the thread's own stack."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            space = builder.alloca(ir.IntType(32), size=int(count.literal_value))
        space.align = 64
        return builder.ptrtoint(space, ir.IntType(64))

    return types.int64(count), emit


@intrinsic(prefer_literal=True)
def sum_of_squares(typing_context: Any, address: Any, factor: Any, count: Any, stream: Any) -> Any:
    """Returns the sum of the squares of fp32 numbers that are multiplied by ``factor`` and truncated to below 2**31.

    In vectors by hand: the squares of 32-bit words are those of the low and of the high halves of pairs, where a loop
    of LLVM's would widen each word first. ``count`` is a Python constant, a multiple of 16, and ``address`` one of 64
    bytes.
    """
    numbers, words, pairs = (ir.VectorType(kind, size) for kind, size in ((_FLOAT, 16), (_INT, 16), (_LONG, 8)))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.inttoptr(arguments[0], numbers.as_pointer())
        factors = ir.Constant(numbers, ir.Undefined)
        for lane in range(16):
            factors = builder.insert_element(factors, arguments[1], ir.Constant(_INT, lane))
        low = high = ir.Constant(pairs, [0] * 8)
        mask, shift = (ir.Constant(pairs, [number] * 8) for number in (0xFFFFFFFF, 32))
        for index in range(count.literal_value // 16):
            x = builder.load(builder.gep(at, [ir.Constant(_INT, index)]), align=64)
            _mark_stream(builder, x, stream.literal_value)
            pair = builder.bitcast(builder.fptosi(builder.fmul(x, factors), words), pairs)
            own, other = builder.and_(pair, mask), builder.lshr(pair, shift)
            low, high = builder.add(low, builder.mul(own, own)), builder.add(high, builder.mul(other, other))
        kind = ir.FunctionType(_LONG, [pairs])
        add_lanes = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v8i64")
        return builder.call(add_lanes, [builder.add(low, high)])

    return types.int64(types.int64, types.float32, count, stream), emit


# Places that are read by turns, and bytes that are asked for ahead of each. A core waits for memory: with four places
# and without asking ahead the same loop reads at 0.8 of the rate.
_PLACES, _AHEAD, _LINE = 8, 1024, 64
BYTES_BY_TURNS = _PLACES * _LINE  # of one line at each


@intrinsic(prefer_literal=True)
def largest_magnitude(typing_context: Any, address: Any, lines: Any, itemsize: Any, stream: Any) -> Any:
    """Returns the bits, without the sign, of the number of largest magnitude in ``8 * lines`` cache lines.

    A NaN is the largest, an infinity the next. Numbers have ``itemsize`` bytes, a Python constant. The first eighth of
    the memory is read by turns with the others, in vectors by hand: LLVM gives up on a loop that asks for lines ahead.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size, (at, count, *_) = itemsize.literal_value, arguments
        lane, width = ir.IntType(8 * size), _LINE // size
        vectors, byte = ir.VectorType(lane, width), ir.IntType(8).as_pointer()
        mask = ir.Constant(vectors, [(1 << (8 * size - 1)) - 1] * width)
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read = [ir.Constant(_INT, number) for number in (0, 3, 1)]
        found = [cgutils.alloca_once_value(builder, ir.Constant(vectors, [0] * width)) for _ in range(_PLACES)]
        part = builder.mul(count, ir.Constant(_LONG, _LINE))
        firsts = [builder.add(at, builder.mul(part, ir.Constant(_LONG, place))) for place in range(_PLACES)]
        with cgutils.for_range(builder, count) as loop:
            for first, largest in zip(firsts, found, strict=True):
                here = builder.add(first, builder.mul(loop.index, ir.Constant(_LONG, _LINE)))
                later = builder.inttoptr(builder.add(here, ir.Constant(_LONG, _AHEAD)), byte)
                builder.call(ask, [later, *to_read])
                bits = builder.load(builder.inttoptr(here, vectors.as_pointer()), align=size)
                _mark_stream(builder, bits, stream.literal_value)
                builder.store(_larger(builder, builder.and_(bits, mask), builder.load(largest)), largest)
        total = functools.reduce(functools.partial(_larger, builder), map(builder.load, found))
        name = f"llvm.vector.reduce.smax.v{width}i{8 * size}"
        of_lanes = cgutils.get_or_insert_function(builder.module, ir.FunctionType(lane, [vectors]), name)
        return builder.zext(builder.call(of_lanes, [total]), _LONG)

    return types.int64(types.int64, types.int64, itemsize, stream), emit


@intrinsic(prefer_literal=True)
def folded(typing_context: Any, address: Any, count: Any, stream: Any) -> Any:
    """Returns the sum of ``count`` float64 numbers: the upper half is added to the lower until one is left.

    In one vector by hand: loops would take longer to begin and to end than the short ones run. ``count`` is a Python
    constant, a power of two, and ``address`` one of 64 bytes.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = count.literal_value
        x = builder.load(builder.inttoptr(arguments[0], ir.VectorType(ir.DoubleType(), size).as_pointer()), align=64)
        _mark_stream(builder, x, stream.literal_value)
        while size > 1:
            size //= 2
            kind = ir.VectorType(_INT, size)
            halves = (ir.Constant(kind, list(range(first, first + size))) for first in (0, size))
            lower, upper = (builder.shuffle_vector(x, x, half) for half in halves)
            x = builder.fadd(lower, upper)
        return builder.extract_element(x, ir.Constant(_INT, 0))

    return types.float64(types.int64, count, stream), emit


# Words are intrinsics or types wherever they can be: Numba takes 50 ms or more to compile a function.
f32 = types.float32


@njit(**COMPILE_OPTIONS)
def sign(x: Any) -> Any:
    return where(x > f32(0.0), f32(1.0), where(x < f32(0.0), f32(-1.0), f32(0.0)))


@njit(**COMPILE_OPTIONS)
def minimum(x: Any, y: Any) -> Any:
    return where((x < y) | (x != x), x, y)


@njit(**COMPILE_OPTIONS)
def maximum(x: Any, y: Any) -> Any:
    return where((x > y) | (x != x), x, y)


@njit(**COMPILE_OPTIONS)
def clamp(x: Any, low: Any, high: Any) -> Any:
    return minimum(maximum(x, low), high)


@njit(**COMPILE_OPTIONS)
def widen_bf16(x: Any) -> Any:
    return from_bits(types.int32(types.uint32(x) << types.uint32(16)))


@njit(**COMPILE_OPTIONS)
def one_nan(x: Any) -> Any:
    """Replaces every NaN by one that rounding cannot turn into infinity or -0."""
    return where(x != x, from_bits(types.int32(NAN_BITS)), x)


@njit(**COMPILE_OPTIONS)
def narrow_bf16(x: Any) -> Any:
    """Rounds to nearest, ties to even. A NaN becomes 0x7fc0: rounded bits could be infinity or -0.

    It does so first: chosen last, it would be chosen in vectors of 16 bits, which takes two operations more.
    """
    bits = to_bits(one_nan(x))
    rounded = add(add(bits, types.int32(0x7FFF)), both(shr(bits, types.int32(16)), types.int32(1)))
    return types.uint16(shr(rounded, types.int32(16)))


RULE_WORDS = {
    "f32": f32,
    "sqrt": sqrt,
    "abs": abs,
    "sign": sign,
    "minimum": minimum,
    "maximum": maximum,
    "clamp": clamp,
    "where": where,
    "fma": fma,
}
# Format name -> (load, widen, store, narrow); native_formats.py has the formats that take more than a cast.
FORMATS: dict[str, tuple[Any, Any, Any, Any]] = {
    "fp32": (load_f32, same, store_f32, same),
    "bf16": (load_u16, widen_bf16, store_u16, narrow_bf16),
    "fp16": (load_u16, half_to_f32, store_u16, f32_to_half),
}
