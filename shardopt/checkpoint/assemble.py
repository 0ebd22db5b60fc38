"""Assembles a rank's box of a param from the boxes that a checkpoint holds, which may be cut in another way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from .elements import READ_BYTES, same_order
from .param_box import ParamBox, StridedBox, common
from .reader import file_chunks, needed_chunks
from .records import TensorKey

if TYPE_CHECKING:
    from .param_box import Corners
    from .reader import Checkpoint, FileChunk
    from .records import Manifest


Sources = Mapping[TensorKey, StridedBox]  # saved tensors, each of which holds one box of a param


def sources_of(manifest: Manifest, section: str, name: str, kind: str, only: ParamBox | None = None) -> Sources:
    """Returns the tensors that make up one kind ("param", a state, ...) of a param.

    Args:
        only: the box that the one saved tensor holds; None: the boxes that the manifest lists.
    """
    boxes = {TensorKey(section, each, kind): box for each, box in manifest.boxes[name].items()}
    return {
        key: StridedBox.of(only or box, manifest.tensors[key].strides)
        for key, box in boxes.items()
        if key in manifest.tensors
    }


def source_of(manifest: Manifest, key: TensorKey) -> Sources:
    """Returns a tensor that is whole."""
    tensor = manifest.tensors[key]
    return {key: StridedBox.of(ParamBox.whole(tensor.shape), tensor.strides)}


class Assembly:
    """Elements of one kind of a param, in the order of a strided box: of a rank that loads, or of a file to export."""

    def __init__(
        self, manifest: Manifest, sources: Sources, strided: StridedBox, start: int = 0, stop: int | None = None
    ):
        """
        Args:
            start, stop: the elements that are read.
        """
        self._manifest, self._sources, self._strided = manifest, sources, strided
        self._start, self._stop = start, strided.numel if stop is None else stop
        # A tensor that has the same elements in the same order: its chunks are taken as they are.
        self._same = next((key for key, each in sources.items() if _are_alike(each, strided)), None)

    def chunks(self) -> Iterator[FileChunk]:
        """Yields the chunks that the values of the elements need, with those of scales and params."""
        if self._same is not None:
            yield from needed_chunks(self._manifest, self._same, self._start, self._stop)
            return
        for start, stop in self._windows():
            for chunk, _ in self._overlaps(start, stop):
                yield from needed_chunks(self._manifest, chunk.key, chunk.start, chunk.stop)

    def values(self, checkpoint: Checkpoint) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (elements before, values): values in order, 1D on the host, which the next ones may overwrite."""
        if self._same is not None:
            for chunk in file_chunks(self._same, self._manifest.tensors[self._same], self._start, self._stop):
                first, last = max(chunk.start, self._start), min(chunk.stop, self._stop)
                yield first - self._start, checkpoint.values(chunk)[first - chunk.start : last - chunk.start]
            return
        for start, stop in self._windows():
            yield start - self._start, self._read(checkpoint, start, stop)

    def _windows(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges of elements to assemble one after the other.

        A window reads few chunks where the saved boxes have their elements in the order of this one; where they do not,
        it may need all chunks, and they are read once, for all elements.
        """
        alike = all(each.order == self._strided.order for each in self._sources.values() if each.numel > 1)
        step = READ_BYTES // self._dtype.itemsize if alike else max(self._stop - self._start, 1)
        for first in range(self._start, self._stop, step):
            yield first, min(first + step, self._stop)

    @property
    def _dtype(self) -> torch.dtype:
        return self._manifest.tensors[next(iter(self._sources))].values_dtype

    def _read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Returns the values of elements ``[start, stop)`` of the box, 1D on the host, in new memory."""
        flat = torch.empty(stop - start, dtype=self._dtype)
        for chunk, shared in self._overlaps(start, stop):
            values, source = checkpoint.values(chunk), self._sources[chunk.key]
            for corners in shared:
                self._strided.view(flat, start, corners).copy_(source.view(values, chunk.start, corners))
        return flat

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[FileChunk, list[Corners]]]:
        """Yields each chunk that holds any of the elements, with their boxes."""
        wanted = self._strided.corners(start, stop)
        for key, strided in self._sources.items():
            shared = list(common(strided.corners(0, strided.numel), wanted))
            if not shared:
                continue
            first = min(strided.flat_index(low) for low, _ in shared)
            last = max(strided.flat_index([each - 1 for each in high]) for _, high in shared)
            for chunk in file_chunks(key, self._manifest.tensors[key], first, last + 1):
                here = list(common(strided.corners(chunk.start, chunk.stop), shared))
                if here:
                    yield chunk, here


def _are_alike(one: StridedBox, other: StridedBox) -> bool:
    """True if both have the same elements in the same order."""
    return one[:2] == other[:2] and same_order(one.sizes, one.strides, other.strides)
