"""A file of our own in a directory that others use too: created, locked, recognised and removed.

Each optimizer on each rank makes one folder with a random name and one file in it::

    <the user's directory>/shardopt-6f0e.../     0700
                                states           0600; locked (flock) as long as the optimizer lives

The first page of the file names its owner. The file dies with its process at the latest: nothing reads it afterwards.
The next run of the same user in the same directory removes what a killed process left. It removes a folder only if the
folder is ours by name, owner, mode and first page, if nobody holds the lock, and if the process named in the page is
gone. It removes nothing else, so several jobs can share a directory.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import stat
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import OffloadError
from .file_io import PAGE, AlignedFile, TransferBuffer

_log = logging.getLogger("shardopt")
_FILE = "states"
_FOLDER = re.compile(r"shardopt-[0-9a-f]{32}")
_MAGIC = b"shardopt states 1\n"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnedFile:
    """A file for this optimizer alone. It is removed when it is closed, collected, or the interpreter ends."""

    def __init__(self, root: Path):
        """Makes folder and file under ``root``, and removes what dead runs left there.

        Raises:
            OffloadError: ``root`` is not a directory that only this user and root can change, or nothing can be made
                there.
        """
        held = _open_root(root)
        try:
            _reclaim(held)
            self.path = root / f"shardopt-{secrets.token_hex(16)}"
            folder = _make_folder(held, self.path)
        except BaseException:
            os.close(held)
            raise
        self._pid = os.getpid()
        remove = partial(_remove, held, folder, self.path.name, self._pid)
        try:
            self.file = AlignedFile.create(folder, _FILE, str(self.path / _FILE))
        except BaseException:
            remove(None)
            raise
        self.close = weakref.finalize(self, remove, self.file)
        try:
            # Some file systems have no locks; the process number then shows whether the owner lives.
            with suppress(OSError):
                fcntl.flock(self.file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_header()
        except BaseException:
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which shares the file and the transfer buffers with its parent."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raises OffloadError in a forked child."""
        if not self.is_ours:
            raise OffloadError(
                "use the optimizer in the process that made it, or construct one in the child; offload('cpu') before "
                f"the fork gives the child a copy of the states. Process {os.getpid()} is a fork of {self._pid}, which "
                f"owns {self.path}: both would write to one file. Nothing was read or written."
            )

    def _write_header(self) -> None:
        page = TransferBuffer.allocate(PAGE)
        owner = {"token": self.path.name, "pid": os.getpid(), "start": _start_of(os.getpid()), "boot": _boot()}
        text = _MAGIC + json.dumps(owner).encode()
        page.memory[: len(text)] = text
        self.file.write(page.memory, 0)


def _open_root(root: Path) -> int:
    """Opens the directory and checks the descriptor: the name may point elsewhere later."""
    try:
        with suppress(FileExistsError):  # the user, or another rank, made it
            root.mkdir(mode=0o700)
            _log.warning(
                "check that this is the right disk, which states will fill: offload=%r was not there and was made, on "
                "the disk of %r. Is it a typing error, or a disk that is not mounted?",
                str(root),
                str(root.parent),
            )
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise OffloadError(
            "give offload= a directory that exists, on a disk with room for two copies of the states: "
            f"offload={str(root)!r} is not a directory that can be used: {error.strerror}."
        ) from error
    status = os.fstat(held)
    is_safe = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or not is_safe:
        os.close(held)
        raise OffloadError(
            "give offload= a directory of your own, or one with the sticky bit, as /tmp: other users can rename and "
            f"replace what lies in this directory (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}), and "
            f"states reveal training data: offload={str(root)!r}."
        )
    return held


def _make_folder(held: int, path: Path) -> int:
    """Makes a folder and opens it."""
    try:
        os.mkdir(path.name, 0o700, dir_fd=held)
        return os.open(path.name, _FOLDER_FLAGS, dir_fd=held)
    except OSError as error:
        raise OffloadError(
            "give offload= a directory that this user may write to, and look at the number of open files (ulimit -n): "
            f"no folder for states can be made in {path.parent}: {error.strerror}."
        ) from error


def _remove(held: int, folder: int, name: str, pid: int, file: AlignedFile | None) -> None:
    """Removes file and folder, unless they were replaced, and closes them. A forked child only closes them.

    Args:
        held: open descriptor of the user's directory, whose name may be moved meanwhile.
        folder: open descriptor of our folder in it.
        name: of our folder.
        pid: of the process that made the folder.
    """
    if os.getpid() == pid:
        if file is not None and _is_same(folder, _FILE, file.fd):
            with suppress(OSError):
                os.unlink(_FILE, dir_fd=folder)
        if _is_same(held, name, folder):
            with suppress(OSError):  # not empty: somebody else put a file into it
                os.rmdir(name, dir_fd=held)
    if file is not None:
        file.close()
    os.close(folder)
    os.close(held)


def _is_same(folder: int, name: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False


# -- what dead runs left ----------------------------------------------------------------------------------------------


def _reclaim(held: int) -> None:
    for name in os.listdir(held):
        if _FOLDER.fullmatch(name):
            with suppress(OSError):  # another run reclaims it at the same time, or it is not ours to open
                folder = os.open(name, _FOLDER_FLAGS, dir_fd=held)
                try:
                    _reclaim_folder(held, folder, name)
                finally:
                    os.close(folder)


def _reclaim_folder(held: int, folder: int, name: str) -> None:
    if not _is_private(os.fstat(folder)):
        return
    fd = os.open(_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or not _is_private(status):
            return
        owner = _owner(os.pread(fd, PAGE, 0))
        # The owner held the lock when it wrote this page. A file that is still being made has no such page: locking it
        # here would make its owner's own lock fail.
        if owner.get("token") != name or _is_alive(owner):
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if the owner, or a child of it, lives
        os.unlink(_FILE, dir_fd=folder)
        os.rmdir(name, dir_fd=held)
    finally:
        os.close(fd)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _owner(page: bytes) -> dict[str, Any]:
    """Reads the first page; empty if the page is not ours."""
    if not page.startswith(_MAGIC):
        return {}
    try:
        owner = json.loads(page[len(_MAGIC) :].rstrip(b"\0"))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_alive(owner: dict[str, Any]) -> bool:
    """True if the process named in the page runs; needed on file systems without locks.

    Boot and start time distinguish the process from a later one with the same number.
    """
    pid = owner.get("pid")
    return isinstance(pid, int) and owner.get("boot") == _boot() and owner.get("start") == _start_of(pid) is not None


def _boot() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _start_of(pid: int) -> str | None:
    """Returns when the process started, in ticks since boot; None if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None
