"""Quantizes and dequantizes masters and states outside of a step: where values are loaded, saved and shown.

The bits are the same as the kernels', from a handful of torch operations on whole tensors, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .formats import INFINITY_BITS, LARGEST_FP32, NAN_BITS, SCALE_DROPPED_BITS, SMALLEST_SCALE, SPLIT, BlockFormat
from .tables import BLOCK

if TYPE_CHECKING:
    from .formats import Format

# Elements: whole blocks. It is small beside a model, and large beside the cost of an operation.
_PIECE = 1024 * BLOCK


def pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields 1D values as views to be encoded one after the other: temporaries take many times a view's memory."""
    yield from values.split(_PIECE)


def encode(values: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantizes 1D values; the first value of a block format begins a block.

    Everything is rounded to nearest, also where a kernel uses stochastic rounding.

    Returns:
        The items, 1D [numel] of the format's dtype; and the scales of a block format, 1D [blocks] fp32.
    """
    return _encode_blocks(values, format) if isinstance(format, BlockFormat) else (values.to(format.dtype), None)


def decode(items: torch.Tensor, scales: torch.Tensor | None, format: Format) -> torch.Tensor:
    """Dequantizes what :func:`encode` made to 1D [numel] fp32; returns the items themselves where they are fp32."""
    if not isinstance(format, BlockFormat):
        return items.float()
    assert scales is not None
    numel, codes = items.numel(), items.int()
    fractions = ((codes & format.top) << format.shift).add_(format.offset_bits).view(torch.float32) - format.offset
    values = fractions * scales.repeat_interleave(BLOCK)[:numel]
    return torch.where(codes > format.top, -values, values)


def _encode_blocks(values: torch.Tensor, format: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    numel, values = values.numel(), values.float()
    padded = torch.nn.functional.pad(values, (0, -numel % BLOCK))
    magnitudes = magnitude_bits(padded, format).view(-1, BLOCK)
    scales = scales_of(magnitudes.amax(1) if magnitudes.numel() else magnitudes[:, 0], format)
    inverses = 1.0 / scales.clamp(min=SMALLEST_SCALE)  # a tensor divides a tensor: IEEE division on every device
    offset_fractions = magnitudes.view(torch.float32) * inverses[:, None] + format.offset
    half = 1 << (format.shift - 1)
    # The NaN of 0 * Inf has a sign on some machines, which the kernels too shift into the top code.
    bits = offset_fractions.view(torch.int32) & 0x7FFFFFFF
    codes = (bits - format.offset_bits + half) >> format.shift
    codes = codes.clamp(max=format.top).view(-1)[:numel]
    if format.has_sign:
        codes = codes + (values.view(torch.int32) < 0) * (format.top + 1)
    else:
        codes = torch.where((codes == 0) & (magnitudes.view(-1)[:numel] > 0), 1, codes)
    return codes.to(torch.uint8), scales


def magnitude_bits(values: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Returns the bits of the magnitudes, which sort as these do.

    A format without a sign takes negative values for zero, except NaN.
    """
    bits = values.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    return magnitudes if format.has_sign else torch.where((bits < 0) & ~values.isnan(), 0, magnitudes)


def scales_of(largest: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Returns the fp32 scales of blocks, from the bits of their largest magnitudes; NaN and Inf stay as they are."""
    magnitudes = largest.clamp(max=NAN_BITS).view(torch.float32)
    scales = magnitudes * torch.tensor(1.0 / format.largest, device=largest.device)
    half, mask = 1 << (SCALE_DROPPED_BITS - 1), -1 << SCALE_DROPPED_BITS
    rounded = ((scales.view(torch.int32) + half) & mask).view(torch.float32).clamp(SMALLEST_SCALE, format.largest_scale)
    return torch.where(largest == 0, 0.0, torch.where(magnitudes <= LARGEST_FP32, rounded, magnitudes))


# -- masters of bf16 params --------------------------------------------------------------------------------------------


def join(param: torch.Tensor, rest: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the fp32 master of bf16 ``param``, from the low bits that are stored beside the param; all 1D."""
    upper = param.view(torch.int16).int() << 16
    lower = rest.int() if format is SPLIT else rest.int() << 8
    magnitude = upper & 0x7FFFFFFF
    joined = torch.minimum((magnitude + lower).clamp(min=0), magnitude.clamp(min=INFINITY_BITS))
    return (joined | (upper & -0x80000000)).view(torch.float32)


def rounds_to(master: torch.Tensor, param: torch.Tensor, ties: bool) -> torch.Tensor:
    """Returns a mask: True where an fp32 master rounds to its param, as the kernels of a step round; all 1D.

    Zeros of the two signs differ. A NaN rounds to nothing: the param is NaN too, or counts.

    Args:
        ties: True if a tie may also be rounded away from zero, as in ``split``; False: to the even number.
    """
    below = param.view(torch.int16)
    if param.dtype is not torch.bfloat16:
        return (master.to(param.dtype).view(torch.int16) == below) & (master == master)
    distance, odd = master.view(torch.int32) - (below.int() << 16), below.int() & 1
    least = -0x8000 if ties else odd - 0x8000
    return (distance >= least) & (distance <= 0x8000 - odd) & (master == master)


def follow(master: torch.Tensor, param: torch.Tensor, ties: bool) -> torch.Tensor:
    """Returns the fp32 master that the next step takes: where it does not round to the param, the param counts.

    All are 1D. The result is ``master`` itself if it has these bits already.
    """
    both = [*zip(pieces(master), pieces(param), strict=True)]
    if all(_is_kept(own, other, ties) for own, other in both):
        return master
    found = torch.empty_like(master)
    for into, (own, other) in zip(pieces(found), both, strict=True):
        torch.where(rounds_to(own, other, ties), own, other.float(), out=into)
    return found


def _is_kept(master: torch.Tensor, param: torch.Tensor, ties: bool) -> bool:
    fits = rounds_to(master, param, ties)
    return bool(fits.all()) or bool((fits | (master.isnan() & param.isnan())).all())


def low_bits_of(master: torch.Tensor, param: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the low bits to store beside bf16 ``param``, so that :func:`join` gives ``master`` again; all 1D.

    They are zero where the master does not round to the param: the param counts. For a tie that was rounded to even
    they are the nearest that the format can hold.
    """
    bits, dropped = master.view(torch.int32).long(), 0 if format is SPLIT else 8
    if dropped:
        bits = (bits + 0x80) >> dropped  # arithmetic: the sign bit is the same on both sides
    limit = 0x8000 >> dropped
    rest = bits - ((param.view(torch.int16).long() << 16) >> dropped)
    rest = torch.where(rest == limit, limit - 1, rest)
    fits = (rest >= -limit) & (rest < limit) & ~master.isnan()
    return torch.where(fits, rest, 0).to(format.dtype)
