"""The Triton kernel: one pass over a shard on a GPU, generic over the rule, its states and the formats.

The rule is a compile-time function, the states are a tuple of pointers. Everything that changes from step to step
(scalars, gradient addresses, which params are skipped) is data, so that nothing is compiled twice.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from .formats import BlockFormat, Format
from .spec import StepSpec
from .tables import BLOCK, Factors, Gradients, Streams
from .translate import Arithmetic, function_from_source, triton_function
from .triton_formats import decode, dither, draw, encode, join, narrow_up, part_master
from .triton_words import RULE_WORDS, narrow, widen

# Blocks of 256 that one program updates, and its warps: 8 elements a thread, which is one 128-bit access for 16-bit
# streams and two for fp32. One warp a block: Triton lays out streams of 4 and of 2 bytes differently, and within a warp
# it converts between the two by shuffles. In the machine code for sm_90, AdamW on bf16 takes 63 registers and no shared
# memory. With 4 blocks and 4 warps it takes 80, exchanges all that it stores through shared memory with 5 barriers, and
# spills in some formats; with 4 blocks and 8 warps it takes 47 and does neither, but accesses to 16-bit streams are
# then 64 bits wide.
BLOCKS_PER_PROGRAM = 1
NUM_WARPS = 1

GRAD_TYPES = {"fp32": tl.float32, "bf16": tl.int16, "fp16": tl.float16}


@triton.jit(do_not_specialize=["num_blocks", "unscale", "clip"])
def step_kernel(
    param_ptr,  # [num_blocks * 256] PARAM
    master_ptr,  # [num_blocks * 256] MASTER; the param if there is no master
    state_ptrs,  # tuple of [num_blocks * 256], each in its format of STATES
    scale_ptrs,  # tuple of [num_blocks] fp32; the state itself if it has no scales
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
    STATES: tl.constexpr,  # of each state: (format name,), or ("block", the numbers of a block format)
    ROUNDINGS: tl.constexpr,  # tuple, of each state
    NEEDS_NOISE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # True if every gradient starts on 16 bytes
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # 64 bits before the first product: shards pass 2**31 elements.
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    row = tl.load(row_of_block_ptr + blocks, mask=inside, other=0).to(tl.int64)
    grad_at = tl.load(rows_ptr + row * 2)
    end = tl.load(rows_ptr + row * 2 + 1)
    start = blocks * BLOCK
    # The masks of param and states are constant along a block, which keeps their accesses 128 bits wide. A shard is a
    # whole number of blocks; the padding of a param's last block is computed on zeros and never read.
    active = (inside & (start < end))[:, None]
    offsets = start[:, None] + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, 256]

    scalars = ()
    for index in tl.static_range(NUM_SCALARS):
        scalars = scalars + (tl.load(scalars_ptr + row * NUM_SCALARS + index)[:, None],)  # noqa: RUF005
    if MASTER == "":
        param = widen(tl.load(param_ptr + offsets, mask=active, other=0), PARAM)
    elif MASTER == "fp32":
        param = tl.load(master_ptr + offsets, mask=active, other=0.0)
    else:
        upper = tl.load(param_ptr + offsets, mask=active, other=0)
        param = join(upper, tl.load(master_ptr + offsets, mask=active, other=0), MASTER)
    states = ()
    for index in tl.static_range(len(state_ptrs)):
        stored = tl.load(state_ptrs[index] + offsets, mask=active, other=0)
        if STATES[index][0] == "block":
            scales = tl.load(scale_ptrs[index] + blocks, mask=inside, other=0.0)
            states = states + (decode(stored, scales, STATES[index]),)  # noqa: RUF005
        else:
            states = states + (widen(stored, STATES[index][0]),)  # noqa: RUF005

    grad_ptrs = grad_at.to(tl.pointer_type(GRAD_TYPE))[:, None] + offsets
    if ALIGNED:
        grad_ptrs = tl.max_contiguous(tl.multiple_of(grad_ptrs, (1, 16)), (1, BLOCK))
    # Gradients are not padded: only a program that holds the end of a param pays for masks element by element.
    partial = active & (start + BLOCK > end)[:, None]
    if tl.sum(partial.to(tl.int32)) == 0:
        grad = tl.load(grad_ptrs, mask=active, other=0)
    else:
        grad = tl.load(grad_ptrs, mask=active & (offsets < end[:, None]), other=0)
    grad = widen(grad, GRAD) * unscale * clip

    param, states = RULE(param, grad, states, scalars)

    if NEEDS_NOISE:
        key = tl.load(noise_ptr + row * 4)[:, None]
        other_key = tl.load(noise_ptr + row * 4 + 1)[:, None]
        elements = offsets.to(tl.int32) + tl.load(noise_ptr + row * 4 + 2)[:, None]
        phase = tl.load(noise_ptr + row * 4 + 3)[:, None]
    if MASTER == "split" or MASTER == "split24":
        upper, rest = part_master(param, MASTER)
        tl.store(param_ptr + offsets, upper, mask=active)
        tl.store(master_ptr + offsets, rest, mask=active)
    else:
        if MASTER == "fp32":
            tl.store(master_ptr + offsets, param, mask=active)
        if PARAM == "bf16_random":
            tl.store(param_ptr + offsets, narrow_up(param, draw(elements, key, other_key, 1)), mask=active)
        else:
            tl.store(param_ptr + offsets, narrow(param, PARAM), mask=active)
    for index in tl.static_range(len(state_ptrs)):
        if ROUNDINGS[index] == "dithered":
            noise = dither(elements, phase, 3 + index)
        else:
            noise = tl.full((BLOCKS, BLOCK), -(2**31), tl.int32)  # a half of 2**32: to nearest
        if STATES[index][0] == "block":
            codes, scales = encode(states[index], offsets < end[:, None], noise, STATES[index])
            tl.store(state_ptrs[index] + offsets, codes, mask=active)
            tl.store(scale_ptrs[index] + blocks, scales, mask=inside & (start < end))
        elif STATES[index][0] == "bf16_dithered":
            tl.store(state_ptrs[index] + offsets, narrow_up(states[index], noise), mask=active)
        else:
            tl.store(state_ptrs[index] + offsets, narrow(states[index], STATES[index][0]), mask=active)


@functools.cache
def rule_function(variant: Arithmetic) -> Any:
    """Returns the rule as a jit function that :func:`step_kernel` calls."""
    return triton.jit(function_from_source(triton_function(variant), "triton", RULE_WORDS))


def constants(spec: StepSpec, aligned: bool) -> dict[str, Any]:
    """Returns the kernel's compile-time arguments."""
    return {
        "RULE": rule_function(spec.variant),
        "NUM_SCALARS": len(spec.variant.scalars),
        "PARAM": spec.param.name,
        "GRAD": spec.grad.name,
        "MASTER": spec.master.name if spec.has_master and spec.master is not None else "",
        "STATES": tuple(_numbers(format) for format in spec.states),
        "ROUNDINGS": tuple(format.rounding for format in spec.states),
        "NEEDS_NOISE": spec.needs_noise,
        "GRAD_TYPE": GRAD_TYPES[spec.grad.name],
        "ALIGNED": aligned,
        "BLOCK": BLOCK,
        "BLOCKS": BLOCKS_PER_PROGRAM,
    }


def _numbers(format: Format) -> tuple[Any, ...]:
    if not isinstance(format, BlockFormat):
        return (format.name,)
    scaling = (1 / format.largest, format.largest_scale)
    return ("block", format.has_sign, format.shift, format.offset_bits, format.offset, *scaling)


def step(
    spec: StepSpec,
    streams: Streams,
    gradients: Gradients,
    scalars: torch.Tensor,
    factors: Factors,
    noise: torch.Tensor | None = None,
) -> None:
    """Launches once for the whole shard, on the current CUDA stream of its device."""
    assert factors.divisor == 1
    num_blocks = gradients.num_blocks
    if num_blocks == 0:
        return
    with on(streams.param.device):
        step_kernel[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
            streams.param.view(spec.param.storage),
            streams.param.view(spec.param.storage) if streams.master is None else streams.master,
            tuple(state.view(format.storage) for state, format in zip(streams.states, spec.states, strict=True)),
            tuple(state if (scales := streams.scale(i)) is None else scales for i, state in enumerate(streams.states)),
            gradients.row_of_block,
            gradients.rows,
            scalars,
            gradients.row_of_block if noise is None else noise,
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
        torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 2, dtype=torch.int64, device=device), aligned
    )
    scalars = torch.zeros(1, len(spec.variant.scalars), device=device)
    noise = torch.zeros(1, 4, dtype=torch.int32, device=device) if spec.needs_noise else None
    step(spec, streams, gradients, scalars, Factors(), noise)
