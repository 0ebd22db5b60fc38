"""A file that is read and written past the page cache, and buffers for that.

Data that a step reads once and writes once gains nothing from a cache: it would evict the model's own pages, and cost
one more copy. Where the file system refuses ``O_DIRECT``, the same calls go through the cache.

Every count is checked. A call that was interrupted, or that moved less than asked, is continued. Any other
failure is an OffloadError that names the operation and the place.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import OffloadError
from ...huge_pages import map_huge_pages
from . import system

PAGE = 4096  # bytes; direct transfers need offsets, lengths and addresses that are multiples of it, on every disk
# The most calls in a row that may move less than a page, or be interrupted by a signal, before the transfer fails.
_PATIENCE = 100
SystemCall = Callable[[int, memoryview, int], int]  # fd, buffer, offset; bytes moved
# Errors of file systems that cannot transfer directly.
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class TransferBuffer:
    """Whole pages of memory for direct transfers, in the types that their users need."""

    def __init__(self, octets: NDArray[np.uint8]):
        self.bytes = octets
        self.memory = octets.data
        self.words = octets.view(np.uint64)

    @staticmethod
    def allocate(nbytes: int) -> "TransferBuffer":
        """Returns a new buffer, in huge pages where possible."""
        nbytes = padded(nbytes)
        # Shared: after a fork, a private page would be copied at the next write, and a direct transfer that is under
        # way could end in the page of the child (open(2), on O_DIRECT).
        mapping, start = map_huge_pages(nbytes, mmap.MAP_SHARED)
        return TransferBuffer(np.frombuffer(mapping, np.uint8, nbytes, start))  # keeps the mapping alive

    def split(self, nbytes: Sequence[int]) -> "list[TransferBuffer]":
        """Splits the buffer into consecutive parts of these sizes, each a whole number of pages."""
        ends = np.cumsum(nbytes)
        return [TransferBuffer(self.bytes[end - size : end]) for size, end in zip(nbytes, ends, strict=True)]

    def items(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Returns the first ``count`` items of this dtype, 1D."""
        return torch.from_numpy(self.bytes).view(dtype)[:count]


class AlignedFile:
    """An open file. Several threads may read and write it at the same time."""

    def __init__(self, fd: int, name: str, is_direct: bool):
        self.fd, self.name, self.is_direct = fd, name, is_direct

    @staticmethod
    def create(folder: int, file: str, name: str) -> "AlignedFile":
        """Creates a file in an open folder, readable by this user alone.

        Args:
            name: for messages.

        Raises:
            OffloadError: the name is taken (by a link perhaps), or no file can be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        direct = getattr(os, "O_DIRECT", 0)
        try:
            try:
                return AlignedFile(system.open(file, flags | direct, 0o600, folder), name, bool(direct))
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            # Some file systems create the file and then refuse the flag: open it, then.
            try:
                fd = system.open(file, flags, 0o600, folder)
            except FileExistsError:
                fd = system.open(file, flags & ~(os.O_CREAT | os.O_EXCL), 0o600, folder)
            return AlignedFile(fd, name, is_direct=False)
        except OSError as error:
            raise _failed(f"creating {name}", error) from error

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fills the buffer from ``offset`` on.

        Raises:
            OffloadError: the system reported an error, or the file ends too early.
        """
        self._transfer("reading", system.read, buffer, offset)

    def write(self, buffer: memoryview, offset: int) -> None:
        self._transfer("writing", system.write, buffer, offset)

    def _transfer(self, verb: str, call: SystemCall, buffer: memoryview, offset: int) -> None:
        done = idle = 0
        while done < len(buffer):
            where = f"{verb} {len(buffer)} bytes at {offset} of {self.name}"
            try:
                count = call(self.fd, buffer[done:], offset + done)
            except InterruptedError:
                count = -1
            except OSError as error:
                if self.is_direct and error.errno in _NO_DIRECT:
                    self._go_through_cache()
                    continue
                raise _failed(where, error) from error
            if count == 0:
                raise OffloadError(
                    "load a checkpoint (load_state_dict) and keep others out of the directory: somebody cut the file "
                    f"off. {where}: it ends after {done} bytes."
                )
            # A direct transfer can only continue at a whole page.
            done = len(buffer) if done + count == len(buffer) else done + max(count, 0) // PAGE * PAGE
            idle = 0 if count >= PAGE else idle + 1
            if idle > _PATIENCE:
                raise OffloadError(
                    f"retry the step. {where}: {idle} calls in a row were interrupted or moved less than a page."
                )

    def _go_through_cache(self) -> None:
        self.is_direct = False
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))

    def reserve(self, offset: int, length: int) -> None:
        """Reserves disk space for this range; on failure the file keeps its length."""
        try:
            while True:
                try:
                    return system.reserve(self.fd, offset, length)
                except InterruptedError:
                    continue
        except OSError as error:
            self.truncate(offset)
            raise _failed(f"reserving {length} bytes for {self.name}", error) from error

    def truncate(self, length: int) -> None:
        """Frees the end of the file. A failure is ignored: the space is freed with the file."""
        with suppress(OSError):
            system.truncate(self.fd, length)

    def sync(self) -> None:
        """Waits until writes through the page cache are on the disk, so that their errors are known."""
        if self.is_direct:
            return
        try:
            system.sync(self.fd)
        except OSError as error:
            raise _failed(f"writing {self.name} out of the page cache", error) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _failed(what: str, error: OSError) -> OffloadError:
    advice = {
        errno.ENOSPC: "Make room on the disk, which is full, or give another directory.",
        errno.EDQUOT: "Make room, or give another directory: the quota on this disk is used up.",
        errno.EFBIG: "Give another directory: the file may not become so large (RLIMIT_FSIZE, the file system).",
        errno.EACCES: "Give another directory: this user may not write there.",
        errno.EIO: "See the system's log before you use the disk again: it reports a fault.",
    }
    say = advice.get(error.errno or 0, "Fix the cause and retry the step, or give another directory.")
    return OffloadError(f"{what}: {error.strerror or error}. {say}")
