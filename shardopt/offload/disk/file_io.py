"""A file that is read and written past the page cache, and memory that this can be done with.

What is read once a step and written once a step has no use for a cache: it would push the model's own pages out, and
be copied once more. Where the file system cannot do without (``O_DIRECT`` refused), the same calls go through it.

Every count is checked. A call that was interrupted, or came back early, goes on where it stood; what cannot go on is an
OffloadError that says what failed and where.
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

PAGE = 4096  # bytes: offsets, lengths and addresses are multiples of it, as direct transfers need on every disk
_HUGE_PAGE = 2 << 20
# Calls in a row that bring nothing: a signal each, or fewer bytes than a page.
_PATIENCE = 100
Transfer = Callable[[int, memoryview, int], int]  # fd, buffer, offset; bytes moved
# What file systems answer that cannot transfer directly.
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class System:
    """The calls of the operating system that a file of ours depends on; tests put failing ones in their place."""

    def open(self, name: str, flags: int, mode: int, folder: int) -> int:
        return os.open(name, flags, mode, dir_fd=folder)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwritev(fd, [buffer], offset)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


SYSTEM = System()


def padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Buffer:
    """Memory for direct transfers: whole pages, huge ones where there can be, so that few have to be pinned."""

    def __init__(self, nbytes: int):
        self.nbytes = padded(nbytes)
        self._pages = mmap.mmap(-1, self.nbytes + _HUGE_PAGE)
        start = -torch.frombuffer(self._pages, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
        whole = self.nbytes // _HUGE_PAGE * _HUGE_PAGE
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
        self.bytes = np.frombuffer(self._pages, np.uint8, self.nbytes, start)  # keeps the mapping

    def parts(self, nbytes: Sequence[int]) -> "list[Part]":
        """Consecutive parts of these sizes, each a whole number of pages."""
        ends = np.cumsum(nbytes)
        return [Part(self.bytes[end - size : end]) for size, end in zip(nbytes, ends, strict=True)]


class Part:
    """Some pages of a buffer, seen as what they are used as."""

    def __init__(self, octets: NDArray[np.uint8]):
        self.bytes = octets
        self.memory = octets.data
        self.words = octets.view(np.uint64)

    def items(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The first ``count`` of this dtype, 1D."""
        return torch.from_numpy(self.bytes).view(dtype)[:count]


class AlignedFile:
    """An open file; several threads may read and write it at a time."""

    def __init__(self, fd: int, name: str, is_direct: bool):
        self.fd, self.name, self.is_direct = fd, name, is_direct

    @staticmethod
    def create(folder: int, file: str, name: str) -> "AlignedFile":
        """A new file in an open folder, readable by this user alone. ``name`` for messages.

        Raises:
            OffloadError: there is a file of this name, a link perhaps, or none can be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        direct = getattr(os, "O_DIRECT", 0)
        try:
            try:
                return AlignedFile(SYSTEM.open(file, flags | direct, 0o600, folder), name, bool(direct))
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            # Some file systems make the file before they refuse.
            try:
                fd = SYSTEM.open(file, flags, 0o600, folder)
            except FileExistsError:
                fd = SYSTEM.open(file, flags & ~(os.O_CREAT | os.O_EXCL), 0o600, folder)
            return AlignedFile(fd, name, is_direct=False)
        except OSError as error:
            raise _failed(f"creating {name}", error) from error

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fills the buffer with what lies at ``offset``.

        Raises:
            OffloadError: the system reported an error, or the file ends before.
        """
        self._transfer("reading", SYSTEM.read, buffer, offset)

    def write(self, buffer: memoryview, offset: int) -> None:
        self._transfer("writing", SYSTEM.write, buffer, offset)

    def _transfer(self, verb: str, call: Transfer, buffer: memoryview, offset: int) -> None:
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
                    f"{where}: it ends after {done} bytes, so somebody cut it off. What it held of the states is lost: "
                    "load a checkpoint (load_state_dict), and keep others out of the directory."
                )
            # Direct transfers go on at a whole page only.
            done = len(buffer) if done + count == len(buffer) else done + max(count, 0) // PAGE * PAGE
            idle = 0 if count >= PAGE else idle + 1
            if idle > _PATIENCE:
                raise OffloadError(
                    f"{where}: {idle} calls in a row were interrupted or brought less than a page. Try the step again."
                )

    def _go_through_cache(self) -> None:
        self.is_direct = False
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))

    def reserve(self, offset: int, length: int) -> None:
        """Makes sure that the disk has room for this range; on failure the file is as long as before."""
        try:
            while True:
                try:
                    return SYSTEM.reserve(self.fd, offset, length)
                except InterruptedError:
                    continue
        except OSError as error:
            self.truncate(offset)
            raise _failed(f"reserving {length} bytes for {self.name}", error) from error

    def truncate(self, length: int) -> None:
        """Gives back what lies behind; left as it is where that fails: it goes with the file."""
        with suppress(OSError):
            SYSTEM.truncate(self.fd, length)

    def sync(self) -> None:
        """Until what went through the page cache is on the disk, so that its errors are known."""
        if self.is_direct:
            return
        try:
            SYSTEM.sync(self.fd)
        except OSError as error:
            raise _failed(f"writing {self.name} out of the page cache", error) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _failed(what: str, error: OSError) -> OffloadError:
    advice = {
        errno.ENOSPC: "The disk is full: make room on it, or give another directory.",
        errno.EDQUOT: "The quota on this disk is used up: make room, or give another directory.",
        errno.EFBIG: "The file may not become so large (RLIMIT_FSIZE, the file system): give another directory.",
        errno.EACCES: "This user may not write there: give another directory.",
        errno.EIO: "The disk reports a fault: see the system's log before trusting it with more.",
    }
    say = advice.get(error.errno or 0, "Mend the cause and take the step again, or give another directory.")
    return OffloadError(f"{what}: {error.strerror or error}. {say}")
