"""Parts as torch's distributed checkpoint (``torch.distributed.checkpoint``) sees them: boxes of a tensor.

It knows of slices along dimensions, and a part is a range of elements: that is up to ``2 d - 1`` boxes of a tensor of
``d`` dimensions, each a view of the part's own memory, so that what is loaded lands where the part lies.

Loaded with the first part that is asked: importing shardopt does not import torch's checkpoints.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .boxes import boxes
from .errors import StateError
from .partition.bucket import dense_strides

if TYPE_CHECKING:
    from .part import Part


class _View(NamedTuple):
    offsets: torch.Size
    values: torch.Tensor  # the box, a view of the part's local elements


def _views(part: "Part") -> list[_View]:
    strides = dense_strides(part)
    # Elements are numbered along storage: the dimension of the largest stride first.
    order = sorted(range(part.dim()), key=lambda dim: (-strides[dim], -part.shape[dim], dim))
    shape = tuple(part.shape[dim] for dim in order)
    back = [order.index(dim) for dim in range(part.dim())]
    found = []
    for box in boxes(shape, part.start, part.start + part.local.numel()):
        first = box.start - part.start
        values = part.local[first : first + box.numel].view(box.sizes).permute(back)
        found.append(_View(torch.Size([box.offsets[dim] for dim in back]), values))
    if part.numel() == 0:  # every rank says that there is such a tensor
        found.append(_View(torch.Size([0] * part.dim()), part.local.new_empty(part.shape)))
    return found


def write_items(part: "Part", name: str) -> list[WriteItem]:
    """What this rank writes of it."""
    return [
        WriteItem(
            MetadataIndex(name, view.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(view.offsets, view.values.size()),
                TensorProperties(dtype=part.local.dtype),
                part.size(),
            ),
        )
        for view in _views(part)
    ]


def chunk_list(part: "Part") -> list[ChunkStorageMetadata]:
    """What this rank wants to read of it."""
    return [ChunkStorageMetadata(view.offsets, view.values.size()) for view in _views(part)]


def shard_at(part: "Part", index: MetadataIndex) -> torch.Tensor:
    """The box at an offset."""
    for view in _views(part):
        if view.offsets == index.offset:
            return view.values
    raise StateError(
        f"{index.fqn}: a checkpoint asks for a slice at {index.offset}, this rank holds none that begins there. Take "
        "state_dict() again, on every rank, before saving or loading."
    )
