"""The stages and formats by the words that users give, and in which dtypes a model of fp32 params runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Stage = Literal[0, 1, 2, 3]
Master = Literal["fp32", "split", "split24", "none"]
StateFormat = Literal["fp32", "bf16", "int8"]  # from exact to coarse
GradientFormat = Literal["fp32", "bf16"]
ClipBy = Literal["own", "previous"]
Traffic = Literal["int8", "int4"]  # of gradients that travel between ranks
ParamTraffic = Literal["int8"]


@dataclass(frozen=True)
class Precision:
    """The mixed precision of a module that was handed over with fp32 params, as FSDP2's policy says it.

    Attributes:
        compute_dtype: of the params that the model sees in forward and backward; masters have their fp32 values.
        cast_inputs: True if floating inputs of the module are cast to ``compute_dtype``.
        output_dtype: to which floating outputs of the module are cast; None: they stay what they are.
        keep_fp32: patterns of names of modules and params that stay fp32, and run in it.
        cast_buffers: patterns of names of modules and buffers whose floating buffers are cast to ``compute_dtype``.
    """

    compute_dtype: torch.dtype
    cast_inputs: bool
    output_dtype: torch.dtype | None
    keep_fp32: Sequence[str]
    cast_buffers: Sequence[str]
