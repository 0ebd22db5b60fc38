"""Assembles what a rank holds of a param out of the blocks that a checkpoint keeps, which may be cut otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .block import Block, Frame, common
from .elements import READ_BYTES, contiguous_strides
from .reader import chunks_of, needed_chunks
from .records import Key

if TYPE_CHECKING:
    from .block import Span
    from .reader import Checkpoint, Chunk
    from .records import Manifest


class Source(NamedTuple):
    """A tensor of the checkpoint that holds one block of a param."""

    key: Key
    frame: Frame


def sources_of(manifest: Manifest, section: str, name: str, kind: str, only: Block | None = None) -> list[Source]:
    """Returns the tensors that make up one kind ("param", a state, ...) of a param.

    Args:
        only: the block that a single tensor is taken for; None: what the manifest says.
    """
    found = []
    for each, block in manifest.blocks[name].items():
        key = Key(section, each, kind)
        if key in manifest.tensors:
            found.append(Source(key, Frame.of(only or block, manifest.tensors[key].strides)))
    return found


class Assembly:
    """Elements of one kind of a param, in the order of a frame: that of a rank that loads, or of a file to export."""

    def __init__(self, manifest: Manifest, sources: Sequence[Source], frame: Frame):
        self._manifest, self._sources, self._frame = manifest, sources, frame
        self.dtype = manifest.tensors[sources[0].key].values_dtype

    def windows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields ranges that are assembled at a time.

        A window reads few chunks where the blocks' elements lie in the frame's order; where they do not, it may need
        all chunks, and they are read once, for all elements.
        """
        alike = all(source.frame.order == self._frame.order for source in self._sources if source.frame.numel > 1)
        step = READ_BYTES // self.dtype.itemsize if alike else max(stop - start, 1)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def chunks(self, start: int, stop: int) -> Iterator[Chunk]:
        """Yields the chunks that elements ``[start, stop)`` are read from, those of scales and halves among them."""
        for source, chunk, _ in self._overlaps(start, stop):
            yield from needed_chunks(self._manifest, source.key, chunk.start, chunk.stop)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Returns the values of elements ``[start, stop)``, 1D on the host, in new memory."""
        flat = torch.empty(stop - start, dtype=self.dtype)
        for source, chunk, shared in self._overlaps(start, stop):
            values = checkpoint.values(chunk)
            for span in shared:
                self._frame.view(flat, start, span).copy_(source.frame.view(values, chunk.start, span))
        return flat

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Source, Chunk, list[Span]]]:
        """Yields each chunk that holds some of the elements, with the boxes of these."""
        wanted = self._frame.spans(start, stop)
        for source in self._sources:
            frame, tensor = source.frame, self._manifest.tensors[source.key]
            shared = list(common(frame.spans(0, frame.numel), wanted))
            if not shared:
                continue
            first = min(frame.number(low) for low, _ in shared)
            last = max(frame.number([each - 1 for each in high]) for _, high in shared)
            for chunk in chunks_of(source.key, tensor, first, last + 1):
                here = list(common(frame.spans(chunk.start, chunk.stop), shared))
                if here:
                    yield source, chunk, here


def whole_of(manifest: Manifest, name: str, kind: str) -> Assembly:
    """Returns one kind of a whole param, its elements in contiguous order."""
    sources = sources_of(manifest, "params", name, kind)
    shape = manifest.kinds[name][kind].shape
    return Assembly(manifest, sources, Frame.of(Block.whole(shape), contiguous_strides(shape)))
