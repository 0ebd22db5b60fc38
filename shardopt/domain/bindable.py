"""Checks which params a bucket can hold; the errors say why it cannot hold others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import BindingError, warn
from ..kernels.formats import format_of
from ..tensors.gradient import GradientPart
from ..tensors.strides import dense_strides
from .members import plain_tensors
from .param import named_params

if TYPE_CHECKING:
    from ..config import Options
    from .param import Candidate, Group


def check_bindable(candidates: Sequence[Candidate], groups: Sequence[Group], device: torch.device) -> None:
    """Raises BindingError for params that no bucket on ``device`` can hold. Changes nothing."""
    seen: dict[torch.nn.Parameter, str] = {}
    for name, param, _ in candidates:
        if param in seen:
            raise BindingError(
                f"remove the duplicate: {seen[param]} and {name} are the same param: it would be updated once here and "
                "twice by torch, and its step count would be wrong. model.parameters() lists tied params once."
            )
        seen[param] = name
        _check_param(name, param, device)
    _check_apart([(name, param) for name, param, _ in named_params(groups)])


def check_free_of_parts(candidates: Sequence[Candidate]) -> None:
    """Raises BindingError if another optimizer takes the gradient of a candidate, where no module was handed over."""
    for name, param, _ in candidates:
        if isinstance(param.grad, GradientPart):
            raise BindingError(
                "give a param to one optimizer, or close() the other one first: another optimizer took the module over "
                f"and already takes the gradient of {name}, of which this one would see a slice. Both would train it."
            )


def check_gradient_format(options: Options, candidates: Sequence[Candidate]) -> None:
    """Raises BindingError if sums of gradients cannot have the ``gradient_format``, or it has no effect."""
    if options.gradient_format == "fp32" or options.module is None or options.compute_dtype is torch.bfloat16:
        return
    asked = f"gradient_format={options.gradient_format!r} was given and"
    for name, param, _ in candidates:
        if param.dtype not in (torch.bfloat16, torch.float32):
            raise BindingError(
                f"use bfloat16 params, or gradient_format='fp32': {asked} {name} is {param.dtype}. "
                "In a sum, its gradients have bits that bfloat16 does not have, and would lose them."
            )
    if all(param.dtype is not torch.bfloat16 for param in options.module.parameters()):
        name, param, _ = candidates[0]
        raise BindingError(
            f"cast the module to bfloat16, or omit gradient_format: {asked} no param of the module is bfloat16 ({name} "
            f"is {param.dtype}). There, sums of gradients of fp32 params stay in fp32, so it would have no effect."
        )


def warn_of_master(options: Options, groups: Sequence[Group]) -> None:
    """Warns if ``master=`` has no effect. A script that trains in several dtypes may always give it."""
    dtypes = {param.dtype for _, param, _ in named_params(groups)}
    if options.master != "fp32" and dtypes == {torch.float32}:
        warn(
            "cast the model to bfloat16 before its first step (autocast does not), or omit master: "
            f"master={options.master!r} was given and all params are float32, which are their own masters. It has no "
            "effect, and saves no memory."
        )


def _check_param(name: str, param: torch.nn.Parameter, device: torch.device) -> None:
    if param.is_meta:
        raise BindingError(f"materialise the model first: {name} is on the meta device, and has no values to train.")
    values: Any = param.data
    if is_traceable_wrapper_subclass(values):
        raise BindingError(
            f"give {name} to a torch.optim optimizer of its own: it is a {type(values).__name__}, whose values lie in "
            "other tensors, so a bucket cannot hold it."
        )
    if param.layout is not torch.strided:
        raise BindingError(f"use a dense param: {name} has layout {param.layout}, and no flat storage.")
    if param.device != device:
        raise BindingError(
            f"move the model to one device, or give each device's params an optimizer of their own: {name} is on "
            f"{param.device}, other params are on {device}, and one step is one launch on one device."
        )
    if values.device.type == "cpu" and values.is_shared():
        raise BindingError(
            f"use a torch.optim optimizer for Hogwild training: {name} lies in memory shared with other processes "
            "(share_memory()), which would not see updates any more: these go to the param's bucket."
        )
    format_of(param.dtype, name)
    dense_strides(param)


def _check_apart(params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises BindingError if two params share memory."""
    memory = []
    # Of wrappers (a quantized, frozen base) the tensors inside: all wrappers are at address 0.
    for name, param, tensor in ((*each, tensor) for each in params for tensor in plain_tensors(each[1])):
        has_values = tensor.layout is torch.strided and not tensor.is_meta and tensor.untyped_storage().nbytes()
        if tensor.numel() and has_values:
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            memory.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size(), name, id(param)))
    memory.sort()
    for (_, end, name, one), (start, _, other, another) in pairwise(memory):
        if start < end and one != another:
            raise BindingError(
                f"use one nn.Parameter object for both {name} and {other}: they share memory but are two params, "
                "and would differ once they lie in buckets."
            )
