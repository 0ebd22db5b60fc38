"""Assembles what a rank holds of a param out of the blocks that a checkpoint keeps, which may be cut otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from .block import Block, Frame, common
from .elements import READ_BYTES, same_order
from .reader import chunks_of, needed_chunks
from .records import Key

if TYPE_CHECKING:
    from .block import Span
    from .reader import Checkpoint, Chunk
    from .records import Manifest


Sources = Mapping[Key, Frame]  # tensors of the checkpoint that hold a block each of a param


def sources_of(manifest: Manifest, section: str, name: str, kind: str, only: Block | None = None) -> Sources:
    """Returns the tensors that make up one kind ("param", a state, ...) of a param.

    Args:
        only: the block that a single tensor is taken for; None: what the manifest says.
    """
    blocks = {Key(section, each, kind): block for each, block in manifest.blocks[name].items()}
    return {
        key: Frame.of(only or block, manifest.tensors[key].strides)
        for key, block in blocks.items()
        if key in manifest.tensors
    }


def source_of(manifest: Manifest, key: Key) -> Sources:
    """Returns a tensor that is whole."""
    tensor = manifest.tensors[key]
    return {key: Frame.of(Block.whole(tensor.shape), tensor.strides)}


class Assembly:
    """Elements of one kind of a param, in the order of a frame: that of a rank that loads, or of a file to export."""

    def __init__(self, manifest: Manifest, sources: Sources, frame: Frame, start: int = 0, stop: int | None = None):
        """
        Args:
            start, stop: the elements that are read.
        """
        self._manifest, self._sources, self._frame = manifest, sources, frame
        self._start, self._stop = start, frame.numel if stop is None else stop
        # A tensor that has the frame's elements in the frame's order: its chunks are taken as they are.
        self._same = next((key for key, each in sources.items() if _are_alike(each, frame)), None)

    def chunks(self) -> Iterator[Chunk]:
        """Yields the chunks that the elements are read from, those of scales and halves among them."""
        if self._same is not None:
            yield from needed_chunks(self._manifest, self._same, self._start, self._stop)
            return
        for start, stop in self._windows():
            for chunk, _ in self._overlaps(start, stop):
                yield from needed_chunks(self._manifest, chunk.key, chunk.start, chunk.stop)

    def values(self, checkpoint: Checkpoint) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the elements in their order: how many came before, and values, 1D on the host, till the next ones."""
        if self._same is not None:
            for chunk in chunks_of(self._same, self._manifest.tensors[self._same], self._start, self._stop):
                first, last = max(chunk.start, self._start), min(chunk.stop, self._stop)
                yield first - self._start, checkpoint.values(chunk)[first - chunk.start : last - chunk.start]
            return
        for start, stop in self._windows():
            yield start - self._start, self._read(checkpoint, start, stop)

    def _windows(self) -> Iterator[tuple[int, int]]:
        """Yields ranges that are assembled at a time.

        A window reads few chunks where the blocks' elements lie in the frame's order; where they do not, it may need
        all chunks, and they are read once, for all elements.
        """
        alike = all(each.order == self._frame.order for each in self._sources.values() if each.numel > 1)
        step = READ_BYTES // self._dtype.itemsize if alike else max(self._stop - self._start, 1)
        for first in range(self._start, self._stop, step):
            yield first, min(first + step, self._stop)

    @property
    def _dtype(self) -> torch.dtype:
        return self._manifest.tensors[next(iter(self._sources))].values_dtype

    def _read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Returns the values of elements ``[start, stop)`` of the frame, 1D on the host, in new memory."""
        flat = torch.empty(stop - start, dtype=self._dtype)
        for chunk, shared in self._overlaps(start, stop):
            values, source = checkpoint.values(chunk), self._sources[chunk.key]
            for span in shared:
                self._frame.view(flat, start, span).copy_(source.view(values, chunk.start, span))
        return flat

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Chunk, list[Span]]]:
        """Yields each chunk that holds some of the elements, with the boxes of these."""
        wanted = self._frame.spans(start, stop)
        for key, frame in self._sources.items():
            shared = list(common(frame.spans(0, frame.numel), wanted))
            if not shared:
                continue
            first = min(frame.number(low) for low, _ in shared)
            last = max(frame.number([each - 1 for each in high]) for _, high in shared)
            for chunk in chunks_of(key, self._manifest.tensors[key], first, last + 1):
                here = list(common(frame.spans(chunk.start, chunk.stop), shared))
                if here:
                    yield chunk, here


def _are_alike(one: Frame, other: Frame) -> bool:
    """True if both number the same elements alike."""
    return one[:2] == other[:2] and same_order(one.sizes, one.strides, other.strides)
