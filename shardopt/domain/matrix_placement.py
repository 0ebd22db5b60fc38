"""How the matrices of a DTensor are placed: the ranks of a tensor mesh hold slices of one, along one dimension.

::

    Shard(0)    a a a      Shard(1)    a a b      three rows, or three columns, on ranks a and b
                a a a                  a a b
                b b b                  a a b

Slices are as ``torch.chunk`` makes them, so each rank knows those of all others. A stack of matrices that is cut along
its first dimension is a stack of fewer matrices on each rank: these are whole.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import ShardoptError
from ..tensors.strides import dense_strides
from .dtensors import chunk_of, is_dtensor


class MatrixPlacement(NamedTuple):
    """How a matrix, or a stack of them, is cut over the ranks of a tensor mesh."""

    group: dist.ProcessGroup  # the tensor mates: the ranks that hold the other slices
    dim: int
    sizes: tuple[int, ...]  # of that dimension, by rank of the group
    shape: tuple[int, ...]  # of what the mates hold together
    strides: tuple[int, ...]

    def numel(self, rank: int) -> int:
        """Returns the number of elements that a rank of the group holds."""
        return math.prod(self.shape) // self.shape[self.dim] * self.sizes[rank]


def matrix_placement_of(param: Any, is_stack: bool) -> MatrixPlacement | None:
    """Returns the placement of a param; None if every rank of its mesh holds whole matrices.

    Args:
        param: as the model has it.
        is_stack: True if its first dimension counts matrices.

    Raises:
        ShardoptError: slices cannot be put together along one dimension.
    """
    if not is_dtensor(param):
        return None
    mesh, shape, local = param.device_mesh, list(param.shape), list(param._local_tensor.shape)
    kind = torch.distributed.tensor.Shard
    spread = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(param.placements)
        if mesh.size(mesh_dim) > 1 and not placement.is_replicate()
    ]
    across = [each for each in spread if not (is_stack and type(each[1]) is kind and each[1].dim % len(shape) == 0)]
    if not across:
        return None
    if len(across) > 1 or type(across[0][1]) is not kind:
        raise ShardoptError(
            "redistribute() DTensors to Shard(...) on one dimension of their mesh and Replicate() on all others, or "
            f"give them another rule: one of shape {tuple(shape)} is placed {tuple(param.placements)} on a mesh of "
            f"{tuple(mesh.shape)}, and slices of matrices are put together along one dimension. Each slice would be "
            "updated as if it were a matrix of its own."
        )
    ((mesh_dim, placement),) = across
    dim, count = placement.dim % len(shape), mesh.size(mesh_dim)
    if is_stack:
        shape[0] = local[0]
    sizes = tuple(chunk_of(shape[dim], count, rank)[1] for rank in range(count))
    expected = [*shape[:dim], sizes[mesh.get_local_rank(mesh_dim)], *shape[dim + 1 :]]
    if local != expected:
        raise ShardoptError(
            "make DTensors by distribute_tensor(), or cut them as torch.chunk does: this rank holds a tensor of shape "
            f"{tuple(local)}, and {tuple(param.placements)} of {tuple(shape)} would be {tuple(expected)} here. It "
            "cannot be told which rows or columns of a matrix these are."
        )
    strides = dense_strides(torch.empty_strided(shape, param.stride(), device="meta"))
    return MatrixPlacement(mesh.get_group(mesh_dim), dim, sizes, tuple(shape), strides)
