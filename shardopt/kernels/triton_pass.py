"""The Triton kernel of one pass, for rules that look at whole params: see ``native_pass.py``, its twin.

It is that of ``triton_step.py`` for one block a program, but for four things: only what the pass writes is stored; a
state that other passes read is, from its last assignment on, what its format holds; the block sums of what the rule
takes norms of are added to totals; and a product of factors is read as a state is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from .products import COLUMNS as PRODUCT_COLUMNS
from .products import SLOWER
from .reductions import COLUMNS, LARGEST, LIMB_BITS, NONFINITE
from .tables import Factors, Gradients, JoinedStreams, Streams, sent_together
from .translate import function_from_source, triton_lines
from .triton_formats import decode, dither, draw, encode, join, load_codes, narrow_up, part_master
from .triton_products import product_of
from .triton_reductions import LANES, add_to_row, row_of_block_sums, sums_of
from .triton_step import NUM_WARPS, addresses, block_of_nothing, on, stream_at, stream_constants
from .triton_words import RULE_WORDS, load_bf16, narrow, widen

if TYPE_CHECKING:
    from .pass_spec import PassArithmetic, PassSpec


@triton.jit
def keep(
    x,
    start,
    end_ptr,
    is_whole,
    first,
    phase,
    unknown_zero,
    FORMAT: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROUNDING: tl.constexpr,
    INDEX,
):
    """Returns the items that hold a state, the scale of its block, and what they hold: the state, rounded."""
    places = tl.arange(0, x.shape[1])[None, :]
    if ROUNDING == "dithered":  # noqa: SIM108
        noise = dither(first, places, phase, 3 + INDEX)
    else:
        noise = 0
    if FORMAT == "block":
        codes, scales = encode(x, start, end_ptr, is_whole, noise, NUMBERS, ROUNDING)
        return codes, scales, decode(codes.to(tl.int32) << 24, scales, unknown_zero, NUMBERS)
    elif FORMAT == "bf16_dithered":
        items = narrow_up(x, noise)
        return items, 0.0, widen(items, "bf16")
    else:
        items = narrow(x, FORMAT)
        return items, 0.0, widen(items, FORMAT)


@triton.jit(do_not_specialize=["next_row", "num_blocks", "unscale", "clip", "next_totals"])
def pass_kernel(
    streams_ptr,  # the tables are those of ``step_kernel``
    next_row,
    row_of_block_ptr,
    rows_ptr,
    scalars_ptr,
    noise_ptr,
    products_ptr,  # [num_rows, PRODUCT_COLUMNS] int64: see ``products.py``
    totals_ptr,  # [measured values, num_rows, COLUMNS] int64
    next_totals,  # items from one measured value to the next
    num_blocks,
    unscale,
    clip,
    PASS: tl.constexpr,  # see ``pass_text``
    NUM_SCALARS: tl.constexpr,
    NUM_MEASURED: tl.constexpr,
    WRITTEN: tl.constexpr,  # indices of the states that are stored
    WRITES_PARAM: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    TYPES: tl.constexpr,
    STATES: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROUNDINGS: tl.constexpr,
    NEEDS_NOISE: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRODUCT_COLUMNS: tl.constexpr,
    NUM_PLAIN: tl.constexpr,  # of them
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    NONFINITE: tl.constexpr,
    LIMB_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    row = tl.load(row_of_block_ptr + block).to(tl.int64)
    grad_at = tl.load(rows_ptr + row * 2)
    end_ptr = rows_ptr + row * 2 + 1
    end = tl.load(end_ptr)
    start = block * BLOCK
    if start >= end:
        return
    places = tl.arange(0, BLOCK)[None, :]

    stream_ptrs = streams_ptr + row * next_row
    param_ptr = stream_at(stream_ptrs, TYPES[0])
    master_ptr = stream_at(stream_ptrs + 1, TYPES[1])
    state_ptrs = ()
    scale_ptrs = ()
    for index in tl.static_range(len(STATES)):
        state_ptrs = state_ptrs + (stream_at(stream_ptrs + 2 + index, TYPES[2 + index]),)  # noqa: RUF005
        scales_at = tl.load(stream_ptrs + 2 + len(STATES) + index)
        scale_ptrs = scale_ptrs + (scales_at.to(tl.pointer_type(tl.float32)),)  # noqa: RUF005
    scalars = ()
    for index in tl.static_range(NUM_SCALARS):
        scalars = scalars + (tl.load(scalars_ptr + row * NUM_SCALARS + index),)  # noqa: RUF005
    if MASTER == "":
        if PARAM == "bf16_random":
            param = load_bf16(param_ptr + start, None, None, BLOCK)
        else:
            param = widen(tl.load(param_ptr + start + places), PARAM)
    elif MASTER == "fp32":
        param = tl.load(master_ptr + start + places)
    else:
        param = join(load_bf16(param_ptr + start, None, None, BLOCK), tl.load(master_ptr + start + places), MASTER)
    states = ()
    unknown_zero = num_blocks >> 31
    for index in tl.static_range(len(STATES)):
        if STATES[index] == "block":
            codes = load_codes(state_ptrs[index] + start, None, None, BLOCK)
            old_scale = tl.load(scale_ptrs[index] + block)
            states = states + (decode(codes, old_scale, unknown_zero, tl.constexpr(NUMBERS[index])),)  # noqa: RUF005
        else:
            stored = tl.load(state_ptrs[index] + start + places)
            states = states + (widen(stored, tl.constexpr(STATES[index])),)  # noqa: RUF005

    grad_ptrs = grad_at.to(tl.pointer_type(GRAD_TYPE)) + start
    is_whole = start + BLOCK <= end
    within = places < end - start
    if is_whole:
        if ALIGNED:
            grad_ptrs = tl.multiple_of(grad_ptrs, 16)
        if ALIGNED and GRAD == "bf16":
            grad = load_bf16(grad_ptrs, None, None, BLOCK)
        else:
            grad = widen(tl.load(grad_ptrs + places), GRAD)
    else:
        grad = widen(tl.load(grad_ptrs + places, mask=within, other=0), GRAD)
    grad = grad * unscale * clip

    first = 0
    phase = 0
    if NEEDS_NOISE:
        key, other_key = tl.load(noise_ptr + row * 4), tl.load(noise_ptr + row * 4 + 1)
        first, phase = start.to(tl.int32) + tl.load(noise_ptr + row * 4 + 2), tl.load(noise_ptr + row * 4 + 3)
    product = 0.0
    if HAS_PRODUCT:
        product = product_of(products_ptr, row, start, within, places, BLOCK, PRODUCT_COLUMNS, NUM_PLAIN)
    param, items, scales, measured = PASS(
        param,
        grad,
        states,
        product,
        scalars,
        start,
        end_ptr,
        is_whole,
        first,
        phase,
        unknown_zero,
        STATES,
        NUMBERS,
        ROUNDINGS,
    )

    # What a program holds behind the end of its param is no element of it.
    for index in tl.static_range(NUM_MEASURED):
        value = tl.where(within, measured[index], 0.0)
        mantissa, exponent, top, nonfinite = sums_of(tl.reshape(value, (BLOCK,)), 1.0, 1.0, 1.0, "fp32", BLOCK)
        added = row_of_block_sums(mantissa, exponent, nonfinite, NONFINITE, LIMB_BITS, LANES)
        into = totals_ptr + index * tl.cast(next_totals, tl.int64)
        add_to_row(into, row, added, top, COLUMNS, LARGEST, LANES)

    if WRITES_PARAM:
        if MASTER == "split" or MASTER == "split24":
            upper, rest = part_master(param, MASTER)
            tl.store(param_ptr + start + places, upper)
            tl.store(master_ptr + start + places, rest)
        else:
            if MASTER == "fp32":
                tl.store(master_ptr + start + places, param)
            if PARAM == "bf16_random":
                bits = draw(first, places, key, other_key, 1)
                tl.store(param_ptr + start + places, narrow_up(param, bits))
            else:
                tl.store(param_ptr + start + places, narrow(param, PARAM))
    for index in tl.static_range(len(WRITTEN)):
        tl.store(state_ptrs[WRITTEN[index]] + start + places, items[index])
        if STATES[WRITTEN[index]] == "block":
            tl.store(scale_ptrs[WRITTEN[index]] + block, scales[index])


def pass_text(part: PassArithmetic) -> str:
    """Returns a pass as the text of a function on tiles.

    It returns the param, the items and scales of each state that is stored, and the measured values.
    """
    context = "start, end_ptr, is_whole, first, phase, unknown_zero"
    lines = [f"def {part.rule}(param, grad, states, product, scalars, {context}, STATES, NUMBERS, ROUNDINGS):"]
    lines += [f"    state_{name} = states[{index}]" for index, name in enumerate(part.states)]
    lines += [f"    state_{name} = product" for name in part.products]
    lines += [f"    s_{name} = scalars[{index}]" for index, name in enumerate(part.scalars)]
    rule = triton_lines(part)
    last = {line.split(" = ")[0]: at for at, line in enumerate(rule)}
    kept = {last[f"state_{name}"]: name for name in part.states if name in (*part.rounded, *part.written)}
    for at, line in enumerate(rule):
        lines.append(f"    {line}")
        if at in kept:
            name = kept[at]
            index, rounded = part.states.index(name), f"state_{name}" if name in part.rounded else f"rounded_{name}"
            format = ", ".join(f"tl.constexpr({each}[{index}])" for each in ("STATES", "NUMBERS", "ROUNDINGS"))
            arguments = f"state_{name}, {context}, {format}, {index}"
            lines.append(f"    items_{name}, scales_{name}, {rounded} = keep({arguments})")
    stored = [name for name in part.states if name in part.written]
    # A measured value may be the same number for all elements: param makes a tile of it.
    measured = "".join(f"tl.broadcast_to(measured_{number}, param.shape), " for number in part.measured)
    results = ["".join(f"{kind}_{name}, " for name in stored) for kind in ("items", "scales")]
    lines.append(f"    return param, ({results[0]}), ({results[1]}), ({measured})")
    return "\n".join(lines) + "\n"


@functools.cache
def pass_function(part: PassArithmetic) -> Any:
    """Returns the pass as a jit function that :func:`pass_kernel` calls."""
    return triton.jit(function_from_source(pass_text(part), "triton", {**RULE_WORDS, "keep": keep}))


def pass_constants(spec: PassSpec, aligned: bool) -> dict[str, Any]:
    """Returns the kernel's compile-time arguments."""
    part = spec.variant
    return {
        **stream_constants(spec, aligned),
        "PASS": pass_function(part),
        "NUM_MEASURED": len(part.measured),
        "WRITTEN": tuple(index for index, name in enumerate(part.states) if name in part.written),
        "WRITES_PARAM": part.writes_param,
        "HAS_PRODUCT": spec.has_product,
        "PRODUCT_COLUMNS": PRODUCT_COLUMNS,
        "NUM_PLAIN": SLOWER,
        "COLUMNS": COLUMNS,
        "LARGEST": LARGEST,
        "NONFINITE": NONFINITE,
        "LIMB_BITS": LIMB_BITS,
        "LANES": LANES,
    }


def run_pass(
    spec: PassSpec,
    streams: Streams | JoinedStreams,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None,
    totals: torch.Tensor | None,
    products: torch.Tensor | None = None,
) -> None:
    """Launches once for all shards, on the current CUDA stream of their device."""
    assert factors.divisor == 1 and (products is not None) == spec.has_product
    num_blocks, device = gradients.num_blocks, gradients.row_of_block.device
    if num_blocks == 0:
        return
    where = addresses(streams)
    host = [where, scalars, *(each for each in (noise, products) if each is not None)]
    is_there = gradients.rows.device == device and device.type != "cpu"
    with on(device):
        there = sent_together(host if is_there else [*host, gradients.rows], device)
        pass_kernel[(num_blocks,)](
            there[0],
            0 if len(where) == 1 else where.shape[1],
            gradients.row_of_block,
            gradients.rows if is_there else there[-1],
            there[1],
            there[1 if noise is None else 2],
            there[0] if products is None else there[2 if noise is None else 3],
            there[0] if totals is None else totals,
            0 if totals is None else totals.shape[1] * totals.shape[2],
            num_blocks,
            float(factors.unscale),
            float(factors.clip),
            **pass_constants(spec, gradients.aligned),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


@functools.cache
def prepare_pass(spec: PassSpec, device: torch.device, aligned: bool) -> None:
    """Compiles :func:`pass_kernel` for ``spec``, by a launch over one block whose only row is skipped."""
    streams, gradients, scalars, noise = block_of_nothing(spec, device, aligned)
    measured = len(spec.variant.measured)
    totals = torch.zeros(measured, 1, COLUMNS, dtype=torch.int64, device=device) if measured else None
    products = torch.zeros(1, PRODUCT_COLUMNS, dtype=torch.int64) if spec.has_product else None
    run_pass(spec, streams, gradients, scalars, Factors(), noise, totals, products)
