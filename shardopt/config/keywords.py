"""The options as keywords, for type checkers and editors."""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .formats import ClipBy, GradientFormat, ParamTraffic, StateFormat, Traffic
from .offload import Offload
from .tuning import Tuning


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`Options` as a typed dict: type checkers cannot read ``**options`` from a dataclass.

    ``scripts/options.py`` writes the text that an editor shows of a keyword.
    """

    module: nn.Module | None
    """The plain or DDP module, whose gradients shardopt then reduces; implied when the first argument is a module."""
    stage: Literal[0, 1, 2, 3]
    """What is sharded: 0 nothing, 1 masters and states, 2 gradients too, 3 params too; from 2 on it takes the module.
    """
    process_group: dist.ProcessGroup | DeviceMesh | None
    """The ranks that share the states; None: DDP's group, the default group, or no communication. A 2D ``DeviceMesh``
    (replicate, shard): hybrid sharding.
    """
    norm_group: dist.ProcessGroup | DeviceMesh | None
    """All ranks that train one model, where other ranks hold other params (stages of a pipeline): the norm and skipped
    steps are theirs together.
    """
    master: Literal["fp32", "split", "split24", "none"]
    """The masters of bf16 params (fp32 ones have none, whatever it says): ``"fp32"``; ``"split"``: the half that the
    param lacks, exact in 2 bytes; ``"split24"``: 8 bits of it; ``"none"``: stochastic rounding.
    """
    state_format: StateFormat | Mapping[str, StateFormat]
    """Of states: ``"fp32"``, ``"bf16"``, ``"int8"`` in blocks of 256, or one for each by name."""
    gradient_format: GradientFormat
    """Of the sums of gradients of bf16 params, where the module is handed over: ``"fp32"``, or ``"bf16"``, rounded once
    a backward.
    """
    ema: float | None
    """Decay of a moving average of the weights, kept on the shards; ``unsharded(ema=True)`` shows it."""
    max_grad_norm: float | None
    """Clipping to a global 2-norm, fused into the step; its bits do not depend on the number of ranks."""
    clip_by: ClipBy
    """The norm that ``max_grad_norm`` clips by: ``"own"``, that of the gradients of the step, or ``"previous"``, that
    of the step before, which ``release_gradients`` needs.
    """
    release_gradients: bool
    """Update each bucket in the last backward of a step, as soon as it is reduced, and keep no gradient; takes the
    module.
    """
    reduce_dtype: torch.dtype | Traffic | None
    """In which gradients travel; they are summed in fp32 (by NCCL: in this dtype). ``"int8"``, ``"int4"``: in blocks of
    256, decoded and summed in fp32 on every connection.
    """
    gather_dtype: ParamTraffic | None
    """In which params travel, from stage 1 on: ``"int8"`` in blocks of 256, or None: their own."""
    error_feedback: bool | None
    """Add what quantizing gradients took from them to those of the next backward: 2 bytes a param on every rank; None:
    at stages 0 to 2, where ``reduce_dtype`` quantizes.
    """
    compute_dtype: torch.dtype | None
    """Forward and backward of a module with fp32 params run in it; masters keep the fp32 values."""
    cast_inputs: bool
    """With ``compute_dtype``: cast the module's floating inputs to it."""
    output_dtype: torch.dtype | None
    """With ``compute_dtype``: cast the module's floating outputs to it; None: they stay what they are."""
    keep_fp32: Sequence[str]
    """With ``compute_dtype``: patterns of names of modules and params that stay fp32, and run in it."""
    cast_buffers: Sequence[str]
    """With ``compute_dtype``: patterns of names of modules and buffers whose floating buffers are cast to it."""
    offload: str | os.PathLike[str] | Offload | None
    """Where masters and states are kept between steps: ``"cpu"``, a directory (a path, not a bare name), or
    ``Offload(...)``.
    """
    tuning: Tuning | None
    """Bucket size, timeout, what to do about Inf and NaN."""
