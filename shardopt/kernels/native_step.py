"""The native kernel: one pass over a shard on the CPU, compiled by Numba from the rule's source.

For AdamW on bf16 params with fp32 masters, Numba compiles this text (shortened)::

    def adam(first, last, row_of_block, rows, scalars, noise, unscale, clip, param_at, master_at, exp_avg_at, ...):
        for block in range(first, last):
            row = load_i32(row_of_block, block, TABLE)
            start = block * 256
            count = min(load_i64(rows, row * 2 + 1, TABLE) - start, 256)
            if count <= 0:
                continue
            grad_at = load_i64(rows, row * 2, TABLE)
            s_beta2 = load_f32(scalars, row * 7 + 1, TABLE)
            for i in range(start, start + count):
                grad = widen_bf16(load_bf16(grad_at, i, 0)) * unscale * clip
                param = load_fp32(master_at, i, 2)
                ... the rule ...
                store_fp32(master_at, i, param, 2)
                store_bf16(param_at, i, narrow_bf16(param), 1)

The row of a skipped param has an end of 0, and the kernel passes over its blocks.

A state in 8 bits cannot be stored before its block's scale is known, so two loops go over a block, with the same
statements. The first loop keeps the new values of such states on the stack, and finds the largest. The second one reads
them back right after the rule's last assignment to each, and does all the storing::

            for i in range(start, start + count):
                ... loads, the rule ...
                store_f32(exp_avg_new, i - start, state_exp_avg, 5)
                exp_avg_largest = larger(exp_avg_largest, magnitude_signed8(state_exp_avg))
            ... the block's scale ...
            for i in range(start, start + count):
                ... loads, the rule up to that assignment ...
                state_exp_avg = load_f32(exp_avg_new, i - start, 5)
                ... the rest of the rule, stores ...

LLVM drops from each loop whatever nothing in it depends on: for AdamW the first one decodes and averages, and the
second one has the root, the divisions and the encoding, which different units of a core do at the same time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .formats import GOLDEN, BlockFormat
from .tables import BLOCK
from .translate import function_from_source, native_body

if TYPE_CHECKING:
    from .formats import Format
    from .spec import StepSpec

compiling = threading.Lock()
compilations = 0  # for the test that a changed hyper-parameter compiles nothing

_PARAM, _MASTER, FIRST_STATE = 1, 2, 3  # streams; the gradient is 0


@functools.cache
def compile_step(spec: StepSpec) -> Callable[..., None]:
    """Compiles the kernel; several threads may call it, each on its own range of blocks, without the GIL."""
    import numba

    from . import native_formats, native_words

    function = function_from_source(step_source(spec), "native", kernel_words(native_words, native_formats))
    i64, f32 = numba.types.int64, numba.types.float32
    signature = numba.types.void(*[i64] * 6, f32, f32, *[i64] * len(pointers_of(spec)))
    with compiling:
        global compilations
        compilations += 1
        return numba.njit(signature, **native_words.COMPILE_OPTIONS)(function)  # type: ignore[no-any-return]


def kernel_words(words: ModuleType, formats: ModuleType) -> dict[str, Any]:
    """Returns all that the text may call; a name that it does not use costs nothing."""
    names = {**vars(formats), **vars(words), **words.RULE_WORDS, "min": min}
    for name, (load, widen, store, narrow) in words.FORMATS.items():
        names |= {f"load_{name}": load, f"widen_{name}": widen, f"store_{name}": store, f"narrow_{name}": narrow}
    return names


@dataclass
class KernelText:
    """The statements of a kernel, by place."""

    once: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)  # before a block's elements
    load: list[str] = field(default_factory=list)  # for each element
    store: list[str] = field(default_factory=list)
    advance: list[str] = field(default_factory=list)  # to the next element's noise
    keep: list[str] = field(default_factory=list)  # in the first of two loops: puts new values on the stack
    scale: list[str] = field(default_factory=list)  # between the two loops
    reread: dict[str, str] = field(default_factory=dict)  # variable of a state in 8 bits -> how it is read back


def pointers_of(spec: StepSpec) -> list[str]:
    states = [f"{name}_at" for name in spec.variant.states]
    scales = [
        f"{name}_scales_at"
        for name, format in zip(spec.variant.states, spec.states, strict=True)
        if isinstance(format, BlockFormat)
    ]
    return ["param_at", *["master_at"][: spec.has_master], *states, *scales]


def step_source(spec: StepSpec) -> str:
    """Returns the kernel's text."""
    variant, text = spec.variant, KernelText()
    for index, name in enumerate(variant.scalars):
        text.block.append(f"s_{name} = load_f32(scalars, row * {len(variant.scalars)} + {index}, TABLE)")
    if spec.needs_noise:
        text.block += [f"{name} = load_i32(noise, row * 4 + {i}, TABLE)" for i, name in enumerate(NOISE)]
    text.load.append(f"grad = widen_{spec.grad.name}(load_{spec.grad.name}(grad_at, i, 0)) * unscale * clip")
    add_param(text, spec)
    for index, (name, format) in enumerate(zip(variant.states, spec.states, strict=True)):
        stream = FIRST_STATE + index
        if isinstance(format, BlockFormat):
            _add_block_state(text, name, format, stream, stream + len(variant.states))
        else:
            text.load.append(f"state_{name} = {loaded(f'{name}_at', format, stream)}")
            text.store.append(stored(text, f"{name}_at", f"state_{name}", format, stream))
    arguments = ["first", "last", "row_of_block", "rows", "scalars", "noise", "unscale", "clip", *pointers_of(spec)]
    return (
        "\n".join(
            [
                f"def {variant.rule}({', '.join(arguments)}):",
                *(f"    {line}" for line in text.once),
                "    for block in range(first, last):",
                "        row = load_i32(row_of_block, block, TABLE)",
                f"        start = block * {BLOCK}",
                f"        count = min(load_i64(rows, row * 2 + 1, TABLE) - start, {BLOCK})",
                "        if count <= 0:",
                "            continue",
                "        grad_at = load_i64(rows, row * 2, TABLE)",
                *(f"        {line}" for line in text.block),
                *(f"        {line}" for line in _loops(text, native_body(variant))),
            ]
        )
        + "\n"
    )


def _loops(text: KernelText, rule: list[str]) -> list[str]:
    """Returns the loop over the elements of a block, or two loops if a state is in 8 bits."""
    if not text.reread:
        return loop_over([*text.load, *rule, *text.store, *text.advance])
    again = list(rule)
    for variable, value in text.reread.items():
        last = max((at for at, line in enumerate(again) if line.startswith(f"{variable} = ")), default=-1)
        again.insert(last + 1, f"{variable} = {value}")
    first, second = [*text.load, *rule, *text.keep], [*text.load, *again, *text.store, *text.advance]
    return [*loop_over(first), *text.scale, *loop_over(second)]


def loop_over(lines: list[str]) -> list[str]:
    return ["for i in range(start, start + count):", *(f"    {line}" for line in lines)]


NOISE = ("key", "other_key", "first_element", "phase")
_HALF = "i32(-2147483648)"  # of 32 bits


def loaded(at: str, format: Format, stream: int) -> str:
    name = format.name if format.rounding == "nearest" else "bf16"
    return f"widen_{name}(load_{name}({at}, i, {stream}))"


def stored(text: KernelText, at: str, value: str, format: Format, stream: int) -> str:
    if format.rounding != "nearest":
        return f"store_bf16({at}, i, narrow_bf16_up({value}, {noise_bits(text, value, format, stream)}), {stream})"
    return f"store_{format.name}({at}, i, narrow_{format.name}({value}), {stream})"


def noise_bits(text: KernelText, value: str, format: Format, stream: int) -> str:
    """Returns an expression of 32 bits that are added before lower bits are cut off."""
    if format.rounding == "random":
        return f"draw(add(i32(i), first_element), key, other_key, {stream})"
    if format.rounding == "nearest":
        return _HALF
    # One addition leads from element to element; LLVM does not find that by itself.
    text.block.append(f"{value}_dither = dither(add(i32(start), first_element), phase, {stream})")
    text.advance.append(f"{value}_dither = add({value}_dither, i32({GOLDEN}))")
    return f"{value}_dither"


def add_param(text: KernelText, spec: StepSpec) -> None:
    """Adds the loads and stores of the value that is updated: the param, its master, or both halves of a master."""
    if not spec.has_master:
        text.load.append(f"param = {loaded('param_at', spec.param, _PARAM)}")
        text.store.append(stored(text, "param_at", "param", spec.param, _PARAM))
        return
    assert spec.master is not None
    name = spec.master.name
    if not spec.reads_param:
        text.load.append(f"param = {loaded('master_at', spec.master, _MASTER)}")
        text.store.append(stored(text, "master_at", "param", spec.master, _MASTER))
        text.store.append(stored(text, "param_at", "param", spec.param, _PARAM))
        return
    kind = {"split": "i16", "split24": "i8"}[name]
    text.load.append(f"param = join_{name}(load_u16(param_at, i, {_PARAM}), load_{kind}(master_at, i, {_MASTER}))")
    text.store += [
        f"master_bits = rounded_{name}(param)",
        f"store_u16(param_at, i, upper_{name}(master_bits), {_PARAM})",
        f"store_{kind}(master_at, i, rest_{name}(master_bits), {_MASTER})",
    ]


def _add_block_state(text: KernelText, name: str, format: BlockFormat, stream: int, new_stream: int) -> None:
    # Formats that have a sign differ by these numbers alone, and so do those without one.
    word = "signed8" if format.has_sign else "unsigned8"
    numbers = f"{format.shift}, {format.offset_bits}, {format.offset!r}"
    text.once.append(f"{name}_new = scratch_i32({BLOCK})")
    text.block += [f"{name}_scale = load_f32({name}_scales_at, block, TABLE)", f"{name}_largest = i32(0)"]
    text.load.append(f"state_{name} = decode_{word}(load_u8({name}_at, i, {stream}), {name}_scale, {numbers})")
    text.keep += [
        f"store_f32({name}_new, i - start, state_{name}, {new_stream})",
        f"{name}_largest = larger({name}_largest, magnitude_{word}(state_{name}))",
    ]
    text.reread[f"state_{name}"] = f"load_f32({name}_new, i - start, {new_stream})"
    text.scale += [
        f"{name}_new_scale = scale_of({name}_largest, {1 / format.largest!r}, {format.largest_scale!r})",
        f"store_f32({name}_scales_at, block, {name}_new_scale, TABLE)",
        f"{name}_inverse = inverse_of({name}_new_scale)",
        f"{name}_least = least_of({name}_largest)",
    ]
    noise = noise_bits(text, f"state_{name}", format, stream)
    encoded = f"encode_{word}(state_{name}, {name}_inverse, {noise}, {name}_least, {numbers})"
    text.store.append(f"store_u8({name}_at, i, {encoded}, {stream})")
