"""Which params a bucket can hold, and what is said of those that it cannot."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..config import Options
from ..errors import BindingError
from ..kernels.formats import format_of
from ..tensors.strides import dense_strides
from .param import Candidate, Group, named_params


def check_bindable(candidates: Sequence[Candidate], groups: Sequence[Group], device: torch.device) -> None:
    """Raises BindingError for params that no bucket on ``device`` can hold. Changes nothing."""
    seen: dict[torch.nn.Parameter, str] = {}
    for name, param, _ in candidates:
        if param in seen:
            raise BindingError(
                f"{seen[param]} and {name} are the same param: it would be updated once here and twice by torch, "
                "and its step count would lie. Remove the duplicate; model.parameters() lists tied params once."
            )
        seen[param] = name
        _check_param(name, param, device)
    _check_apart([(name, param) for name, param, _ in named_params(groups)])


def check_gradient_format(options: Options, candidates: Sequence[Candidate]) -> None:
    """Raises BindingError where sums of gradients cannot be kept as was asked for, or where that says nothing."""
    if options.gradient_format == "fp32" or options.module is None:
        return
    asked = f"gradient_format={options.gradient_format!r} was asked for and"
    for name, param, _ in candidates:
        if param.dtype not in (torch.bfloat16, torch.float32):
            raise BindingError(
                f"{asked} {name} is {param.dtype}: its gradients have bits that bfloat16 has not, and would lose them "
                "in the sum. Use bfloat16 params, or gradient_format='fp32'."
            )
    if all(param.dtype is not torch.bfloat16 for param in options.module.parameters()):
        name, param, _ = candidates[0]
        raise BindingError(
            f"{asked} no param of the module is bfloat16 ({name} is {param.dtype}): sums of gradients of fp32 params "
            "stay in fp32, so it would have no effect. Cast the module to bfloat16, or leave gradient_format away."
        )


def warn_of_master(options: Options, groups: Sequence[Group]) -> None:
    """Warns where ``master=`` says nothing, as a script may that trains in several dtypes."""
    dtypes = {param.dtype for _, param, _ in named_params(groups)}
    if options.master != "fp32" and dtypes == {torch.float32}:
        warnings.warn(
            f"master={options.master!r} was given and all params are float32, which are their own masters: it has no "
            "effect, and saves no memory. Cast the model to bfloat16 before its first step (autocast does not), or "
            "leave master away.",
            stacklevel=2,
        )


def _check_param(name: str, param: torch.nn.Parameter, device: torch.device) -> None:
    if param.is_meta:
        raise BindingError(f"{name} is on the meta device: it has no values to train. Materialise the model first.")
    values: Any = param.data
    if is_traceable_wrapper_subclass(values):
        raise BindingError(
            f"{name} is a {type(values).__name__}, whose values lie in other tensors: a bucket cannot hold it. "
            "Give it to a torch.optim optimizer of its own."
        )
    if param.layout is not torch.strided:
        raise BindingError(f"{name} has layout {param.layout}: it has no flat storage. Use a dense param.")
    if param.device != device:
        raise BindingError(
            f"{name} is on {param.device}, other params are on {device}: one step is one launch on one device. Move "
            "the model to one device, or give each device's params an optimizer of their own."
        )
    if values.device.type == "cpu" and values.is_shared():
        raise BindingError(
            f"{name} lies in memory shared with other processes (share_memory()): they would stop seeing updates, "
            "which go to the bucket that the param moves into. Use a torch.optim optimizer for Hogwild training."
        )
    format_of(param.dtype, name)
    dense_strides(param)


def _check_apart(params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises BindingError if two params share memory."""
    memory = []
    for name, param in params:
        has_values = param.layout is torch.strided and not param.is_meta and param.untyped_storage().nbytes()
        if param.numel() and has_values:
            span = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
            memory.append((param.data_ptr(), param.data_ptr() + span * param.element_size(), name, id(param)))
    memory.sort()
    for (_, end, name, one), (start, _, other, another) in pairwise(memory):
        if start < end and one != another:
            raise BindingError(
                f"{name} and {other} share memory but are two params: bound apart they would drift apart. Tie them by "
                "using one nn.Parameter object for both."
            )
