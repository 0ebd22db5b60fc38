"""The Triton kernel: one pass over a shard on a GPU, generic over the rule, its states and the formats.

The pass is a compile-time function. Where streams lie, and everything that changes from step to step (scalars, gradient
addresses, which params are skipped) is data, so that nothing is compiled twice.

Of a rule with several passes (``rules/passes.py``), only what a pass writes is stored; a state that another pass reads
is, from its last assignment on, what its format holds; and block sums of what the rule takes norms of are added to
totals.
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
from .tables import Gradients, JoinedStreams, Streams, Tables, sent_together
from .translate import function_from_source, triton_lines
from .triton_formats import decode, dither, draw, encode, follow, join, load_codes, narrow_up, part_master, store_codes
from .triton_products import product_of
from .triton_reductions import LANES, add_to_row, row_of_block_sums, sums_of
from .triton_streams import addresses, block_of_nothing, on, stream_at, stream_constants
from .triton_words import RULE_WORDS, load_bf16, narrow, widen

if TYPE_CHECKING:
    from .spec import Pass, Spec

# A program updates one block of 256 with one warp: 8 elements a thread, which is one 128-bit access for 16-bit streams
# and two for fp32. Triton lays out streams of 4 and of 2 bytes differently, and within a warp it converts between the
# two by shuffles. In the machine code for sm_90, AdamW on bf16 takes 64 registers and no shared memory. With 4 blocks
# and 4 warps it takes 80, exchanges all that it stores through shared memory with 5 barriers, and spills in some
# formats; with 4 blocks and 8 warps it takes 47 and does neither, but accesses to 16-bit streams are then 64 bits wide.
NUM_WARPS = 1


@triton.jit
def keep(
    x,
    start,
    end_ptr,
    is_whole,
    first,
    phase,
    FORMAT: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROUNDING: tl.constexpr,
    INDEX,
):
    """Returns the items that hold the values of state ``INDEX``, and the scale of its block."""
    if ROUNDING == "dithered":  # noqa: SIM108
        noise = dither(first, tl.arange(0, x.shape[1])[None, :], phase, 3 + INDEX)
    else:
        noise = 0
    if FORMAT == "block":
        return encode(x, start, end_ptr, is_whole, noise, NUMBERS, ROUNDING)
    elif FORMAT == "bf16_dithered":
        return narrow_up(x, noise), 0.0
    else:
        return narrow(x, FORMAT), 0.0


@triton.jit
def kept(items, scale, unknown_zero, FORMAT: tl.constexpr, NUMBERS: tl.constexpr):
    """Returns the values of a state that items and scale hold."""
    if FORMAT == "block":
        return decode(items.to(tl.int32) << (32 - NUMBERS[6]), scale, unknown_zero, NUMBERS)
    else:
        return widen(items, FORMAT)


@triton.jit(do_not_specialize=["next_row", "num_blocks", "unscale", "clip", "ties", "next_totals"])
def step_kernel(
    streams_ptr,  # [num_rows, NUM_STREAMS] int64: addresses of element 0, see ``addresses``
    next_row,  # NUM_STREAMS; or 0, if one row of addresses is that of all
    row_of_block_ptr,  # [num_blocks] int32
    rows_ptr,  # [num_rows, 2] int64: address of the gradient of element 0 of the shard; end of the param in the shard
    scalars_ptr,  # [num_rows, NUM_SCALARS] fp32
    noise_ptr,  # [num_rows, 4] int32: two keys, what makes an element of the shard one of the param, a phase
    products_ptr,  # [num_rows, PRODUCT_COLUMNS] int64: see ``products.py``
    totals_ptr,  # [NUM_MEASURED, num_rows, COLUMNS] int64
    next_totals,  # items from one measured value to the next
    num_blocks,
    unscale,  # fp32: 1 / loss scale; includes 1 / divisor for a power of two
    clip,  # fp32: factor of the global-norm clipping
    ties,  # int32: 1 if masters may round ties either way, see ``Tables``
    PASS: tl.constexpr,  # see ``pass_text``
    NUM_SCALARS: tl.constexpr,
    NUM_MEASURED: tl.constexpr,
    WRITTEN: tl.constexpr,  # indices of the states that are stored
    ROUNDED: tl.constexpr,  # of each of them: True if PASS has made items of it
    WRITES_PARAM: tl.constexpr,
    PARAM: tl.constexpr,  # format names
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,  # "" if there is no master; "alone": fp32, and not compared with the param
    TYPES: tl.constexpr,  # of the items of each stream: param, master, states
    STATES: tl.constexpr,  # of each state: the name of its format, or "block"
    NUMBERS: tl.constexpr,  # of each state: the numbers of its block format, or ()
    ROUNDINGS: tl.constexpr,  # tuple, of each state
    NEEDS_NOISE: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # True if every gradient starts on 16 bytes
    BLOCK: tl.constexpr,
    PRODUCT_COLUMNS: tl.constexpr,
    NUM_PLAIN: tl.constexpr,  # of them
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    NONFINITE: tl.constexpr,
    LIMB_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    # 64 bits before the first product: shards pass 2**31 elements.
    block = tl.program_id(0).to(tl.int64)
    row = tl.load(row_of_block_ptr + block).to(tl.int64)
    grad_at = tl.load(rows_ptr + row * 2)
    end_ptr = rows_ptr + row * 2 + 1
    end = tl.load(end_ptr)
    start = block * BLOCK
    # Param and states have no masks, which keeps their accesses 128 bits wide: a shard is a whole number of blocks. The
    # padding of a param's last block is computed on zeros and never read.
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
            param = load_bf16(param_ptr + start, BLOCK)
        else:
            param = widen(tl.load(param_ptr + start + places), PARAM)
    elif MASTER == "alone":
        param = tl.load(master_ptr + start + places)
    elif MASTER == "fp32":
        master = tl.load(master_ptr + start + places)
        if PARAM == "bf16":
            param = follow(load_bf16(param_ptr + start, BLOCK), master, ties)
        else:
            below = tl.load(param_ptr + start + places)
            is_same = narrow(master, PARAM).to(tl.int16, bitcast=True) == below.to(tl.int16, bitcast=True)
            param = tl.where(is_same, master, widen(below, PARAM))
    else:
        param = join(load_bf16(param_ptr + start, BLOCK), tl.load(master_ptr + start + places), MASTER)
    states = ()
    unknown_zero = num_blocks >> 31
    for index in tl.static_range(len(STATES)):
        if STATES[index] == "block":
            codes = load_codes(state_ptrs[index], block, BLOCK, tl.constexpr(NUMBERS[index]))
            old_scale = tl.load(scale_ptrs[index] + block)
            states = states + (decode(codes, old_scale, unknown_zero, tl.constexpr(NUMBERS[index])),)  # noqa: RUF005
        else:
            stored = tl.load(state_ptrs[index] + start + places)
            states = states + (widen(stored, tl.constexpr(STATES[index])),)  # noqa: RUF005

    grad_ptrs = grad_at.to(tl.pointer_type(GRAD_TYPE)) + start
    # Gradients are not padded: only a program that holds the end of a param pays for masks element by element. Made
    # here for all, the mask took 8 registers more where states are in 8 bits.
    is_whole = start + BLOCK <= end
    if is_whole:
        if ALIGNED:
            grad_ptrs = tl.multiple_of(grad_ptrs, 16)
        if ALIGNED and GRAD == "bf16":  # noqa: SIM108
            grad = load_bf16(grad_ptrs, BLOCK)
        else:
            grad = widen(tl.load(grad_ptrs + places), GRAD)
    else:
        grad = widen(tl.load(grad_ptrs + places, mask=start + places < end, other=0), GRAD)
    grad = grad * unscale * clip

    first = 0
    phase = 0
    if NEEDS_NOISE:
        key, other_key = tl.load(noise_ptr + row * 4), tl.load(noise_ptr + row * 4 + 1)
        first, phase = start.to(tl.int32) + tl.load(noise_ptr + row * 4 + 2), tl.load(noise_ptr + row * 4 + 3)
    product = 0.0
    if HAS_PRODUCT:
        product = product_of(products_ptr, row, start, places < end - start, places, BLOCK, PRODUCT_COLUMNS, NUM_PLAIN)
    param, new, scales, measured = PASS(
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
        value = tl.where(places < end - start, measured[index], 0.0)
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
            if MASTER == "fp32" or MASTER == "alone":
                tl.store(master_ptr + start + places, param)
            if PARAM == "bf16_random":
                bits = draw(first, places, key, other_key, 1)
                tl.store(param_ptr + start + places, narrow_up(param, bits))
            else:
                tl.store(param_ptr + start + places, narrow(param, PARAM))
    for index in tl.static_range(len(WRITTEN)):
        items = new[index]
        scale = scales[index]
        if not ROUNDED[index]:
            items, scale = keep(
                items,
                start,
                end_ptr,
                is_whole,
                first,
                phase,
                tl.constexpr(STATES[WRITTEN[index]]),
                tl.constexpr(NUMBERS[WRITTEN[index]]),
                tl.constexpr(ROUNDINGS[WRITTEN[index]]),
                WRITTEN[index],
            )
        if STATES[WRITTEN[index]] == "block":
            store_codes(state_ptrs[WRITTEN[index]], block, items, BLOCK, tl.constexpr(NUMBERS[WRITTEN[index]]))
            tl.store(scale_ptrs[WRITTEN[index]] + block, scale)
        else:
            tl.store(state_ptrs[WRITTEN[index]] + start + places, items)


def pass_text(part: Pass) -> str:
    """Returns a pass as the text of a function on tiles.

    It returns the param; of each state that is stored its items and scale if the state is rounded, else its values and
    0; the measured values. States are rounded right after their last assignment; the others are narrowed where they
    are stored. Narrowed early, AdamW's states in 8 bits took 72 registers on sm_90, and take 64.
    """
    context = "start, end_ptr, is_whole, first, phase"
    lines = [
        f"def {part.rule}(param, grad, states, product, scalars, {context}, unknown_zero, STATES, NUMBERS, ROUNDINGS):"
    ]
    lines += [f"    state_{name} = states[{index}]" for index, name in enumerate(part.states)]
    lines += [f"    state_{name} = product" for name in part.products]
    lines += [f"    s_{name} = scalars[{index}]" for index, name in enumerate(part.scalars)]
    rule = triton_lines(part.source)
    last = {line.split(" = ")[0]: at for at, line in enumerate(rule)}
    rounded = {last[f"state_{name}"]: name for name in part.rounded}
    for at, line in enumerate(rule):
        lines.append(f"    {line}")
        if at in rounded:
            name = rounded[at]
            index = part.states.index(name)
            format = f"tl.constexpr(STATES[{index}]), tl.constexpr(NUMBERS[{index}])"
            rounding = f"tl.constexpr(ROUNDINGS[{index}])"
            lines.append(
                f"    items_{name}, scale_{name} = keep(state_{name}, {context}, {format}, {rounding}, {index})"
            )
            lines.append(f"    state_{name} = kept(items_{name}, scale_{name}, unknown_zero, {format})")
    stored = [name for name in part.states if name in part.written]
    new = "".join(f"{'items' if name in part.rounded else 'state'}_{name}, " for name in stored)
    scales = "".join(f"scale_{name}, " if name in part.rounded else "0.0, " for name in stored)
    # A measured value may be the same number for all elements: param makes a tile of it.
    measured = "".join(f"tl.broadcast_to(measured_{number}, param.shape), " for number in part.measured)
    lines.append(f"    return param, ({new}), ({scales}), ({measured})")
    return "\n".join(lines) + "\n"


@functools.cache
def pass_function(part: Pass) -> Any:
    """Returns the pass as a jit function that :func:`step_kernel` calls."""
    return triton.jit(function_from_source(pass_text(part), "triton", {**RULE_WORDS, "keep": keep, "kept": kept}))


@functools.cache
def constants(spec: Spec, number: int, aligned: bool) -> dict[str, Any]:
    """Returns the kernel's compile-time arguments."""
    part = spec.passes[number]
    stored = [name for name in part.states if name in part.written]
    return {
        **stream_constants(spec, aligned),
        "PASS": pass_function(part),
        "NUM_MEASURED": len(part.measured),
        "WRITTEN": tuple(part.states.index(name) for name in stored),
        "ROUNDED": tuple(name in part.rounded for name in stored),
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


def run(spec: Spec, number: int, streams: Streams | JoinedStreams, tables: Tables) -> None:
    """Launches once for all shards, on the current CUDA stream of their device."""
    gradients, scalars, factors, noise, products, totals, ties = tables
    assert factors.divisor == 1 and (products is not None) == spec.has_product
    num_blocks, device = gradients.num_blocks, gradients.row_of_block.device
    if num_blocks == 0:
        return
    where = addresses(streams)
    host = [where, scalars, *(each for each in (noise, products) if each is not None)]
    is_there = gradients.rows.device == device and device.type != "cpu"  # the device decided which rows are skipped
    with on(device):
        there = sent_together(host if is_there else [*host, gradients.rows], device)
        step_kernel[(num_blocks,)](
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
            float(factors.unscale),  # Triton would compile the kernel again for an int
            float(factors.clip),
            int(ties),
            **constants(spec, number, gradients.aligned),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # no contraction into FMA: the bits of the native kernel
        )


@functools.cache
def prepare(spec: Spec, device: torch.device, aligned: bool) -> None:
    """Compiles the kernels of all passes, by launches over one block whose only row is skipped."""
    streams = block_of_nothing(spec, device)
    row_of_block, rows = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 2, dtype=torch.int64)
    tables = Tables(
        Gradients(row_of_block, rows, aligned),
        torch.zeros(1, len(spec.scalars)),
        noise=torch.zeros(1, 4, dtype=torch.int32) if spec.needs_noise else None,
        products=torch.zeros(1, PRODUCT_COLUMNS, dtype=torch.int64) if spec.has_product else None,
    )
    for number, part in enumerate(spec.passes):
        measured = len(part.measured)
        totals = torch.zeros(measured, 1, COLUMNS, dtype=torch.int64, device=device) if measured else None
        run(spec, number, streams, tables._replace(totals=totals))
