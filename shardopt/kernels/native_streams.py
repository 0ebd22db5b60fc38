"""The text of a native kernel that loads and stores a shard's streams, by their formats.

A state in 8 bits cannot be stored before its block's scale is known. So a loop over the block puts its new values on
the stack and finds the largest; the lines of ``scale`` follow; the next loop reads the values back, and
encodes them. Codes of 4 bits, of which two share a byte, are on the stack while loops go over elements, a byte each. A
loop over pairs unpacks them before, or packs them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .formats import FP32, GOLDEN, BlockFormat
from .tables import BLOCK

if TYPE_CHECKING:
    from .formats import Format
    from .spec import Spec

_PARAM, _MASTER, _FIRST_STATE = 1, 2, 3  # streams; the gradient is 0
_NEW_PARAM, _CODES = 27, 29  # streams on the stack: of new params, of codes
_HALF = "i32(-2147483648)"  # of 32 bits


@dataclass
class State:
    """One state of a pass: how it is loaded, what it becomes, how it is stored."""

    name: str
    is_rounded: bool
    is_written: bool
    load: str
    restart: list[str] = field(default_factory=list)  # before each loop over the elements of a block
    advance: list[str] = field(default_factory=list)  # to the next element's noise
    narrow: str = ""  # of the value
    widen: str = ""  # of what it was narrowed to
    store: str = ""
    # In 8 bits:
    once: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)  # before a block's elements
    keep: list[str] = field(default_factory=list)  # puts a new value on the stack
    scale: list[str] = field(default_factory=list)  # between two loops
    reread: list[str] = field(default_factory=list)
    unpack: list[str] = field(default_factory=list)  # before the loops of a pass that reads it
    pack: list[str] = field(default_factory=list)  # after the loops of a pass that writes it
    depth: int = 0  # the loop, from 1 on, that finds its new values

    @property
    def value(self) -> str:
        """The variable of the kernel that has its value."""
        return f"state_{self.name}"

    @property
    def is_block(self) -> bool:
        """True if its new values are found by a loop of their own."""
        return bool(self.scale)


def pointers_of(spec: Spec) -> list[str]:
    """Returns the names of the kernel's arguments that are addresses of streams."""
    formats = zip(spec.names, spec.states, strict=True)
    scales = [f"{name}_scales_at" for name, format in formats if isinstance(format, BlockFormat)]
    return ["param_at", *["master_at"][: spec.has_master], *(f"{name}_at" for name in spec.names), *scales]


class ParamLines(NamedTuple):
    """The lines that load and store the value that is updated: param, master beside it, or halves of a master.

    A core begins the next elements while it waits for a division, as many as it has room for. What follows on the
    quotient takes that room: in a loop of its own, AdamW's step takes a tenth less.
    """

    loads: list[str]
    stores: list[str]
    rounds: Sequence[str] = ()  # in a loop of its own, afterwards: what makes param, or halves, of the new value
    once: Sequence[str] = ()  # before all blocks


def param_lines(spec: Spec) -> ParamLines:
    """Returns the lines for the formats of param and master."""
    if not spec.has_master:
        load, store = _loaded("param_at", spec.param, _PARAM), _stored("param_at", spec.param, _PARAM)
        return ParamLines([f"param = {load}"], [store], [])
    assert spec.master is not None
    name = spec.master.name
    if spec.master is FP32:
        load = f"param = load_f32(master_at, i, {_MASTER})"
        store = _stored("master_at", spec.master, _MASTER)
        return ParamLines([load], [store], [load, _stored("param_at", spec.param, _PARAM)])
    kind = {"split": "i16", "split24": "i8"}[name]
    load = f"param = join_{name}(load_u16(param_at, i, {_PARAM}), load_{kind}(master_at, i, {_MASTER}))"
    rounds = [
        f"master_bits = rounded_{name}(load_f32(param_new, i - start, {_NEW_PARAM}))",
        f"store_u16(param_at, i, upper_{name}(master_bits), {_PARAM})",
        f"store_{kind}(master_at, i, rest_{name}(master_bits), {_MASTER})",
    ]
    store = f"store_f32(param_new, i - start, param, {_NEW_PARAM})"
    return ParamLines([load], [store], rounds, [f"param_new = scratch_i32({BLOCK})"])


def following(spec: Spec) -> list[str]:
    """Returns the lines that make the fp32 masters of a block what its param is, where they do not round to it.

    A loop of its own looks, which seldom finds any: the same in the update's loop takes longer. It reads the param
    ahead of the hardware's prefetching, so it asks for the lines of two blocks later.
    """
    if not spec.has_master or spec.master is not FP32 or not spec.compares:
        return []
    both = f"load_u16(param_at, i, {_PARAM}), load_f32(master_at, i, {_MASTER})"
    return [
        "for ahead in range(8):",
        "    prefetch(param_at + start * 2 + 1024 + ahead * 64)",
        "apart = i32(0)",
        "for i in range(start, start + count):",
        f"    apart = either(apart, apart_{spec.param.name}({both}))",
        "if shr(apart, i32(16)) != i32(0):",
        "    for i in range(start, start + count):",
        f"        store_f32(master_at, i, follow_{spec.param.name}({both}, i32(ties)), {_MASTER})",
    ]


def _kept_in(format: Format) -> str:
    return format.name if format.rounding == "nearest" else "bf16"


def _loaded(at: str, format: Format, stream: int) -> str:
    return f"widen_{_kept_in(format)}(load_{_kept_in(format)}({at}, i, {stream}))"


def _stored(at: str, format: Format, stream: int) -> str:
    if format.rounding == "random":
        return f"store_bf16({at}, i, narrow_bf16_up(param, {_drawn(stream)}), {stream})"
    return f"store_{format.name}({at}, i, narrow_{format.name}(param), {stream})"


def _drawn(stream: int) -> str:
    return f"draw(add(i32(i), first_element), key, other_key, {stream})"


def state_of(spec: Spec, number: int, index: int) -> State:
    """Returns state ``index`` as pass ``number`` has it."""
    part, name, format, stream = spec.passes[number], spec.names[index], spec.states[index], _FIRST_STATE + index
    state = State(name, name in part.rounded, name in part.written, "")
    if isinstance(format, BlockFormat):
        _fill_block_state(state, format, stream, stream + len(spec.states))
        return state
    state.load = f"{state.value} = {_loaded(f'{name}_at', format, stream)}"
    if state.is_rounded or state.is_written:
        kept = _kept_in(format)
        state.narrow = f"narrow_{kept}({state.value})"
        if format.rounding != "nearest":
            state.narrow = f"narrow_bf16_up({state.value}, {_noise_bits(state, format, stream)})"
        state.widen = f"widen_{kept}(kept_{name})"
        state.store = f"store_{kept}({name}_at, i, kept_{name}, {stream})"
    return state


def _noise_bits(state: State, format: Format, stream: int) -> str:
    """Returns an expression of 32 bits that are added before lower bits are cut off."""
    if format.rounding == "random":
        return _drawn(stream)
    if format.rounding == "nearest":
        return _HALF
    # One addition leads from element to element; LLVM does not find that by itself.
    state.restart = [f"{state.value}_dither = dither(add(i32(start), first_element), phase, {stream})"]
    state.advance = [f"{state.value}_dither = add({state.value}_dither, i32({GOLDEN}))"]
    return f"{state.value}_dither"


def _fill_block_state(state: State, format: BlockFormat, stream: int, new_stream: int) -> None:
    # Formats that have a sign differ by these numbers alone, and so do those without one.
    word = "signed" if format.has_sign else "unsigned"
    numbers = f"{format.shift}, {format.offset_bits}, {format.offset!r}, {format.bits}"
    name, value = state.name, state.value
    at, index, code_stream = f"{name}_at", "i", stream
    if format.bits == 4:
        at, index, code_stream = f"{name}_codes", "i - start", _CODES
        _fill_packed_state(state, stream)
    state.load = f"{value} = decode_{word}(load_u8({at}, {index}, {code_stream}), {name}_scale, {numbers})"
    state.block = [f"{name}_scale = load_f32({name}_scales_at, block, TABLE)"]
    if not (state.is_rounded or state.is_written):
        return
    state.once += [f"{name}_new = scratch_i32({BLOCK})", "zero = i32(first >> 62)"]
    state.block.append(f"{name}_largest = i32(0)")
    found = f"larger({name}_largest, to_bits(abs({value})))"
    if not format.has_sign:
        # Bits of numbers from 0 on; only a sign makes larger ones, and then another loop looks again.
        found = f"larger_unsigned({name}_largest, to_bits({value}))"
        state.scale = [
            f"if {name}_largest < i32(0):",
            f"    {name}_largest = i32(0)",
            "    for i in range(count):",
            f"        at_least_zero = magnitude_unsigned(load_f32({name}_new, i, {new_stream}))",
            f"        {name}_largest = larger({name}_largest, at_least_zero)",
        ]
    state.keep = [f"store_f32({name}_new, i - start, {value}, {new_stream})", f"{name}_largest = {found}"]
    state.scale += [
        f"{name}_new_scale = scale_of({name}_largest, {1 / format.largest!r}, {format.largest_scale!r})",
        f"{name}_inverse = inverse_of({name}_new_scale)",
        f"{name}_least = least_of({name}_largest)",
    ]
    if state.is_written:
        state.scale.append(f"store_f32({name}_scales_at, block, {name}_new_scale, TABLE)")
    state.reread = [f"{value} = load_f32({name}_new, i - start, {new_stream})"]
    noise = _noise_bits(state, format, stream)
    to_code = f"{format.shift}, {format.offset_bits}, {format.bits}"
    state.narrow = f"encode_{word}({value}, {name}_inverse, {noise}, {name}_least, zero, {to_code})"
    state.widen = f"decode_{word}(kept_{name}, {name}_new_scale, {numbers})"
    state.store = f"store_u8({at}, {index}, kept_{name}, {code_stream})"


def _fill_packed_state(state: State, stream: int) -> None:
    """Adds what moves codes of 4 bits between memory and the stack: the first of two in a byte is its lower half."""
    name, half = state.name, BLOCK // 2
    state.once = [f"{name}_codes = scratch_i32({BLOCK // 4})"]
    state.unpack = [
        f"for i in range({half}):",
        f"    pair = i32(load_u8({name}_at, block * {half} + i, {stream}))",
        f"    store_u16({name}_codes, i, u16(both(either(pair, shl(pair, i32(4))), i32(0x0F0F))), {_CODES})",
    ]
    state.pack = [
        f"for i in range(count, {BLOCK}):",
        f"    store_u8({name}_codes, i, u8(0), {_CODES})",
        f"for i in range({half}):",
        f"    pair = i32(load_u16({name}_codes, i, {_CODES}))",
        f"    store_u8({name}_at, block * {half} + i, u8(either(pair, shr(pair, i32(4)))), {stream})",
    ]
