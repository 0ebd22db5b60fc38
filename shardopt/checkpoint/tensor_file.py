"""One rank's file in the safetensors format: 8 bytes of length, a JSON header, then the tensors' bytes without gaps.

The header is known before the first element is. So elements are streamed after it, and never lie in memory at once.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import torch

from . import files
from .records import CHUNK_BYTES, NAME_OF_DTYPE, File

# From this size on a thread takes the checksum during the write: in line it costs a quarter of a fast disk's speed.
SMALL = 256 << 10
# After so many bytes the disk is told to begin writing, so that little is left to do at the sync.
BEGIN_BYTES = 16 << 20


def header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes before the first element, for (name, dtype, shape) of the tensors in the order of the file."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        described[name] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * ((8 - len(text)) % 16)  # so that a mapped file is aligned for every dtype
    return len(text).to_bytes(8, "little") + text


def bytes_of(values: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous 1D tensor on the host, without a copy."""
    return memoryview(cast(Any, values.view(torch.uint8).numpy()))


class Writer:
    """Streams one new file, which it closes, and takes the checksum of each chunk."""

    def __init__(self, file: int, head: bytes):
        self._file, self._head = file, head
        self.nbytes = self._begun = 0  # written, and handed to the disk
        self._helper = ThreadPoolExecutor(1, "shardopt-checksum")
        self._write(memoryview(head))

    def _write(self, data: memoryview) -> None:
        files.write(self._file, data)
        self.nbytes += data.nbytes
        if self.nbytes - self._begun >= BEGIN_BYTES:
            files.forget_pages(self._file, self._begun, self.nbytes - self._begun)
            self._begun = self.nbytes

    def add(self, chunks: Iterable[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        """Appends one range, given as chunks (1D, on the host, ``CHUNK_BYTES`` each but the last).

        Returns:
            The offset of its first byte, and the checksum of each chunk.
        """
        offset, sums = self.nbytes, []
        for chunk in chunks:
            data = bytes_of(chunk)
            assert data.nbytes <= CHUNK_BYTES
            checksum = self._begin_checksum(data)
            self._write(data)
            sums.append(checksum())
        return offset, tuple(sums)

    def _begin_checksum(self, data: memoryview) -> Callable[[], int]:
        if data.nbytes >= SMALL:
            # The interpreter may end during a save in the background; an executor then takes no new work.
            with suppress(RuntimeError):
                return self._helper.submit(zlib.crc32, data).result
        checksum = zlib.crc32(data)
        return lambda: checksum

    def finish(self) -> File:
        """Makes the content durable; the name is durable once the directory is synced."""
        files.sync(self._file)
        self.close()
        return File(self.nbytes, len(self._head), hashlib.sha256(self._head).hexdigest())

    def close(self) -> None:
        self._helper.shutdown()
        if self._file >= 0:
            files.close(self._file)
            self._file = -1
