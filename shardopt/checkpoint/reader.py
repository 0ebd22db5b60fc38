"""Reads a published checkpoint a chunk at a time, and verifies each chunk by its checksum."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import CheckpointError
from ..kernels import codecs
from ..kernels.formats import FORMATS, SPLIT, SPLIT24, BlockFormat
from ..kernels.tables import BLOCK
from . import files
from .manifest import MAX_BYTES, from_bytes
from .publish import MANIFEST, published
from .records import CHUNK_BYTES

if TYPE_CHECKING:
    from .records import Manifest, SavedRange, TensorInfo, TensorKey


@dataclass(frozen=True)
class FileChunk:
    """Elements ``[start, stop)`` of a tensor that lie in a file under one checksum."""

    key: TensorKey
    dtype: torch.dtype
    file: str
    start: int
    stop: int
    offset: int
    checksum: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


def file_chunks_of_range(
    key: TensorKey, tensor: TensorInfo, each: SavedRange, start: int, stop: int
) -> Iterator[FileChunk]:
    """Yields the chunks of a range that hold any of the elements ``[start, stop)``."""
    step = CHUNK_BYTES // tensor.dtype.itemsize
    first, last = max(start, each.start) - each.start, min(stop, each.stop) - each.start
    if first >= last:
        return
    for index in range(first // step, -(-last // step)):
        begin = each.start + index * step
        end = min(begin + step, each.stop)
        offset = each.offset + index * CHUNK_BYTES
        yield FileChunk(key, tensor.dtype, each.file, begin, end, offset, each.checksums[index])


def file_chunks(key: TensorKey, tensor: TensorInfo, start: int = 0, stop: int | None = None) -> Iterator[FileChunk]:
    """Yields all chunks that hold any of the elements ``[start, stop)``, in the order of the elements."""
    stop = tensor.numel if stop is None else stop
    for each in sorted(tensor.ranges, key=lambda each: each.start):
        yield from file_chunks_of_range(key, tensor, each, start, stop)


class Checkpoint:
    """The open files of one checkpoint. Not for several threads: all chunks are read into one buffer."""

    def __init__(self, path: Path):
        """
        Raises:
            CheckpointError: the manifest is missing or was changed.
        """
        self.path = path
        data = files.read_file(path / MANIFEST, MAX_BYTES)
        self.digest = hashlib.sha256(data).hexdigest()
        self.manifest = from_bytes(data, str(path / MANIFEST))
        self._open: dict[str, int] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._bytes = memoryview(cast(Any, self._buffer.numpy()))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            files.close(file)
        self._open = {}

    def read(self, chunk: FileChunk) -> torch.Tensor:
        """Returns the chunk's elements, 1D on the host; the next call overwrites them.

        Raises:
            CheckpointError: the elements differ from what was saved.
        """
        buffer = self._bytes[: chunk.nbytes]
        if files.read_into(self._file(chunk.file), buffer, chunk.offset) < chunk.nbytes:
            raise self._damaged(chunk, "the file ends before it")
        if zlib.crc32(buffer) != chunk.checksum:
            raise self._damaged(chunk, "its bytes do not match their checksum")
        return self._buffer[: chunk.nbytes].view(chunk.dtype)

    def values(self, chunk: FileChunk) -> torch.Tensor:
        """Returns the values of the chunk's elements, 1D on the host; the next call may overwrite them."""
        encoding, items = self.manifest.tensors[chunk.key].encoding, self.read(chunk)
        if not encoding:
            return items
        format, items = FORMATS[encoding], items.clone()
        if isinstance(format, BlockFormat):
            blocks = chunk.start // BLOCK, -(-chunk.stop // BLOCK)
            return codecs.decode(items, self.range(chunk.key.scales, *blocks), format)
        if format in (SPLIT, SPLIT24):
            return codecs.join(self.range(_param_of(chunk.key), chunk.start, chunk.stop), items, format)
        return items.float()

    def range(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Returns elements ``[start, stop)`` as they were saved, 1D, in new memory."""
        tensor = self.manifest.tensors[key]
        flat = torch.empty(stop - start, dtype=tensor.dtype)
        for chunk in file_chunks(key, tensor, start, stop):
            first, last = max(chunk.start, start), min(chunk.stop, stop)
            flat[first - start : last - start] = self.read(chunk)[first - chunk.start : last - chunk.start]
        return flat

    def whole(self, key: TensorKey) -> torch.Tensor:
        """Returns the values of a whole tensor, on the host, in new memory."""
        tensor = self.manifest.tensors[key]
        flat = torch.empty(tensor.numel, dtype=tensor.values_dtype)
        for chunk in file_chunks(key, tensor):
            flat[chunk.start : chunk.stop] = self.values(chunk)
        return flat.as_strided(tensor.shape, tensor.strides)

    def check_file(self, name: str) -> None:
        """Raises CheckpointError unless the file has the size and header of the manifest. Reads no element."""
        self._file(name)

    def _file(self, name: str) -> int:
        """Returns the open file, which is checked when it is opened."""
        if name not in self._open:
            file = files.open_file(self.path / name)
            try:
                self._check_header(name, file)
            except BaseException:
                files.close(file)
                raise
            self._open[name] = file
        return self._open[name]

    def _check_header(self, name: str, file: int) -> None:
        expected, nbytes = self.manifest.files[name], files.size(file)
        if nbytes != expected.nbytes:
            raise CheckpointError(
                f"{self._advice()} {self.path / name} has {nbytes} bytes, {expected.nbytes} were written: it was "
                f"truncated or replaced. It should hold {self._content(name)}."
            )
        head = bytearray(expected.header_bytes)
        files.read_into(file, memoryview(head), 0)
        if hashlib.sha256(head).hexdigest() != expected.header_sha256:
            raise CheckpointError(
                f"{self._advice()} The header of {self.path / name} differs from what was written: the file was "
                f"damaged, or belongs to another rank or checkpoint. It should hold {self._content(name)}."
            )

    def _content(self, name: str) -> str:
        held = [
            f"{key} [{each.start}:{each.stop}]"
            for key, tensor in self.manifest.tensors.items()
            for each in tensor.ranges
            if each.file == name
        ]
        return ", ".join(held[:3]) + (f" and {len(held) - 3} more ranges" if len(held) > 3 else "")

    def _damaged(self, chunk: FileChunk, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._advice()} {self.path / chunk.file} is damaged, bytes {chunk.offset} to "
            f"{chunk.offset + chunk.nbytes}, elements [{chunk.start}:{chunk.stop}] of {chunk.key}: {what}."
        )

    def _advice(self) -> str:
        others: list[str] = []
        with suppress(OSError):
            others = [path.name for path in published(self.path.parent) if path.name != self.path.name][-3:]
        return f"Load another checkpoint ({', '.join(others) or 'this directory holds no other one'})."


def needed_chunks(manifest: Manifest, key: TensorKey, start: int, stop: int) -> Iterator[FileChunk]:
    """Yields all chunks that are needed for the values of these elements, with those of their scales or params."""
    tensor = manifest.tensors[key]
    yield from file_chunks(key, tensor, start, stop)
    format = FORMATS.get(tensor.encoding)
    if isinstance(format, BlockFormat):
        yield from file_chunks(key.scales, manifest.tensors[key.scales], start // BLOCK, -(-stop // BLOCK))
    elif format in (SPLIT, SPLIT24):
        yield from file_chunks(_param_of(key), manifest.tensors[_param_of(key)], start, stop)


def _param_of(key: TensorKey) -> TensorKey:
    return key._replace(kind="param")
