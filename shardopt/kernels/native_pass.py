"""The native kernel of one pass, for rules that look at whole params: a step's kernel that may also measure.

It differs from that of ``native_step.py`` in three ways. Only what the pass writes is stored. A state that other passes
read is, from its last assignment on, what its format holds: it is narrowed and widened again at once. And what the rule
takes a norm of is put on the stack, a block at a time, and summed up as ``reductions.py`` has it::

            for i in range(start, start + count):
                ... loads, the rule ...
                kept_exp_avg = narrow_bf16(state_exp_avg)
                state_exp_avg = widen_bf16(kept_exp_avg)
                ... the rest of the rule ...
                bits_1 = both(to_bits(measured_1), i32(2147483647))
                top_1 = larger(top_1, bits_1)
                store_i32(at_1, i - start, bits_1, 30)
                store_bf16(exp_avg_at, i, kept_exp_avg, 3)
            ... mantissa_1, exponent_1, largest_1, nonfinite_1 of the block ...

A product of factors is loaded where a state would be. Its loop goes over the runs of ``products.py``, in each of which
one factor stays::

            at = start
            while at < start + count:
                ... the run that element ``at`` is in, the places of its factors, where it ends ...
                outer = load_f32(outer_at, outer_place)
                for i in range(at, stop):
                    state_root = outer * load_f32(inner_at, inner_place + i - at)
                    ... loads, the rule, stores ...
                at = stop

A state in 8 bits is known once the scale of its block is. States whose values follow from those of other such states,
as they are stored, take a loop more over the block. LLVM drops from each loop what nothing in it depends on.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .formats import BlockFormat
from .native_step import (
    FIRST_STATE,
    NOISE,
    KernelText,
    add_param,
    compiling,
    kernel_words,
    loaded,
    loop_over,
    noise_bits,
    pointers_of,
)
from .products import COLUMNS, DIMS, FIRST, INNER, INNER_STEP, OUTER, OUTER_STEP, RUN, SLOWER
from .tables import BLOCK
from .translate import function_from_source, native_body

if TYPE_CHECKING:
    from .formats import Format
    from .pass_spec import PassArithmetic, PassSpec

# Of each measured value, for each block: see ``BlockSums``.
SUMS = ("mantissa", "exponent", "largest", "nonfinite")
_MEASURED = 30  # the stream of measured values on the stack; states have streams up to 28


@functools.cache
def compile_pass(spec: PassSpec) -> Callable[..., None]:
    """Compiles the kernel; several threads may call it, each on its own range of blocks, without the GIL."""
    import numba

    from . import native_formats, native_words

    i64, f32 = numba.types.int64, numba.types.float32
    names = {**kernel_words(native_words, native_formats), "i64": i64}
    function = function_from_source(pass_source(spec), "native", names)
    pointers = len(pointers_of(spec)) + spec.has_product + len(SUMS) * len(spec.variant.measured)
    signature = numba.types.void(*[i64] * 6, f32, f32, *[i64] * pointers)
    with compiling:
        return numba.njit(signature, **native_words.COMPILE_OPTIONS)(function)  # type: ignore[no-any-return]


# The sums of one block of measured values; K is its number. Their magnitudes lie at at_K, and top_K is the largest. In
# the kernel's text, as the words in it are inlined. What is rare has loops of its own: Inf or NaN, and blocks of such
# small numbers that 2**(153 - grid) passes fp32's range and takes two factors.
_SUM = """\
bad = i32(0)
if top_K >= i32(2139095040):
    top_K = i32(0)
    for i in range(count):
        bits = load_i32(at_K, i, 30)
        finite = i32(bits < i32(2139095040))
        bad = add(bad, sub(i32(1), finite))
        bits = mul(bits, finite)
        top_K = larger(top_K, bits)
        store_i32(at_K, i, bits, 30)
grid = larger(shr(top_K, i32(23)), i32(1))
raised = sub(i32(153), grid)
first_factor = from_bits(shl(add(smaller(raised, i32(127)), i32(127)), i32(23)))
if raised > i32(127):
    second_factor = from_bits(shl(raised, i32(23)))
    for i in range(count):
        store_f32(at_K, i, load_f32(at_K, i, 30) * second_factor, 30)
for i in range(count, 256):
    store_i32(at_K, i, i32(0), 30)
total = sum_of_squares(at_K, first_factor, 256, 30)
store_i64(mantissa_K, block, total, TABLE)
store_i32(exponent_K, block, grid, TABLE)
store_i32(largest_K, block, top_K, TABLE)
store_i32(nonfinite_K, block, bad, TABLE)
"""


@dataclass
class _State:
    """One state of a pass: how it is loaded, what it becomes, how it is stored."""

    name: str
    stream: int
    is_rounded: bool
    is_written: bool
    load: str
    restart: list[str] = field(default_factory=list)  # before each loop over the elements of a block
    advance: list[str] = field(default_factory=list)  # to the next element's noise
    narrow: str = ""  # of the value
    widen: str = ""  # of what it was narrowed to
    store: str = ""
    new_stream: int = 0  # in 8 bits: that of new values on the stack
    once: str = ""
    block: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)  # in 8 bits: puts a new value on the stack
    scale: list[str] = field(default_factory=list)  # in 8 bits: between two loops
    depth: int = 0  # in 8 bits: the loop, from 1 on, that finds its new values

    @property
    def is_block(self) -> bool:
        return bool(self.scale)


def pass_source(spec: PassSpec) -> str:
    """Returns the kernel's text."""
    part, text = spec.variant, KernelText()
    for index, name in enumerate(part.scalars):
        text.block.append(f"s_{name} = load_f32(scalars, row * {len(part.scalars)} + {index}, TABLE)")
    if spec.needs_noise:
        text.block += [f"{name} = load_i32(noise, row * 4 + {i}, TABLE)" for i, name in enumerate(NOISE)]
    text.load.append(f"grad = widen_{spec.grad.name}(load_{spec.grad.name}(grad_at, i, 0)) * unscale * clip")
    add_param(text, spec)
    if not part.writes_param:
        text.store = []
    states = [_state(spec, index) for index in range(len(part.states))]
    text.once += [each.once for each in states if each.once]
    text.once += [f"at_{number} = scratch_i32({BLOCK})" for number in part.measured]
    text.block += [line for each in states for line in each.block]
    text.block += [f"top_{number} = i32(0)" for number in part.measured]
    text.load += [each.load for each in states]
    sums = [f"{column}_{number}" for number in part.measured for column in SUMS]
    arguments = ["first", "last", "row_of_block", "rows", "scalars", "noise", "unscale", "clip", *pointers_of(spec)]
    arguments += ["products"] * spec.has_product
    text.block += [f"{name} = {value}" for name, value in _PRODUCT.items() if spec.has_product]
    lines = [
        f"def {part.rule}({', '.join([*arguments, *sums])}):",
        *(f"    {line}" for line in text.once),
        "    for block in range(first, last):",
        "        row = load_i32(row_of_block, block, TABLE)",
        f"        start = block * {BLOCK}",
        f"        count = min(load_i64(rows, row * 2 + 1, TABLE) - start, {BLOCK})",
        "        if count <= 0:",
        "            continue",
        "        grad_at = load_i64(rows, row * 2, TABLE)",
        *(f"        {line}" for line in text.block),
        *(f"        {line}" for line in _loops(text, states, native_body(part), part)),
    ]
    for number in part.measured:
        lines += [f"        {line}" for line in _SUM.replace("_K", f"_{number}").splitlines()]
    return "\n".join(lines) + "\n"


def _state(spec: PassSpec, index: int) -> _State:
    part, name, format = spec.variant, spec.variant.states[index], spec.states[index]
    stream, value = FIRST_STATE + index, f"state_{name}"
    is_rounded, is_written = name in part.rounded, name in part.written
    if isinstance(format, BlockFormat):
        return _block_state(name, format, stream, stream + len(part.states), is_rounded, is_written)
    state = _State(name, stream, is_rounded, is_written, f"{value} = {loaded(f'{name}_at', format, stream)}")
    if is_rounded or is_written:
        kept = format.name if format.rounding == "nearest" else "bf16"
        state.narrow = f"narrow_{kept}({value})"
        if format.rounding != "nearest":
            state.narrow = f"narrow_bf16_up({value}, {_noise(state, value, format)})"
        state.widen = f"widen_{kept}(kept_{name})"
        state.store = f"store_{kept}({name}_at, i, kept_{name}, {stream})"
    return state


def _noise(state: _State, value: str, format: Format) -> str:
    text = KernelText()
    found = noise_bits(text, value, format, state.stream)
    state.restart, state.advance = text.block, text.advance
    return found


def _block_state(
    name: str, format: BlockFormat, stream: int, new_stream: int, is_rounded: bool, is_written: bool
) -> _State:
    word = "signed8" if format.has_sign else "unsigned8"
    numbers = f"{format.shift}, {format.offset_bits}, {format.offset!r}"
    value = f"state_{name}"
    loads = f"{value} = decode_{word}(load_u8({name}_at, i, {stream}), {name}_scale, {numbers})"
    state = _State(name, stream, is_rounded, is_written, loads, new_stream=new_stream)
    state.block = [f"{name}_scale = load_f32({name}_scales_at, block, TABLE)"]
    if not (is_rounded or is_written):
        return state
    state.once = f"{name}_new = scratch_i32({BLOCK})"
    state.block.append(f"{name}_largest = i32(0)")
    state.keep = [
        f"store_f32({name}_new, i - start, {value}, {new_stream})",
        f"{name}_largest = larger({name}_largest, magnitude_{word}({value}))",
    ]
    state.scale = [
        f"{name}_new_scale = scale_of({name}_largest, {1 / format.largest!r}, {format.largest_scale!r})",
        f"{name}_inverse = inverse_of({name}_new_scale)",
        f"{name}_least = least_of({name}_largest)",
    ]
    if is_written:
        state.scale.insert(1, f"store_f32({name}_scales_at, block, {name}_new_scale, TABLE)")
    noise = _noise(state, value, format)
    state.narrow = f"encode_{word}({value}, {name}_inverse, {noise}, {name}_least, {numbers})"
    state.widen = f"decode_{word}(kept_{name}, {name}_new_scale, {numbers})"
    state.store = f"store_u8({name}_at, i, kept_{name}, {stream})"
    return state


def _loops(text: KernelText, states: list[_State], rule: list[str], part: PassArithmetic) -> list[str]:
    """Returns the loops over the elements of a block; a loop more for each depth of states in 8 bits."""
    _find_depths(states, rule)
    deepest = max((each.depth for each in states), default=0)
    lines: list[str] = []
    for number in range(1, deepest + 2):
        is_last = number == deepest + 1
        body = [*text.load, *_body(states, rule, number)]
        for each in states:
            if each.is_block and each.depth == number:
                body += each.keep
            if is_last and each.is_written:
                body.append(each.store)
        if is_last:
            body += text.store
            body += [line for each in part.measured for line in _measuring(each)]
            body += text.advance
        body = _with_advance(body, states)
        loop = _loop_over_runs(part.products[0], body) if part.products else loop_over(body)
        lines += [*(line for each in states for line in each.restart), *loop]
        lines += [line for each in states if each.depth == number for line in each.scale]
    return lines


# Of the param that a block belongs to.
_PRODUCT = {
    "place": f"row * {COLUMNS}",
    **{
        name: f"load_i64(products, place + {column}, TABLE)"
        for name, column in {
            "first_of_param": FIRST,
            "outer_at": OUTER,
            "inner_at": INNER,
            "run": RUN,
            "outer_step": OUTER_STEP,
            "inner_step": INNER_STEP,
            "dims": DIMS,
        }.items()
    },
}
# The places of the factors of element ``at``, and where its run ends.
_RUN = f"""\
number = (at + first_of_param) // run
inside = at + first_of_param - number * run
outer_place = inside * outer_step
inner_place = inside * inner_step
for dim in range(dims):
    slower = place + {SLOWER} + 3 * dim
    size = load_i64(products, slower, TABLE)
    digit = number % size
    number = number // size
    outer_place += digit * load_i64(products, slower + 1, TABLE)
    inner_place += digit * load_i64(products, slower + 2, TABLE)
stop = min(at + run - inside, start + count)
outer = load_f32(outer_at, outer_place, TABLE)
"""


def _loop_over_runs(product: str, body: list[str]) -> list[str]:
    """Returns the loop over a block with a product: that of nearly all params, which LLVM vectorizes, and another."""
    plain = f"state_{product} = outer * load_f32(inner_at, inner_place + (i - at), TABLE)"
    outer = "load_f32(outer_at, outer_place + (i - at) * outer_step, TABLE)"
    inner = "load_f32(inner_at, inner_place + (i - at) * inner_step, TABLE)"
    return [
        "at = start",
        "while at < start + count:",
        *(f"    {line}" for line in _RUN.splitlines()),
        "    if outer_step == 0 and inner_step == 1:",
        "        for i in range(at, stop):",
        *(f"            {line}" for line in (plain, *body)),
        "    else:",
        "        for i in range(at, stop):",
        *(f"            {line}" for line in (f"state_{product} = {outer} * {inner}", *body)),
        "    at = stop",
    ]


def _measuring(number: int) -> list[str]:
    bits = f"both(to_bits(measured_{number}), i32(2147483647))"
    return [
        f"bits_{number} = {bits}",
        f"top_{number} = larger(top_{number}, bits_{number})",
        f"store_i32(at_{number}, i - start, bits_{number}, {_MEASURED})",
    ]


def _with_advance(body: list[str], states: list[_State]) -> list[str]:
    return [*body, *(line for each in states for line in each.advance)]


def _body(states: list[_State], rule: list[str], number: int) -> list[str]:
    """Returns the rule's statements in loop ``number``, with what becomes of each state after its last assignment."""
    body = list(rule)
    for each in states:
        value = f"state_{each.name}"
        if not (each.is_rounded or each.is_written) or (each.is_block and each.depth >= number):
            continue
        lines = [f"{value} = load_f32({each.name}_new, i - start, {each.new_stream})"] if each.is_block else []
        lines.append(f"kept_{each.name} = {each.narrow}")
        if each.is_rounded:
            lines.append(f"{value} = {each.widen}")
        at = _last_assignment(body, value)
        body[at + 1 : at + 1] = lines
    return body


def _last_assignment(lines: list[str], name: str) -> int:
    return max(at for at, line in enumerate(lines) if line.startswith(f"{name} = "))


def _find_depths(states: list[_State], rule: list[str]) -> None:
    """Notes of each state in 8 bits after how many others, each stored before the next is known, it is known."""
    depths: dict[str, int] = {}
    ends = {_last_assignment(rule, f"state_{each.name}"): each for each in states if each.is_block}
    for at, line in enumerate(rule):
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.Assign)
        names = [node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)]
        depth = max((depths.get(name, 0) for name in names), default=0)
        state = ends.get(at)
        if state is not None:
            state.depth = depth + 1
            depth += state.is_rounded
        depths[line.split(" = ")[0]] = depth
