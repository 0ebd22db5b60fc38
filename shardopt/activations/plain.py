"""What lies behind a tensor that autograd saves: a plain tensor of this rank, and what it is dressed as."""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..domain.dtensors import is_dtensor


@dataclass(frozen=True)
class Placed:
    """The outside of a DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def dressed(self, local: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class Plain(NamedTuple):
    """A tensor of this rank alone."""

    tensor: torch.Tensor
    placed: Placed | None  # None: it is what was saved


def is_param(tensor: torch.Tensor) -> bool:
    """True for a param, another leaf that gets a gradient, or a view of one: it lives on, whoever saves it."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def plain_of(tensor: torch.Tensor) -> Plain | None:
    """Returns the plain tensor behind this one; None for what is not bytes with strides."""
    placed = None
    if is_dtensor(tensor):
        spec: Any = tensor
        placed = Placed(spec.device_mesh, tuple(spec.placements), tensor.shape, tensor.stride())
        tensor = spec._local_tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return Plain(tensor, placed)
