"""The Triton kernel: one pass over a shard on a GPU, generic over the rule, its states and the formats.

The rule is a compile-time function. Where streams lie, and everything that changes from step to step (scalars, gradient
addresses, which params are skipped) is data, so that nothing is compiled twice.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from .formats import BlockFormat, Format
from .tables import BLOCK, Factors, Gradients, JoinedStreams, Streams, sent_together
from .translate import Arithmetic, function_from_source, triton_function
from .triton_formats import decode, dither, draw, encode, join, load_codes, narrow_up, part_master
from .triton_words import RULE_WORDS, column, load_bf16, narrow, none_of, widen

if TYPE_CHECKING:
    from .spec import StepSpec

# Blocks of 256 that one program updates, and its warps: 8 elements a thread, which is one 128-bit access for 16-bit
# streams and two for fp32. One warp a block: Triton lays out streams of 4 and of 2 bytes differently, and within a warp
# it converts between the two by shuffles. In the machine code for sm_90, AdamW on bf16 takes 64 registers and no shared
# memory. With 4 blocks and 4 warps it takes 80, exchanges all that it stores through shared memory with 5 barriers, and
# spills in some formats; with 4 blocks and 8 warps it takes 47 and does neither, but accesses to 16-bit streams are
# then 64 bits wide.
BLOCKS_PER_PROGRAM = 1
NUM_WARPS = 1

_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
GRAD_TYPES = {"fp32": tl.float32, "bf16": tl.int16, "fp16": tl.float16}


@triton.jit
def stream_at(address_ptr, TYPE: tl.constexpr):
    """Returns where a stream begins, in memory that begins on 16 bytes at every block."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["next_row", "num_blocks", "unscale", "clip"])
def step_kernel(
    streams_ptr,  # [num_rows, NUM_STREAMS] int64: addresses of element 0, see ``addresses``
    next_row,  # NUM_STREAMS; or 0, if one row of addresses is that of all
    row_of_block_ptr,  # [num_blocks] int32
    rows_ptr,  # [num_rows, 2] int64: address of the gradient of element 0 of the shard; end of the param in the shard
    scalars_ptr,  # [num_rows, NUM_SCALARS] fp32
    noise_ptr,  # [num_rows, 4] int32: two keys, what makes an element of the shard one of the param, a phase
    num_blocks,
    unscale,  # fp32: 1 / loss scale; includes 1 / divisor for a power of two
    clip,  # fp32: factor of the global-norm clipping
    RULE: tl.constexpr,  # (param, grad, states, scalars) -> (param, states)
    NUM_SCALARS: tl.constexpr,
    PARAM: tl.constexpr,  # format names
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,  # "" if there is no master
    TYPES: tl.constexpr,  # of the items of each stream: param, master, states
    STATES: tl.constexpr,  # of each state: the name of its format, or "block"
    NUMBERS: tl.constexpr,  # of each state: the numbers of its block format, or ()
    ROUNDINGS: tl.constexpr,  # tuple, of each state
    NEEDS_NOISE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # True if every gradient starts on 16 bytes
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # 64 bits before the first product: shards pass 2**31 elements.
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS
    if BLOCKS > 1:
        blocks += tl.arange(0, BLOCKS)
    inside = None if BLOCKS == 1 else blocks < num_blocks
    nothing: tl.constexpr = None if BLOCKS == 1 else 0
    row = tl.load(row_of_block_ptr + blocks, mask=inside, other=nothing).to(tl.int64)
    grad_at = tl.load(rows_ptr + row * 2)
    end_ptr = rows_ptr + row * 2 + 1
    end = tl.load(end_ptr)
    start = blocks * BLOCK
    # Masks of param and states are constant along a block, which keeps their accesses 128 bits wide. A program of one
    # block has none: it ends here if the block is skipped. A shard is a whole number of blocks; the padding of a
    # param's last block is computed on zeros and never read.
    if BLOCKS == 1:
        if start >= end:
            return
        updated, active = None, None
    else:
        updated = inside & (start < end)
        active = column(updated)
    places = tl.arange(0, BLOCK)[None, :]  # [1, 256] in each block

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
        scalars = scalars + (column(tl.load(scalars_ptr + row * NUM_SCALARS + index)),)  # noqa: RUF005
    if MASTER == "":
        if PARAM == "bf16_random":
            param = load_bf16(param_ptr + start, active, nothing, BLOCK)
        else:
            param = widen(tl.load(column(param_ptr + start) + places, mask=active, other=nothing), PARAM)
    elif MASTER == "fp32":
        param = tl.load(column(master_ptr + start) + places, mask=active, other=nothing)
    else:
        param = load_bf16(param_ptr + start, active, nothing, BLOCK)
        param = join(param, tl.load(column(master_ptr + start) + places, mask=active, other=nothing), MASTER)
    states = ()
    unknown_zero = num_blocks >> 31
    for index in tl.static_range(len(STATES)):
        if STATES[index] == "block":
            codes = load_codes(state_ptrs[index] + start, active, nothing, BLOCK)
            scales = tl.load(scale_ptrs[index] + blocks, mask=updated, other=nothing)
            states = states + (decode(codes, scales, unknown_zero, tl.constexpr(NUMBERS[index])),)  # noqa: RUF005
        else:
            stored = tl.load(column(state_ptrs[index] + start) + places, mask=active, other=nothing)
            states = states + (widen(stored, tl.constexpr(STATES[index])),)  # noqa: RUF005

    grad_ptrs = grad_at.to(tl.pointer_type(GRAD_TYPE)) + start
    # Gradients are not padded: only a program that holds the end of a param pays for masks element by element.
    is_whole = none_of(start + BLOCK > end) if BLOCKS == 1 else none_of(updated & (start + BLOCK > end))
    if is_whole:
        if ALIGNED:
            grad_ptrs = tl.multiple_of(grad_ptrs, 16)
        if ALIGNED and GRAD == "bf16":
            grad = load_bf16(grad_ptrs, active, nothing, BLOCK)
        else:
            grad = widen(tl.load(column(grad_ptrs) + places, mask=active, other=nothing), GRAD)
    else:
        within = column(start) + places < column(end)
        within = within if active is None else active & within
        grad = widen(tl.load(column(grad_ptrs) + places, mask=within, other=0), GRAD)
    grad = grad * unscale * clip

    param, states = RULE(param, grad, states, scalars)

    if NEEDS_NOISE:
        key, other_key = tl.load(noise_ptr + row * 4), tl.load(noise_ptr + row * 4 + 1)
        first, phase = start.to(tl.int32) + tl.load(noise_ptr + row * 4 + 2), tl.load(noise_ptr + row * 4 + 3)
    if MASTER == "split" or MASTER == "split24":
        upper, rest = part_master(param, MASTER)
        tl.store(column(param_ptr + start) + places, upper, mask=active)
        tl.store(column(master_ptr + start) + places, rest, mask=active)
    else:
        if MASTER == "fp32":
            tl.store(column(master_ptr + start) + places, param, mask=active)
        if PARAM == "bf16_random":
            tl.store(
                column(param_ptr + start) + places,
                narrow_up(param, draw(first, places, key, other_key, 1)),
                mask=active,
            )
        else:
            tl.store(column(param_ptr + start) + places, narrow(param, PARAM), mask=active)
    for index in tl.static_range(len(STATES)):
        if ROUNDINGS[index] == "dithered":  # noqa: SIM108
            noise = dither(first, places, phase, 3 + index)
        else:
            noise = 0
        if STATES[index] == "block":
            codes, scales = encode(
                states[index],
                start,
                end_ptr,
                is_whole,
                noise,
                tl.constexpr(NUMBERS[index]),
                tl.constexpr(ROUNDINGS[index]),
            )
            tl.store(column(state_ptrs[index] + start) + places, codes, mask=active)
            tl.store(scale_ptrs[index] + blocks, scales, mask=updated)
        elif STATES[index] == "bf16_dithered":
            tl.store(column(state_ptrs[index] + start) + places, narrow_up(states[index], noise), mask=active)
        else:
            tl.store(
                column(state_ptrs[index] + start) + places,
                narrow(states[index], tl.constexpr(STATES[index])),
                mask=active,
            )


@functools.cache
def rule_function(variant: Arithmetic) -> Any:
    """Returns the rule as a jit function that :func:`step_kernel` calls."""
    return triton.jit(function_from_source(triton_function(variant), "triton", RULE_WORDS))


def constants(spec: StepSpec, aligned: bool) -> dict[str, Any]:
    """Returns the kernel's compile-time arguments."""
    return {
        "RULE": rule_function(spec.variant),
        **stream_constants(spec, aligned),
        "BLOCKS": BLOCKS_PER_PROGRAM,
    }


def stream_constants(spec: StepSpec, aligned: bool) -> dict[str, Any]:
    """Returns what a kernel is told of its streams when it is compiled."""
    return {
        "NUM_SCALARS": len(spec.variant.scalars),
        "PARAM": spec.param.name,
        "GRAD": spec.grad.name,
        "MASTER": spec.master.name if spec.has_master and spec.master is not None else "",
        "TYPES": tuple(_TYPES[each] for each in _storages(spec)),
        # Triton 3.6 takes no tuple of names and numbers out of a tuple, so they are apart. It hands on what it takes
        # out only as tl.constexpr(...). Test: test_compiled.py with that Triton, as .github/workflows/tests.yml has it.
        "STATES": tuple("block" if isinstance(format, BlockFormat) else format.name for format in spec.states),
        "NUMBERS": tuple(_numbers(format) for format in spec.states),
        "ROUNDINGS": tuple(format.rounding for format in spec.states),
        "NEEDS_NOISE": spec.needs_noise,
        "GRAD_TYPE": GRAD_TYPES[spec.grad.name],
        "ALIGNED": aligned,
        "BLOCK": BLOCK,
    }


def _numbers(format: Format) -> tuple[float, ...]:
    if not isinstance(format, BlockFormat):
        return ()
    scaling = (1 / format.largest, format.largest_scale)
    return (format.has_sign, format.shift, format.offset_bits, format.offset, *scaling)


def _storages(spec: StepSpec) -> list[torch.dtype]:
    """The dtypes of param, master and states in memory; that of the param for a master that there is not."""
    master = spec.master if spec.has_master and spec.master is not None else spec.param
    return [each.storage for each in (spec.param, master, *spec.states)]


def addresses(streams: Streams | JoinedStreams) -> torch.Tensor:
    """Returns where kernels find element 0 of each stream: the param, its master, the states, their scales.

    Several shards are taken for one, in which each lies behind the one before. Element 0 of a shard's stream would then
    lie as far before the stream as the elements of the shards before it reach.

    Returns:
        2D int64 in host memory, one row for each row of the other tables; a single one for a single shard. 0 is the
        address of what is not there.
    """
    if isinstance(streams, Streams):
        return torch.tensor([[at for at, _ in _places(streams)]], dtype=torch.int64)
    width = next(len(_places(each)) for each in streams.shards if each is not None)
    found, row, first = np.zeros((sum(streams.num_rows), width), np.int64), 0, 0
    for each, num_blocks, num_rows in zip(streams.shards, streams.num_blocks, streams.num_rows, strict=True):
        if each is not None:
            found[row : row + num_rows] = [at and at - first * nbytes for at, nbytes in _places(each)]
        row, first = row + num_rows, first + num_blocks
    return torch.from_numpy(found)


def _places(streams: Streams) -> list[tuple[int, int]]:
    """The address of each stream, or 0, and its bytes a block."""
    found = [
        (0, 0) if each is None else (each.data_ptr(), BLOCK * each.element_size())
        for each in (streams.param, streams.master, *streams.states)
    ]
    scales = [streams.scale(index) for index in range(len(streams.states))]
    return found + [(0, 0) if each is None else (each.data_ptr(), each.element_size()) for each in scales]


def step(
    spec: StepSpec,
    streams: Streams | JoinedStreams,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None = None,
) -> None:
    """Launches once for all shards, on the current CUDA stream of their device."""
    assert factors.divisor == 1
    num_blocks, device = gradients.num_blocks, gradients.row_of_block.device
    if num_blocks == 0:
        return
    where = addresses(streams)
    host = [where, scalars] if noise is None else [where, scalars, noise]
    is_there = gradients.rows.device == device and device.type != "cpu"  # the device decided which rows are skipped
    with on(device):
        there = sent_together(host if is_there else [*host, gradients.rows], device)
        step_kernel[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
            there[0],
            0 if len(where) == 1 else where.shape[1],
            gradients.row_of_block,
            gradients.rows if is_there else there[-1],
            there[1],
            there[1 if noise is None else 2],
            num_blocks,
            float(factors.unscale),  # Triton would compile the kernel again for an int
            float(factors.clip),
            **constants(spec, gradients.aligned),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # no contraction into FMA: the bits of the native kernel
        )


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which Triton launches on this device: it takes the current one, whatever that of the pointers."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def prepare(spec: StepSpec, device: torch.device, aligned: bool) -> None:
    """Compiles :func:`step_kernel` for ``spec``, by a launch over one block whose only row is skipped."""
    streams, gradients, scalars, noise = block_of_nothing(spec, device, aligned)
    step(spec, streams, gradients, scalars, Factors(), noise)


def block_of_nothing(
    spec: StepSpec, device: torch.device, aligned: bool
) -> tuple[Streams, Gradients, torch.Tensor, torch.Tensor | None]:
    """Returns streams of one block, and the tables of a launch that skips it: gradients, scalars, noise."""

    def block(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(BLOCK, dtype=dtype, device=device)

    master = spec.master if spec.has_master else None
    streams = Streams(
        block(spec.param.dtype),
        None if master is None else block(master.dtype),
        tuple(block(format.dtype) for format in spec.states),
        tuple(block(torch.float32) if isinstance(format, BlockFormat) else None for format in spec.states),
    )
    gradients = Gradients(
        torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 2, dtype=torch.int64), aligned
    )
    scalars = torch.zeros(1, len(spec.variant.scalars))
    noise = torch.zeros(1, 4, dtype=torch.int32) if spec.needs_noise else None
    return streams, gradients, scalars, noise
