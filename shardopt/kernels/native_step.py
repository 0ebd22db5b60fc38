"""The native kernel: one pass over a shard on the CPU, compiled by Numba from the rule's source.

For AdamW on bf16 params with fp32 masters the text that is compiled reads (shortened)::

    def adam(first, last, row_of_block, rows, scalars, unscale, clip, param_at, master_at, exp_avg_at, exp_avg_sq_at):
        for block in range(first, last):
            row = load_i32(row_of_block, block, TABLE)
            start = block * 256
            count = min(load_i64(rows, row * 2 + 1, TABLE) - start, 256)
            grad_at = load_i64(rows, row * 2, TABLE)
            s_beta2 = load_f32(scalars, row * 7 + 1, TABLE)
            for i in range(start, start + count):
                grad = widen(load_u16(grad_at, i, 0)) * unscale * clip
                param = load_f32(master_at, i, 2)
                ... the rule ...
                store_f32(master_at, i, param, 2)
                store_u16(param_at, i, narrow(param), 1)

A block of a skipped param has an end of 0 in its row, hence no iteration.
"""

import functools
import threading
from collections.abc import Callable

from .spec import StepSpec
from .tables import BLOCK
from .translate import function_from_source, native_body

_compiling = threading.Lock()
compilations = 0  # for the test that a changed hyper-parameter compiles nothing


@functools.cache
def compile_step(spec: StepSpec) -> Callable[..., None]:
    """The compiled kernel; safe to call from several threads, each on its own range of blocks, without the GIL."""
    import numba

    from . import native_words as words

    param, grad = words.FORMATS[spec.param.name], words.FORMATS[spec.grad.name]
    names = {
        **words.RULE_WORDS,
        **{name: getattr(words, name) for name in ("load_f32", "store_f32", "load_i32", "load_i64")},
        "load_grad": grad[0],
        "widen_grad": grad[1],
        "store_param": param[2],
        "narrow_param": param[3],
        "TABLE": words.TABLE,
        "min": min,
    }
    text = step_source(spec)
    function = function_from_source(text, "native", names)
    i64, f32 = numba.types.int64, numba.types.float32
    signature = numba.types.void(*[i64] * 5, f32, f32, *[i64] * (1 + spec.has_master + len(spec.variant.states)))
    with _compiling:
        global compilations
        compilations += 1
        return numba.njit(signature, **words.COMPILE_OPTIONS)(function)  # type: ignore[no-any-return]


def step_source(spec: StepSpec) -> str:
    """The kernel's text, as compiled."""
    variant = spec.variant
    pointers = ["param_at", *["master_at"][: spec.has_master], *(f"{name}_at" for name in variant.states)]
    master_or_param = "master_at" if spec.has_master else "param_at"
    param_stream, first_state_stream = (2, 3) if spec.has_master else (1, 2)
    states = [(name, f"{name}_at", first_state_stream + index) for index, name in enumerate(variant.states)]
    before = [
        f"s_{name} = load_f32(scalars, row * {len(variant.scalars)} + {index}, TABLE)"
        for index, name in enumerate(variant.scalars)
    ]
    body = [
        "grad = widen_grad(load_grad(grad_at, i, 0)) * unscale * clip",
        f"param = load_f32({master_or_param}, i, {param_stream})",
        *(f"state_{name} = load_f32({at}, i, {stream})" for name, at, stream in states),
        *native_body(variant),
        f"store_f32({master_or_param}, i, param, {param_stream})",
        *["store_param(param_at, i, narrow_param(param), 1)"][: spec.has_master],
        *(f"store_f32({at}, i, state_{name}, {stream})" for name, at, stream in states),
    ]
    arguments = ["first", "last", "row_of_block", "rows", "scalars", "unscale", "clip", *pointers]
    return (
        "\n".join(
            [
                f"def {variant.rule}({', '.join(arguments)}):",
                "    for block in range(first, last):",
                "        row = load_i32(row_of_block, block, TABLE)",
                f"        start = block * {BLOCK}",
                f"        count = min(load_i64(rows, row * 2 + 1, TABLE) - start, {BLOCK})",
                "        grad_at = load_i64(rows, row * 2, TABLE)",
                *(f"        {line}" for line in before),
                "        for i in range(start, start + count):",
                *(f"            {line}" for line in body),
            ]
        )
        + "\n"
    )
