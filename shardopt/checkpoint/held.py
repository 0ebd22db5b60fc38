"""Which block of a param this rank holds."""

from __future__ import annotations

from typing import Any

import torch

from ..domain.dtensors import is_dtensor
from ..errors import CheckpointError
from .block import Block


def block_of(param: Any, name: str) -> Block:
    """Returns what this rank holds of a param: a box of a DTensor, all of a plain tensor.

    Raises:
        CheckpointError: it cannot be told which elements a rank holds of a DTensor.
    """
    shape = tuple(param.shape)
    if not is_dtensor(param):
        return Block.whole(shape)
    offsets, sizes = [0] * len(shape), list(shape)
    mesh = param.device_mesh
    for size, coordinate, placement in zip(mesh.shape, mesh.get_coordinate(), param.placements, strict=True):
        if placement.is_replicate():
            continue
        if type(placement) is not torch.distributed.tensor.Shard:
            raise CheckpointError(
                f"redistribute() {name!r} to Shard(...) or Replicate() placements first: it is placed {placement} of "
                f"{tuple(param.placements)}, whose ranks hold elements that do not form a box of the param. Nothing "
                "was saved or loaded."
            )
        dim = placement.dim % len(shape)
        step = -(-sizes[dim] // size)  # as torch.chunk divides
        first = min(coordinate * step, sizes[dim])
        offsets[dim] += first
        sizes[dim] = min(step, sizes[dim] - first)
    local = tuple(param._local_tensor.shape)
    if local != tuple(sizes):
        raise CheckpointError(
            f"make {name!r} by distribute_tensor(), or cut it as torch.chunk does: this rank holds a tensor of shape "
            f"{local}, and {tuple(param.placements)} of {shape} would be {tuple(sizes)} here. It cannot be told which "
            "elements these are. Nothing was saved or loaded."
        )
    return Block(shape, tuple(offsets), tuple(sizes))
