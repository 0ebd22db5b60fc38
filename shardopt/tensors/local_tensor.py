"""The local tensor of a DTensor param: it may become another one, of another dtype."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch


def set_local(param: Any, local: torch.Tensor) -> None:
    """Makes a DTensor param show another local tensor; it has the dtype of that one from then on."""
    if local.dtype is not param._spec.tensor_meta.dtype:
        spec = replace(param._spec, tensor_meta=param._spec.tensor_meta._replace(dtype=local.dtype))
        kind = sys.modules["torch.distributed.tensor"].DTensor
        with torch._C.DisableTorchFunctionSubclass():  # a guard would take it for a read
            # Takes over the outer dtype alone: what is inside of a subclass, torch does not copy.
            param.data = kind(local, spec, requires_grad=False)
        param._spec = spec
    param._local_tensor = local
