"""How a value lies in memory: one format a stream of a kernel (param, gradient, master, each state).

A kernel widens a stream to fp32 when it loads it and narrows it when it stores it; rules never learn of it. bf16 is
moved as its bits (``int16``) and rounded by integer arithmetic: Triton's interpreter truncates where a GPU rounds.
"""

from dataclasses import dataclass

import torch

from ..errors import BindingError


@dataclass(frozen=True)
class Format:
    """An elementwise number format."""

    name: str  # as it is spelled in both kernels
    dtype: torch.dtype  # of the tensor that the user sees
    storage: torch.dtype  # what a kernel loads and stores
    itemsize: int  # bytes an element


FP32 = Format("fp32", torch.float32, torch.float32, 4)
BF16 = Format("bf16", torch.bfloat16, torch.int16, 2)
FP16 = Format("fp16", torch.float16, torch.float16, 2)

_BY_DTYPE = {format.dtype: format for format in (FP32, BF16, FP16)}


def format_of(dtype: torch.dtype, what: str) -> Format:
    """The format of a tensor's dtype; ``what`` names the tensor in the error."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise BindingError(
            f"{what} is {str(dtype).removeprefix('torch.')}; updates are computed in fp32 for float32, bfloat16 and "
            "float16 tensors, so that precision or the imaginary part would be lost silently: cast it, or give it to "
            "a torch.optim optimizer of its own."
        ) from None
