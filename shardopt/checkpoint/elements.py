"""Reads and writes elements of one tensor a chunk at a time, in a plain tensor or in a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..partition.layout import BLOCK
from ..tensors.strides import dense_strides, flattened, in_storage_order
from .records import CHUNK_BYTES

if TYPE_CHECKING:
    from ..domain.shard import Shard
    from ..partition.mesh import Mesh

# Bytes of one read. Offloaded states lie on the disk in chunks with other bounds, and two reads that meet inside of
# such a chunk both read it; so reads are longer than the chunks of a checkpoint.
READ_BYTES = 4 * CHUNK_BYTES


Read = Callable[[int, int], torch.Tensor]  # (start, stop) -> these elements, 1D
Write = Callable[[int, torch.Tensor], object]  # takes 1D elements that belong at (start)


def reader_of(flat: torch.Tensor) -> Read:
    """Reads elements of a 1D tensor."""
    return lambda start, stop: flat[start:stop]


def writer_of(flat: torch.Tensor) -> Write:
    """Writes elements of a 1D tensor."""
    return lambda start, values: flat[start : start + values.numel()].copy_(values)


def shard_reader(shard: Shard, name: str, offset: int) -> Read:
    """Reads values of ``name`` ("param", "master" or a state) in a shard, from element ``offset`` of the shard on."""
    return lambda start, stop: shard.read_chunk(name, offset + start, offset + stop)


def shard_writer(shard: Shard, name: str, offset: int) -> Write:
    """Writes values of ``name`` in a shard, from element ``offset`` of the shard on; they are encoded there."""
    return lambda start, values: shard.write_chunk(name, offset + start, values)


def stream_reader(shard: Shard, stream: str, offset: int, grain: int = 1) -> Read:
    """Reads items of one of a shard's streams in their own format, from element ``offset`` of the shard on.

    Elements are counted in items of the stream: one for each ``grain`` of the shard's.
    """
    return lambda start, stop: shard.home.read(stream, offset + start * grain, offset + stop * grain)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements 1D, in storage order; a view if they fill their memory without gaps."""
    return flattened(in_storage_order(tensor.detach(), strides_of(tensor)))


def has_flat_view(tensor: torch.Tensor) -> bool:
    return same_order(tensor.shape, tensor.stride(), strides_of(tensor))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that number the elements: the tensor's if it is dense, else those of a contiguous copy."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return contiguous_strides(tensor.shape)
    return dense_strides(tensor)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def same_order(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if both strides number the elements in the same order; dimensions of one element do not count."""
    if 0 in shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def host_chunks(read: Read, numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields the elements as chunks on the host, 1D and contiguous, ``CHUNK_BYTES`` each but the last."""
    step = READ_BYTES // dtype.itemsize
    for start in range(0, numel, step):
        for chunk in read(start, min(start + step, numel)).split(CHUNK_BYTES // dtype.itemsize):
            yield chunk.detach().cpu()


def even_part(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Returns start and stop of part ``index`` of ``parts``, which divide the elements evenly into whole blocks."""
    blocks = (numel + BLOCK - 1) // BLOCK
    step = (blocks + parts - 1) // parts * BLOCK
    return min(index * step, numel), min((index + 1) * step, numel)


def own_part(numel: int, mesh: Mesh) -> tuple[int, int]:
    """Returns start and stop of what this rank writes of a slice: each rank that holds a copy writes one part."""
    return even_part(numel, mesh.replicate.size, mesh.replicate.rank)
