"""All calls of checkpoints to the file system, in one place where tests can make them fail.

Files are created new (an existing file is an error), private (0600 in directories of 0700) but for exports, and never
through a symbolic link. Byte counts are checked: a short write or read is continued, or is an error.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError

PRIVATE, PUBLIC = 0o600, 0o666  # modes of new files, less the umask of the user
_PERMISSIONS = 0o777  # of a mode: who may read, write and execute


def make_directory(path: Path) -> None:
    os.mkdir(path, 0o700)


def make_directories(path: Path) -> None:
    """Makes the directory and its missing parents, durably."""
    if not leads_to_directory(path.parent) and path.parent != path:
        make_directories(path.parent)
    with suppress(FileExistsError):  # ranks that save another part of the model make the same parents
        make_directory(path)
    sync_directory(path.parent)


def create(path: Path, mode: int = PRIVATE) -> int:
    """Returns a new file, open for writing. ``mode``: its permissions, less the umask.

    Raises:
        FileExistsError: the path exists.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def create_in_place_of(target: Path, path: Path) -> int:
    """Returns a new file that will be renamed to ``target``, open for writing, with the permissions of ``target``.

    If there is no ``target``, permissions are those that the umask gives.
    """
    try:
        permissions = os.stat(target).st_mode & _PERMISSIONS | PRIVATE  # the writer opens it by its name again
    except FileNotFoundError:
        return create(path, PUBLIC)
    file = create(path, permissions)
    os.fchmod(file, permissions)  # adds what the umask removed
    return file


def write(file: int, data: memoryview) -> None:
    """Writes all of the data at the end of the file."""
    while data.nbytes:
        data = data[os.write(file, data) :]


def sync(file: int) -> None:
    os.fsync(file)


def close(file: int) -> None:
    os.close(file)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable: files that were created, renamed and removed there."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def rename(source: Path, target: Path) -> None:
    """Renames atomically; a file at ``target`` is replaced."""
    os.rename(source, target)


def remove(path: Path) -> None:
    os.unlink(path)


def remove_directory(path: Path) -> None:
    """Removes an empty directory."""
    os.rmdir(path)


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file durably; its name is durable once the directory is synced."""
    file = create(path)
    try:
        write(file, memoryview(data))
        sync(file)
    finally:
        close(file)


# -- reading -----------------------------------------------------------------------------------------------------------


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def leads_to_directory(path: Path) -> bool:
    """True for a directory, or a link to one: a path that the user gives may be a link to a larger disk."""
    return os.path.isdir(path)


def is_directory(path: Path) -> bool:
    """True for a directory, not for a link to one."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """True for a regular file, not for a link to one."""
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def open_file(path: Path) -> int:
    """Returns a regular file, open for reading.

    Raises:
        CheckpointError: the file is missing, or is a link, a pipe or a device.
    """
    try:
        # Not blocking: opening a pipe would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            "load an older checkpoint of the same directory; `shardopt verify` shows which are whole: "
            f"{path} cannot be opened ({error.strerror}). Nothing was loaded."
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"load another checkpoint: {path} is not a regular file, and was not read.")
    return file


def size(file: int) -> int:
    return os.fstat(file).st_size


def read_into(file: int, buffer: memoryview, offset: int) -> int:
    """Fills the buffer from ``offset`` on. Returns how many bytes were read: fewer only at the end of the file."""
    done = 0
    while done < buffer.nbytes:
        got = os.preadv(file, [buffer[done:]], offset + done)
        if not got:
            break
        done += got
    return done


def read_file(path: Path, most: int) -> bytes:
    """Returns all of a file of at most ``most`` bytes.

    Raises:
        CheckpointError: the file is missing, is not a regular file, or is larger.
    """
    file = open_file(path)
    try:
        nbytes = size(file)
        if nbytes > most:
            raise CheckpointError(
                f"load another checkpoint: {path} has {nbytes} bytes, more than the {most} that shardopt writes."
            )
        buffer = bytearray(nbytes)
        return bytes(buffer[: read_into(file, memoryview(buffer), 0)])
    finally:
        close(file)


def forget_pages(file: int, start: int = 0, nbytes: int = 0) -> None:
    """Drops pages of the file from memory, where the system can; the next read comes from the disk.

    Linux begins to write out pages that were just written, and continues in the background.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


# -- locks -------------------------------------------------------------------------------------------------------------


def hold(file: int) -> bool:
    """Locks an open file until it is closed or this process ends. Returns False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(file: int) -> None:
    """Releases the lock and closes the file. Closing alone is not enough: forked processes have the file open too."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def is_held(path: Path) -> bool:
    """True if a live process holds the lock of the file."""
    file = open_file(path)
    try:
        return not hold(file)
    finally:
        release(file)


def lock(path: Path) -> int | None:
    """Locks a file that exists only while it is locked, or after its holder died. Returns None if it is locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not hold(file):
            os.close(file)
            return None
        with suppress(FileNotFoundError):  # its last holder may have removed it between the two calls above
            if os.path.samestat(os.lstat(path), os.fstat(file)):
                return file
        release(file)


def unlock(path: Path, file: int) -> None:
    os.unlink(path)
    release(file)


def sizes(path: Path) -> dict[str, int]:
    """Returns the size in bytes of each entry of a directory."""
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                found[entry.name] = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # renamed just now
                continue
    return found
