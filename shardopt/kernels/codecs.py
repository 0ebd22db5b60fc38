"""Formats of masters and states, encoded and decoded outside of a step: where values are loaded, saved and shown.

The same bits as the kernels', in a handful of torch operations on whole tensors, on whatever device they lie.
"""

from typing import NamedTuple

import torch

from .formats import (
    LARGEST_FP32,
    NAN_BITS,
    SCALE_DROPPED_BITS,
    SMALLEST_SCALE,
    SPLIT,
    BlockFormat,
    Format,
)
from .tables import BLOCK


class Encoded(NamedTuple):
    """What is kept of 1D values."""

    items: torch.Tensor  # 1D [numel], of the format's dtype
    scales: torch.Tensor | None = None  # 1D [blocks] fp32, of a block format


def encode(values: torch.Tensor, format: Format) -> Encoded:
    """1D fp32 values in ``format``; those of a block format begin on a block.

    Where a kernel rounds by chance, this rounds to nearest.
    """
    return _encode_blocks(values, format) if isinstance(format, BlockFormat) else Encoded(values.to(format.dtype))


def decode(kept: Encoded, format: Format) -> torch.Tensor:
    """1D [numel] fp32; the items themselves where they are that."""
    if not isinstance(format, BlockFormat):
        return kept.items.float()
    assert kept.scales is not None
    numel, codes = kept.items.numel(), kept.items.int()
    fractions = ((codes & format.top) << format.shift).add_(format.offset_bits).view(torch.float32) - format.offset
    values = fractions * kept.scales.repeat_interleave(BLOCK)[:numel]
    return torch.where(codes > format.top, -values, values)


def _encode_blocks(values: torch.Tensor, format: BlockFormat) -> Encoded:
    numel = values.numel()
    padded = torch.nn.functional.pad(values.float(), (0, -numel % BLOCK))
    magnitudes = magnitude_bits(padded, format).view(-1, BLOCK)
    scales = scales_of(magnitudes.amax(1) if magnitudes.numel() else magnitudes[:, 0], format)
    inverses = 1.0 / scales.clamp(min=SMALLEST_SCALE)  # IEEE: of two tensors' elements, on every device
    offset_fractions = magnitudes.view(torch.float32) * inverses[:, None] + format.offset
    half = 1 << (format.shift - 1)
    # The NaN of 0 * Inf has a sign on some machines, which the kernels shift into the top code as well.
    bits = offset_fractions.view(torch.int32) & 0x7FFFFFFF
    codes = (bits - format.offset_bits + half) >> format.shift
    codes = codes.clamp(max=format.top).view(-1)[:numel]
    if format.has_sign:
        codes = codes + (values.view(torch.int32) < 0) * (format.top + 1)
    else:
        codes = torch.where((codes == 0) & (magnitudes.view(-1)[:numel] > 0), 1, codes)
    return Encoded(codes.to(torch.uint8), scales)


def magnitude_bits(values: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Bits of the magnitudes, which order as these do; zero of what is negative and should not be, but for NaN."""
    bits = values.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    return magnitudes if format.has_sign else torch.where((bits < 0) & ~values.isnan(), 0, magnitudes)


def scales_of(largest: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """fp32 scales of blocks, from the bits of their largest magnitudes; NaN and Inf stay what they are."""
    magnitudes = largest.clamp(max=NAN_BITS).view(torch.float32)
    scales = magnitudes * torch.tensor(1.0 / format.largest, device=largest.device)
    half, kept = 1 << (SCALE_DROPPED_BITS - 1), -1 << SCALE_DROPPED_BITS
    rounded = ((scales.view(torch.int32) + half) & kept).view(torch.float32).clamp(SMALLEST_SCALE, format.largest_scale)
    return torch.where(largest == 0, 0.0, torch.where(magnitudes <= LARGEST_FP32, rounded, magnitudes))


# -- masters of bf16 params --------------------------------------------------------------------------------------------


def join(param: torch.Tensor, rest: torch.Tensor, format: Format) -> torch.Tensor:
    """The fp32 master of bf16 ``param`` and what is kept beside it. All 1D."""
    upper = param.view(torch.int16).int() << 16
    lower = rest.int() if format is SPLIT else rest.int() << 8
    return (upper + lower).view(torch.float32)


def rounds_to_even(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Whether each param is its fp32 master as a step with fp32 masters rounds it; all 1D."""
    return master.to(param.dtype) == param


def rounds_to(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Whether each fp32 master is that of its param; all 1D. Ties were rounded to even, or as ``split`` does."""
    to_even = rounds_to_even(master, param)
    if param.dtype is not torch.bfloat16:
        return to_even
    return to_even | ((master.view(torch.int32) + 0x8000 >> 16).short() == param.view(torch.int16))


def rest_of(master: torch.Tensor, param: torch.Tensor, format: Format) -> torch.Tensor:
    """What is to be kept beside bf16 ``param`` so that ``master`` comes back; all 1D.

    Where the param is not the master rounded, the param counts, and nothing is kept. Of a tie that was rounded to even
    the nearest that can be kept.
    """
    bits, dropped = master.view(torch.int32).long(), 0 if format is SPLIT else 8
    if dropped:
        bits = (bits + 0x80) >> dropped  # arithmetic: the sign bit is the same on both sides
    limit = 0x8000 >> dropped
    rest = bits - ((param.view(torch.int16).long() << 16) >> dropped)
    rest = torch.where(rest == limit, limit - 1, rest)
    fits = (rest >= -limit) & (rest < limit) & ~master.isnan()
    return torch.where(fits, rest, 0).to(format.dtype)
