"""A file of our own in a directory that others use too: made, held, recognised and removed.

Each optimizer on each rank makes one folder with a random name and one file in it::

    <the user's directory>/shardopt-6f0e.../     0700
                                states           0600; locked (flock) as long as the optimizer lives

The first page of the file says whose it is. It dies with its process at the latest: nothing reads it afterwards. What a
killed process left behind is removed by the next run of the same user in the same directory: if it is ours by name,
owner, mode and first page, if nobody holds its lock, and if the process that it names is gone. Nothing else is ever
removed, so that several jobs can share a directory.
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
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import OffloadError
from .file_io import PAGE, AlignedFile, Buffer

_log = logging.getLogger("shardopt")
_FILE = "states"
_FOLDER = re.compile(r"shardopt-[0-9a-f]{32}")
_MAGIC = b"shardopt states 1\n"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Place(NamedTuple):
    """Where a file of ours lies: open descriptors, so that names may be moved meanwhile."""

    held: int  # the user's directory
    folder: int  # ours in it
    name: str  # of ours
    pid: int  # that made it


class OwnedFile:
    """A file that nobody else may use, gone when it is closed, collected, or the interpreter ends."""

    def __init__(self, root: Path):
        """Makes folder and file under ``root``, and removes what dead runs left there.

        Raises:
            OffloadError: ``root`` is no directory that only this user and root can change, or nothing can be made
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
        place = _Place(held, folder, self.path.name, os.getpid())
        try:
            self.file = AlignedFile.create(folder, _FILE, str(self.path / _FILE))
        except BaseException:
            _remove(place, None)
            raise
        self._pid = place.pid
        self.close = weakref.finalize(self, _remove, place, self.file)
        try:
            with suppress(OSError):  # some file systems have no locks; then the process number has to do
                fcntl.flock(self.file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_header()
        except BaseException:
            self.close()
            raise

    def check_process(self) -> None:
        """Raises OffloadError in a forked child, which shares the file and the memory of transfers with its parent."""
        if os.getpid() != self._pid:
            raise OffloadError(
                f"process {os.getpid()} is a fork of {self._pid}, to which {self.path} belongs: both would write to "
                "one file, and the threads that move states were left behind. Nothing was read or written. Use the "
                "optimizer in the process that made it, or construct one in the child; offload('cpu') before the fork "
                "gives the child a copy of the states."
            )

    def _write_header(self) -> None:
        (page,) = Buffer(PAGE).parts([PAGE])
        owner = {"token": self.path.name, "pid": os.getpid(), "start": _start_of(os.getpid()), "boot": _boot()}
        text = _MAGIC + json.dumps(owner).encode()
        page.memory[: len(text)] = text
        self.file.write(page.memory, 0)


def _open_root(root: Path) -> int:
    """An open descriptor: what is checked is what is used, whatever happens to the name."""
    try:
        with suppress(FileExistsError):  # another rank's, or the user's
            root.mkdir(mode=0o700)
            _log.warning(
                "offload=%r was not there and was made, on the disk of %r. If that is a typing error, or a disk that "
                "is not mounted, stop here: states would fill another disk.",
                str(root),
                str(root.parent),
            )
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise OffloadError(
            f"offload={str(root)!r} is no directory that can be used: {error.strerror}. Give one that exists, on a "
            "disk with room for two copies of the states."
        ) from error
    status = os.fstat(held)
    is_safe = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or not is_safe:
        os.close(held)
        raise OffloadError(
            f"offload={str(root)!r}: other users can rename and replace what lies in this directory (owner "
            f"{status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}), and states tell about the training data. Give a "
            "directory of your own, or one with the sticky bit, as /tmp."
        )
    return held


def _make_folder(held: int, path: Path) -> int:
    """An open descriptor of a new folder."""
    try:
        os.mkdir(path.name, 0o700, dir_fd=held)
        return os.open(path.name, _FOLDER_FLAGS, dir_fd=held)
    except OSError as error:
        raise OffloadError(
            f"no folder for states can be made in {path.parent}: {error.strerror}. Give offload= a directory that this "
            "user may write to, and look at the number of open files (ulimit -n)."
        ) from error


def _remove(place: _Place, file: AlignedFile | None) -> None:
    """What we made, unless it was replaced; a forked child, which has the same table of objects, leaves it alone."""
    if os.getpid() == place.pid:
        if file is not None and _is_same(place.folder, _FILE, file.fd):
            with suppress(OSError):
                os.unlink(_FILE, dir_fd=place.folder)
        if _is_same(place.held, place.name, place.folder):
            with suppress(OSError):  # somebody put a file of his own into it
                os.rmdir(place.name, dir_fd=place.held)
    if file is not None:
        file.close()
    os.close(place.folder)
    os.close(place.held)


def _is_same(folder: int, name: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False


# -- what dead runs left ----------------------------------------------------------------------------------------------


def _reclaim(held: int) -> None:
    for name in os.listdir(held):
        if _FOLDER.fullmatch(name):
            with suppress(OSError):  # another run reclaims it at the same time, or it is not ours to look into
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
        # Whoever wrote this page held the lock: one that is being made is not tried, which would get in its way.
        if owner.get("token") != name or _is_alive(owner):
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error where the owner, or a child of it, lives
        os.unlink(_FILE, dir_fd=folder)
        os.rmdir(name, dir_fd=held)
    finally:
        os.close(fd)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _owner(page: bytes) -> dict[str, Any]:
    """What the first page says; empty where it is not ours."""
    if not page.startswith(_MAGIC):
        return {}
    try:
        owner = json.loads(page[len(_MAGIC) :].rstrip(b"\0"))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_alive(owner: dict[str, Any]) -> bool:
    """By its number, for file systems without locks: no process of an earlier boot, no other one that has it now."""
    pid = owner.get("pid")
    return isinstance(pid, int) and owner.get("boot") == _boot() and owner.get("start") == _start_of(pid) is not None


def _boot() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _start_of(pid: int) -> str | None:
    """When the process started, in ticks since the boot; None where there is none of this number."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None
