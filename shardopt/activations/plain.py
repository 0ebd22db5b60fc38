"""The plain tensor of this rank inside a tensor that autograd saves, and the spec of a DTensor around it."""

import sys
from typing import Any

import torch

from ..domain.dtensors import Spec, is_dtensor


def is_param(tensor: torch.Tensor) -> bool:
    """True for a param, another leaf that gets a gradient, or a view of one: it lives on, saved or not."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def plain_of(tensor: Any) -> tuple[torch.Tensor | None, Spec | None]:
    """Returns the plain tensor inside this one (None: it is not bytes with strides), and the spec of a DTensor."""
    spec: Spec | None = None
    if is_dtensor(tensor):
        spec, tensor = tensor._spec, tensor._local_tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None, spec
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None, spec
    return tensor, spec
