"""Parts as torch's distributed checkpoint (``torch.distributed.checkpoint``) sees them: boxes of a tensor.

It knows of slices along dimensions, and a part is a range of elements: that is up to ``2 d - 1`` boxes of a tensor of
``d`` dimensions, each a view of the part's own memory, so that what is loaded lands where the part lies. A function
here takes a tensor of the whole's shape and strides, and the part of its elements that begin at ``start``.

Loaded with the first part that is asked: importing shardopt does not import torch's checkpoints.
"""

from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import StateError
from .boxes import boxes
from .strides import dense_strides


class _View(NamedTuple):
    offsets: torch.Size
    values: torch.Tensor  # the box, a view of the part's local elements


def _views(whole: torch.Tensor, local: torch.Tensor, start: int) -> list[_View]:
    strides = dense_strides(whole)
    # Elements are numbered along storage: the dimension of the largest stride first.
    order = sorted(range(whole.dim()), key=lambda dim: (-strides[dim], -whole.shape[dim], dim))
    shape = tuple(whole.shape[dim] for dim in order)
    back = [order.index(dim) for dim in range(whole.dim())]
    found = []
    for box in boxes(shape, start, start + local.numel()):
        first = box.start - start
        values = local[first : first + box.numel].view(box.sizes).permute(back)
        found.append(_View(torch.Size([box.offsets[dim] for dim in back]), values))
    if whole.numel() == 0:  # every rank says that there is such a tensor
        found.append(_View(torch.Size([0] * whole.dim()), local.new_empty(whole.shape)))
    return found


def write_items(whole: torch.Tensor, local: torch.Tensor, start: int, name: str) -> list[WriteItem]:
    """What this rank writes of it."""
    return [
        WriteItem(
            MetadataIndex(name, view.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(view.offsets, view.values.size()),
                TensorProperties(dtype=local.dtype),
                whole.size(),
            ),
        )
        for view in _views(whole, local, start)
    ]


def chunk_list(whole: torch.Tensor, local: torch.Tensor, start: int) -> list[ChunkStorageMetadata]:
    """What this rank wants to read of it."""
    return [ChunkStorageMetadata(view.offsets, view.values.size()) for view in _views(whole, local, start)]


def shard_at(whole: torch.Tensor, local: torch.Tensor, start: int, index: MetadataIndex) -> torch.Tensor:
    """The box at an offset."""
    for view in _views(whole, local, start):
        if view.offsets == index.offset:
            return view.values
    raise StateError(
        f"{index.fqn}: a checkpoint asks for a slice at {index.offset}, this rank holds none that begins there. Take "
        "state_dict() again, on every rank, before saving or loading."
    )
