"""Block sums in Triton; ``reductions.py`` defines them."""

from typing import Any

import torch
import triton
import triton.language as tl

from .formats import Format
from .reductions import COLUMNS, LARGEST, LIMB_BITS, NONFINITE, BlockSums, Totals
from .tables import BLOCK, Factors, Gradients
from .triton_step import BLOCKS_PER_PROGRAM, GRAD_TYPES, NUM_WARPS, on
from .triton_words import widen


@triton.jit
def load_gradients(
    row_of_block_ptr,
    rows_ptr,
    num_blocks,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Returns this program's blocks [BLOCKS], which of them exist, and their gradients [BLOCKS, BLOCK] or zeros."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    row = tl.load(row_of_block_ptr + blocks, mask=inside, other=0).to(tl.int64)
    grad_at = tl.load(rows_ptr + row * 2)
    end = tl.load(rows_ptr + row * 2 + 1)
    start = blocks * BLOCK
    active = (inside & (start < end))[:, None]
    offsets = start[:, None] + tl.arange(0, BLOCK)[None, :]
    grad_ptrs = grad_at.to(tl.pointer_type(GRAD_TYPE))[:, None] + offsets
    if ALIGNED:
        grad_ptrs = tl.max_contiguous(tl.multiple_of(grad_ptrs, (1, 16)), (1, BLOCK))
    partial = active & (start + BLOCK > end)[:, None]
    if tl.sum(partial.to(tl.int32)) == 0:
        grad = tl.load(grad_ptrs, mask=active, other=0)
    else:
        grad = tl.load(grad_ptrs, mask=active & (offsets < end[:, None]), other=0)
    return blocks, inside, grad


@triton.jit(do_not_specialize=["num_blocks", "divisor", "unscale"])
def block_sums_kernel(
    row_of_block_ptr,  # [num_blocks] int32
    rows_ptr,  # [num_rows, 2] int64
    mantissa_ptr,  # [num_blocks] int64
    exponent_ptr,  # [num_blocks] int32, as the next two
    largest_ptr,
    nonfinite_ptr,
    num_blocks,
    divisor,  # fp32, as the next
    unscale,
    GRAD: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    blocks, inside, grad = load_gradients(
        row_of_block_ptr, rows_ptr, num_blocks, GRAD_TYPE=GRAD_TYPE, ALIGNED=ALIGNED, BLOCK=BLOCK, BLOCKS=BLOCKS
    )
    bits = (tl.div_rn(widen(grad, GRAD), divisor) * unscale).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    bits = tl.where(finite, bits, 0)
    # Maxima and integer sums: the same in whatever order the hardware takes them.
    top = tl.max(bits, axis=1)
    grid = tl.maximum(top >> 23, 1)
    # 2**(153 - grid), in two factors because it can pass fp32's range; both products are exact.
    raised = 153 - grid
    first_factor = ((tl.minimum(raised, 127) + 127) << 23).to(tl.float32, bitcast=True)
    second_factor = ((tl.maximum(raised - 127, 0) + 127) << 23).to(tl.float32, bitcast=True)
    magnitude = bits.to(tl.float32, bitcast=True)
    q = (magnitude * first_factor[:, None] * second_factor[:, None]).to(tl.int32).to(tl.int64)  # truncates
    tl.store(mantissa_ptr + blocks, tl.sum(q * q, axis=1), mask=inside)
    tl.store(exponent_ptr + blocks, grid, mask=inside)
    tl.store(largest_ptr + blocks, top, mask=inside)
    tl.store(nonfinite_ptr + blocks, tl.sum(tl.where(finite, 0, 1), axis=1), mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def count_nonfinite_kernel(
    row_of_block_ptr,  # [num_blocks] int32
    rows_ptr,  # [num_rows, 2] int64
    counts_ptr,  # [num_blocks] int32
    num_blocks,
    GRAD: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    blocks, inside, grad = load_gradients(
        row_of_block_ptr, rows_ptr, num_blocks, GRAD_TYPE=GRAD_TYPE, ALIGNED=ALIGNED, BLOCK=BLOCK, BLOCKS=BLOCKS
    )
    bits = widen(grad, GRAD).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(counts_ptr + blocks, tl.sum(tl.where(bits < 0x7F800000, 0, 1), axis=1), mask=inside)


def block_sums(grad: Format, gradients: Gradients, factors: Factors) -> BlockSums:
    kinds = (torch.int64, torch.int32, torch.int32, torch.int32)
    columns = [torch.zeros_like(gradients.row_of_block, dtype=kind) for kind in kinds]
    # Floats: Triton would compile the kernel again for an int.
    numbers = (float(factors.divisor), float(factors.unscale))
    _launch(block_sums_kernel, grad, gradients, *columns, gradients.num_blocks, *numbers)
    return BlockSums(*columns)


def totals(sums: BlockSums, gradients: Gradients) -> Totals:
    """Adds up the blocks by torch's operations: integer sums and maxima, so that their order is free."""
    row_at = gradients.row_of_block.long() * COLUMNS
    bit = 2 * sums.exponent.clamp(min=1).long() - 2
    limb, shift = row_at + bit // LIMB_BITS, bit % LIMB_BITS
    low_mask = (1 << LIMB_BITS) - 1
    # S has up to 62 bits; shifted by up to 31 it spans three limbs. Its halves are shifted apart to stay in int64.
    low = (sums.mantissa & low_mask) << shift
    high = (sums.mantissa >> LIMB_BITS) << shift
    table = torch.zeros(gradients.num_rows, COLUMNS, dtype=torch.int64, device=bit.device)
    flat = table.view(-1)
    for at, part in (
        (limb, low & low_mask),
        (limb + 1, (low >> LIMB_BITS) + (high & low_mask)),
        (limb + 2, high >> LIMB_BITS),
        (row_at + NONFINITE, sums.nonfinite.long()),
    ):
        flat.index_add_(0, at, part)
    flat.scatter_reduce_(0, row_at + LARGEST, sums.largest.long(), "amax")
    return Totals(table)


def count_nonfinite(grad: Format, gradients: Gradients) -> int:
    counts = torch.zeros_like(gradients.row_of_block)
    _launch(count_nonfinite_kernel, grad, gradients, counts, gradients.num_blocks)
    return int(counts.sum())


def _launch(kernel: Any, grad: Format, gradients: Gradients, *arguments: Any) -> None:
    """Launches once for the whole shard, on the current CUDA stream of its device."""
    if gradients.num_blocks == 0:
        return
    with on(gradients.rows.device):
        kernel[(triton.cdiv(gradients.num_blocks, BLOCKS_PER_PROGRAM),)](
            gradients.row_of_block,
            gradients.rows,
            *arguments,
            GRAD=grad.name,
            GRAD_TYPE=GRAD_TYPES[grad.name],
            ALIGNED=gradients.aligned,
            BLOCK=BLOCK,
            BLOCKS=BLOCKS_PER_PROGRAM,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
