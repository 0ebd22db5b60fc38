"""Parts as torch's distributed checkpoint (``torch.distributed.checkpoint``) sees them: boxes of a tensor.

The checkpoint knows only slices along dimensions, and a part is a range of elements. That is up to ``2 d - 1`` boxes of
a tensor of ``d`` dimensions. Each box is a view of the part's own memory, so loading writes straight into the part. The
functions take a tensor with the shape and strides of the whole, and the part's elements, which begin at ``start``.

``Part`` imports this module on demand: importing shardopt does not import torch's checkpoints.
"""

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import StateError
from .boxes import boxes
from .strides import dense_strides


def _views(whole: torch.Tensor, local: torch.Tensor, start: int) -> list[tuple[torch.Size, torch.Tensor]]:
    """Returns the offsets of each box and its values, a view of the part's local elements."""
    strides = dense_strides(whole)
    # Elements are numbered in storage order: the dimension of the largest stride comes first.
    order = sorted(range(whole.dim()), key=lambda dim: (-strides[dim], -whole.shape[dim], dim))
    shape = tuple(whole.shape[dim] for dim in order)
    back = [order.index(dim) for dim in range(whole.dim())]
    found = []
    for box in boxes(shape, start, start + local.numel()):
        first = box.start - start
        values = local[first : first + box.numel].view(box.sizes).permute(back)
        found.append((torch.Size([box.offsets[dim] for dim in back]), values))
    if whole.numel() == 0:  # an empty tensor has no boxes, but must be in the checkpoint
        found.append((torch.Size([0] * whole.dim()), local.new_empty(whole.shape)))
    return found


def write_items(whole: torch.Tensor, local: torch.Tensor, start: int, name: str) -> list[WriteItem]:
    """Returns what this rank writes of the tensor."""
    return [
        WriteItem(
            MetadataIndex(name, offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, values.size()),
                TensorProperties(dtype=local.dtype),
                whole.size(),
            ),
        )
        for offsets, values in _views(whole, local, start)
    ]


def chunk_list(whole: torch.Tensor, local: torch.Tensor, start: int) -> list[ChunkStorageMetadata]:
    """Returns what this rank reads of the tensor."""
    return [ChunkStorageMetadata(offsets, values.size()) for offsets, values in _views(whole, local, start)]


def shard_at(whole: torch.Tensor, local: torch.Tensor, start: int, index: MetadataIndex) -> torch.Tensor:
    """Returns the box at an offset."""
    for offsets, values in _views(whole, local, start):
        if offsets == index.offset:
            return values
    raise StateError(
        "take state_dict() again, on every rank, before saving or loading: a checkpoint asks for a slice of "
        f"{index.fqn} at {index.offset}, and this rank holds none that begins there."
    )
