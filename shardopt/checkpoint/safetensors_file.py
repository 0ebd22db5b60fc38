"""One rank's file in the safetensors format (:mod:`shardopt.tensors.safetensors_format`).

The header is known before the elements are, so the elements are streamed after it and are never in memory all at once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from ..tensors.safetensors_format import bytes_of
from . import files
from .records import CHUNK_BYTES, FileInfo

# From this size on a thread takes the checksum during the write; on the same thread it would cost a quarter of a fast
# disk's speed.
SMALL = 256 << 10
# After this many bytes the system begins to write pages out, so that the sync at the end is short.
BEGIN_BYTES = 16 << 20


class SafetensorsWriter:
    """Streams one new file, takes the checksum of each chunk, and closes the file."""

    def __init__(self, file: int, head: bytes):
        self._file, self._head = file, head
        self.nbytes = self._begun = 0  # bytes written, and of these the bytes that the system writes out
        self._helper = ThreadPoolExecutor(1, "shardopt-checksum")
        self._write(memoryview(head))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            # If the interpreter ends during a save in the background, the executor refuses new work.
            with suppress(RuntimeError):
                return self._helper.submit(zlib.crc32, data).result
        checksum = zlib.crc32(data)
        return lambda: checksum

    def finish(self) -> FileInfo:
        """Makes the content durable. The name is durable once the directory is synced."""
        files.sync(self._file)
        self.close()
        return FileInfo(self.nbytes, len(self._head), hashlib.sha256(self._head).hexdigest())

    def close(self) -> None:
        self._helper.shutdown()
        if self._file >= 0:
            files.close(self._file)
            self._file = -1
