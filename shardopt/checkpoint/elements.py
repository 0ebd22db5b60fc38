"""Reads and writes elements of one tensor a chunk at a time, in a plain tensor or in a shard."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..domain.shard import Shard
from ..tensors.strides import dense_strides, flattened, in_storage_order
from .records import CHUNK_BYTES

# Read at a time. Elements that are offloaded to a disk lie in chunks that begin elsewhere, and a read that ends
# inside of a chunk reads that chunk twice; so reads are longer than chunks of a checkpoint.
READ_BYTES = 4 * CHUNK_BYTES


class Elements(Protocol):
    """A row of elements that can be read and written in pieces; chunks are 1D and of the row's dtype."""

    def read(self, start: int, stop: int) -> torch.Tensor: ...

    def write(self, start: int, values: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class Flat:
    """All elements of a 1D tensor."""

    tensor: torch.Tensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def write(self, start: int, values: torch.Tensor) -> None:
        self.tensor[start : start + values.numel()].copy_(values)


@dataclass(frozen=True)
class InShard:
    """Values of ``name`` ("param", "master" or a state) in a shard, from element ``offset`` of the shard on."""

    shard: Shard
    name: str
    offset: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.shard.read_chunk(self.name, self.offset + start, self.offset + stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        self.shard.write_chunk(self.name, self.offset + start, values)


@dataclass(frozen=True)
class RawInShard:
    """Items of one of a shard's streams in their own format, from element ``offset`` of the shard on; only read.

    Elements are counted in items of the stream: one for each ``grain`` of the shard's.
    """

    shard: Shard
    stream: str
    offset: int
    grain: int = 1

    def read(self, start: int, stop: int) -> torch.Tensor:
        first = self.offset + start * self.grain
        return self.shard.home.read(self.stream, first, self.offset + stop * self.grain)

    def write(self, start: int, values: torch.Tensor) -> None:
        raise NotImplementedError("items are written through InShard, which encodes them.")


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements 1D, in storage order; a view wherever they fill their memory without gaps."""
    return flattened(in_storage_order(tensor.detach(), strides_of(tensor)))


def is_dense(tensor: torch.Tensor) -> bool:
    return same_order(tensor.shape, tensor.stride(), strides_of(tensor))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that number its elements: its own if it is dense, else those of a contiguous copy."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return torch.empty(tensor.shape, device="meta").stride()
    return dense_strides(tensor)


def same_order(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if both strides number the elements alike; the stride of a dimension of one element does not count."""
    if 0 in shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def chunks_of(read: Callable[[int, int], torch.Tensor], numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields the elements as chunks on the host, 1D and contiguous, ``CHUNK_BYTES`` each but the last."""
    step = READ_BYTES // dtype.itemsize
    for start in range(0, numel, step):
        for chunk in read(start, min(start + step, numel)).split(CHUNK_BYTES // dtype.itemsize):
            yield chunk.detach().cpu()
