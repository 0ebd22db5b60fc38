"""The native kernel: one pass over a shard on the CPU, compiled by Numba from the rule's source.

For AdamW on bf16 params with fp32 masters, Numba compiles this text (shortened)::

    def adam(first, last, row_of_block, rows, scalars, noise, unscale, clip, ties, param_at, master_at, ...):
        for block in range(first, last):
            row = load_i32(row_of_block, block, TABLE)
            start = block * 256
            count = min(load_i64(rows, row * 2 + 1, TABLE) - start, 256)
            if count <= 0:
                continue
            grad_at = load_i64(rows, row * 2, TABLE)
            s_beta2 = load_f32(scalars, row * 7 + 1, TABLE)
            apart = i32(0)
            for i in range(start, start + count):
                apart = either(apart, apart_bf16(load_u16(param_at, i, 1), load_f32(master_at, i, 2)))
            if apart != i32(0):  # somebody wrote to the param
                ... follow_bf16: the master becomes the param wherever it does not round to it
            for i in range(start, start + count):
                grad = widen_bf16(load_bf16(grad_at, i, 0)) * unscale * clip
                param = load_f32(master_at, i, 2)
                ... the rule; after a state's last assignment: kept_exp_avg = narrow_fp32(state_exp_avg) ...
                store_fp32(exp_avg_at, i, kept_exp_avg, 3)
                store_fp32(master_at, i, param, 2)
            for i in range(start, start + count):
                param = load_f32(master_at, i, 2)
                store_bf16(param_at, i, narrow_bf16(param), 1)

The row of a skipped param has an end of 0, and the kernel passes over its blocks.

A state in 8 bits cannot be stored before its block's scale is known, so two loops go over a block, with the same
statements. The first loop keeps the new values of such states on the stack, and finds the largest. The second one reads
them back right after the rule's last assignment to each, and does all the storing::

            for i in range(start, start + count):
                ... loads, the rule ...
                store_f32(exp_avg_new, i - start, state_exp_avg, 5)
                exp_avg_largest = larger(exp_avg_largest, to_bits(abs(state_exp_avg)))
            ... the block's scale ...
            for i in range(start, start + count):
                ... loads, the rule up to that assignment ...
                state_exp_avg = load_f32(exp_avg_new, i - start, 5)
                ... the rest of the rule, stores ...

LLVM drops from each loop whatever nothing in it depends on. Roots and divisions keep one unit busy while others
decode and encode, so both loops have some: AdamW's first one decodes, averages, and puts the divisor, in which the root
is, on the stack; the second one encodes, and divides. Lion's param follows from the old average, so that a second loop
would decode it again: its first loop does all but encode.

A rule that looks at whole params has several passes (``rules/passes.py``), a kernel each. A state that another pass
reads is, from its last assignment on, what its format holds: narrowed and widened again at once. In 8 bits it is known
once its block's scale is; states that follow from it, in 8 bits too, take a loop more over the block. What the rule
takes a norm of is put on the stack, a block at a time, and summed up as ``reductions.py`` has it::

            for i in range(start, start + count):
                ... loads, the rule ...
                kept_exp_avg = narrow_bf16(state_exp_avg)
                state_exp_avg = widen_bf16(kept_exp_avg)
                ... the rest of the rule ...
                store_bf16(exp_avg_at, i, kept_exp_avg, 3)
                bits_1 = both(to_bits(measured_1), i32(2147483647))
                top_1 = larger(top_1, bits_1)
                store_i32(at_1, i - start, bits_1, 30)
            ... mantissa_1, exponent_1, largest_1, nonfinite_1 of the block ...
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..compilers.native import native_kernel
from .native_products import OF_BLOCK, loop_over_runs
from .native_streams import State, following, param_lines, pointers_of, state_of
from .tables import BLOCK
from .translate import function_from_source, native_lines

if TYPE_CHECKING:
    from .spec import Spec

# Of each measured value, for each block: see ``BlockSums``.
SUMS = ("mantissa", "exponent", "largest", "nonfinite")
_NOISE = ("key", "other_key", "first_element", "phase")
# Streams on the stack; states, params and codes have those up to 29. One that shares the divisor's is only taken for an
# alias of it.
_MEASURED, _DIVISOR = 30, 28


@functools.cache
def compile_step(spec: Spec, number: int) -> Callable[..., None]:
    """Compiles pass ``number``; several threads may call the kernel, each on its own range of blocks, without the GIL.

    Its arguments are ``first, last``, the addresses of the tables, unscale, clip and ties, the addresses of the
    streams, of the table of products if there is one, and of the block sums of each measured value.
    """
    text = step_source(spec, number)
    pointers = len(pointers_of(spec)) + spec.has_product + len(SUMS) * len(spec.passes[number].measured)
    return native_kernel(text, "qqqqqqffq" + "q" * pointers, lambda: function_from_source(text, "native", _words()))


def _words() -> dict[str, Any]:
    """Returns all that the text may call; a name that it does not use costs nothing."""
    from numba import types

    from . import native_formats as formats
    from . import native_words as words

    names = {**vars(formats), **vars(words), **words.RULE_WORDS, "min": min, "i64": types.int64}
    for name, (load, widen, store, narrow) in words.FORMATS.items():
        names |= {f"load_{name}": load, f"widen_{name}": widen, f"store_{name}": store, f"narrow_{name}": narrow}
    return names


def step_source(spec: Spec, number: int) -> str:
    """Returns the text of the kernel of pass ``number``."""
    part = spec.passes[number]
    states = [state_of(spec, number, index) for index in range(len(spec.states))]
    once = ["in_wide_vectors()", *(line for each in states for line in each.once)]
    once += param_lines(spec).once if part.writes_param else []
    once += [f"at_{value} = scratch_i32({BLOCK})" for value in part.measured]
    of_block = [
        f"s_{name} = load_f32(scalars, row * {len(part.scalars)} + {index}, TABLE)"
        for index, name in enumerate(part.scalars)
    ]
    if spec.needs_noise:
        of_block += [f"{name} = load_i32(noise, row * 4 + {index}, TABLE)" for index, name in enumerate(_NOISE)]
    of_block += [line for each in states for line in each.block]
    of_block += [f"top_{value} = i32(0)" for value in part.measured]
    of_block += OF_BLOCK if spec.has_product else []
    sums = [line for value in part.measured for line in _SUM.replace("_K", f"_{value}").splitlines()]
    columns = [f"{column}_{value}" for value in part.measured for column in SUMS]
    arguments = [
        "first",
        "last",
        "row_of_block",
        "rows",
        "scalars",
        "noise",
        "unscale",
        "clip",
        "ties",
        *pointers_of(spec),
    ]
    lines = [
        f"def {part.rule}({', '.join([*arguments, *['products'][: spec.has_product], *columns])}):",
        *(f"    {line}" for line in once),
        "    for block in range(first, last):",
        "        row = load_i32(row_of_block, block, TABLE)",
        f"        start = block * {BLOCK}",
        f"        count = min(load_i64(rows, row * 2 + 1, TABLE) - start, {BLOCK})",
        "        if count <= 0:",
        "            continue",
        "        grad_at = load_i64(rows, row * 2, TABLE)",
        *(f"        {line}" for line in (*of_block, *following(spec), *_loops(spec, number, states), *sums)),
    ]
    return "\n".join(lines) + "\n"


def _loops(spec: Spec, number: int, states: Sequence[State]) -> list[str]:
    """Returns the loops over the elements of a block.

    There is one, and a loop more for each depth of states in 8 bits; then a loop each for what only follows.
    """
    part = spec.passes[number]
    rule = native_lines(part.source)
    _find_depths(states, rule)
    param = param_lines(spec)
    grad = f"grad = widen_{spec.grad.name}(load_{spec.grad.name}(grad_at, i, 0)) * unscale * clip"
    loads = [grad, *param.loads, *(each.load for each in states)]
    last = max([1, *(each.depth + _is_awaited(each, states, rule) for each in states if each.is_block)])
    divisor = _divisor(rule, states) if last == 2 and not part.products else None
    lines = [line for each in states if _is_read(each.value, rule) for line in each.unpack]
    lines += ["divisor_at = scratch_i32(256)"] if divisor is not None else []
    for loop in range(1, last + 1):
        found = [each for each in states if each.is_block and each.depth == loop]  # in this loop
        known = [each for each in states if not (each.is_block and each.depth >= loop)]
        body = [*loads, *_body(known, rule, divisor if loop == last else None)]
        body += [line for each in found for line in each.keep]
        if divisor is not None and loop < last:
            body.append(f"store_f32(divisor_at, i - start, {divisor}, {_DIVISOR})")
        if loop == last:
            body += [each.store for each in known if each.is_written]
            body += param.stores if part.writes_param else []
            body += [line for value in part.measured for line in _measuring(value)]
        body += [line for each in known for line in each.advance]
        lines += [line for each in known for line in each.restart]
        lines += loop_over_runs(part.products[0], body) if part.products else _loop_over(body)
        lines += [line for each in found for line in each.scale]
    lines += _loop_over(param.rounds) if part.writes_param and param.rounds else []
    for each in states:
        if each.is_block and each.depth == last and each.is_written:
            encoding = [*each.reread, f"kept_{each.name} = {each.narrow}", each.store, *each.advance]
            lines += [*each.restart, *_loop_over(encoding)]
    return [*lines, *(line for each in states if each.is_written for line in each.pack)]


def _is_awaited(state: State, states: Sequence[State], rule: list[str]) -> bool:
    """True if a loop more follows, once a state's new values in 8 bits are known.

    It does where that loop reads what the state became; or, to encode while the divisions run, where it needs none of
    the states' old values: decoding them again would take longer.
    """
    if state.is_rounded:
        return True
    blocks = {each.value for each in states if each.is_block}
    lasts = {_last_assignment(rule, each.value) for each in states if each.is_block and each.is_written}
    needed = {"param", *(each.value for each in states if each.is_written and not each.is_block)}
    for at in reversed(range(len(rule))):
        target, _, assigned = rule[at].partition(" = ")
        if target in needed:
            needed.remove(target)
            needed.update(set() if at in lasts else _names(assigned))
    return not needed & blocks


def _is_read(value: str, rule: list[str]) -> bool:
    """True unless the rule assigns a state before it reads it."""
    target, _, assigned = next((line for line in rule if value in line), value).partition(" = ")
    return target != value or value in assigned


def _loop_over(body: Sequence[str]) -> list[str]:
    return ["for i in range(start, start + count):", *(f"    {line}" for line in body)]


def _divisor(rule: list[str], states: Sequence[State]) -> str | None:
    """Returns the local variable, with a root in it, that the first of two loops puts on the stack for the second.

    So all states are in 8 bits: what the divisor follows from is decoded in the first loop anyway.
    """
    if not all(each.is_block and each.is_written and not each.is_rounded for each in states):
        return None
    for at, line in enumerate(rule):
        target = line.partition(" = ")[0]
        if target.startswith("local_") and "sqrt(" in line and any(f"/ {target}" in later for later in rule[at:]):
            return target
    return None


def _body(known: Sequence[State], rule: list[str], divisor: str | None) -> list[str]:
    """Returns the rule's statements in a loop, with what becomes of each state after its last assignment.

    Args:
        known: states whose new values an earlier loop has put on the stack, or that need none.
        divisor: has been put on the stack, too.
    """
    body = list(rule)
    for each in known:
        if not (each.is_rounded or each.is_written):
            continue
        at = _last_assignment(body, each.value)
        lines = list(each.reread)
        source = body[at].partition(" = ")[2]
        if each.reread and source.isidentifier():
            # What it was assigned from is on the stack too: this loop need not make it again.
            lines.append(f"{source} = {each.value}")
        lines.append(f"kept_{each.name} = {each.narrow}")
        if each.is_rounded:
            lines.append(f"{each.value} = {each.widen}")
        body[at + 1 : at + 1] = lines
    if divisor is not None:
        at = _last_assignment(body, divisor)
        body.insert(at + 1, f"{divisor} = load_f32(divisor_at, i - start, {_DIVISOR})")
    return body


def _last_assignment(lines: list[str], name: str) -> int:
    return max(at for at, line in enumerate(lines) if line.startswith(f"{name} = "))


def _find_depths(states: Sequence[State], rule: list[str]) -> None:
    """Notes of each state in 8 bits after how many others, each stored before the next is known, it is known."""
    depths: dict[str, int] = {}
    ends = {_last_assignment(rule, each.value): each for each in states if each.is_block}
    for at, line in enumerate(rule):
        target, _, assigned = line.partition(" = ")
        depth = max((depths.get(name, 0) for name in _names(assigned)), default=0)
        state = ends.get(at)
        if state is not None:
            state.depth = depth + 1
            depth += state.is_rounded
        depths[target] = depth


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}


# -- block sums --------------------------------------------------------------------------------------------------------


def _measuring(value: int) -> list[str]:
    return [
        f"bits_{value} = both(to_bits(measured_{value}), i32(2147483647))",
        f"top_{value} = larger(top_{value}, bits_{value})",
        f"store_i32(at_{value}, i - start, bits_{value}, {_MEASURED})",
    ]


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
