"""Every call on the file system that checkpoints make, so that a test can stand between them and the disk.

Files are made new (never opened where something lies already), private (0600 in directories of 0700) and never through
a symbolic link. Byte counts are checked: a short write or read goes on, or is an error.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError


def make_directory(path: Path) -> None:
    os.mkdir(path, 0o700)


def make_directories(path: Path) -> None:
    """It and those above it that are missing, durable."""
    if not is_directory(path.parent) and path.parent != path:
        make_directories(path.parent)
    with suppress(FileExistsError):  # ranks that save another part of the model make the same parents
        make_directory(path)
    sync_directory(path.parent)


def create(path: Path) -> int:
    """A new file, open for writing.

    Raises:
        FileExistsError: something lies there.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write(file: int, data: memoryview) -> None:
    """All of it, at the end of the file."""
    while data.nbytes:
        data = data[os.write(file, data) :]


def sync(file: int) -> None:
    os.fsync(file)


def close(file: int) -> None:
    os.close(file)


def sync_directory(path: Path) -> None:
    """Makes the names in it durable: what was created, renamed and removed there."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def rename(source: Path, target: Path) -> None:
    """Atomic; a file at ``target`` is replaced."""
    os.rename(source, target)


def remove(path: Path) -> None:
    os.unlink(path)


def remove_directory(path: Path) -> None:
    """An empty one."""
    os.rmdir(path)


def write_file(path: Path, data: bytes) -> None:
    """A new file, durable; its name is so once the directory is synced."""
    file = create(path)
    try:
        write(file, memoryview(data))
        sync(file)
    finally:
        close(file)


# -- reading -----------------------------------------------------------------------------------------------------------


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def is_directory(path: Path) -> bool:
    """A real one, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """A real one, not a link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def open_file(path: Path) -> int:
    """A regular file, open for reading.

    Raises:
        CheckpointError: it is missing, or a link, a pipe, a device.
    """
    try:
        # Not blocking: the opening of a pipe would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error.strerror}): this checkpoint is not whole, and nothing was loaded. Load "
            "an older one of the same directory; `python -m shardopt verify` tells which are whole."
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is no regular file: it was not read. Load another checkpoint.")
    return file


def size(file: int) -> int:
    return os.fstat(file).st_size


def read_into(file: int, buffer: memoryview, offset: int) -> int:
    """Fills the buffer from ``offset`` on; how many bytes there were, fewer only at the end of the file."""
    done = 0
    while done < buffer.nbytes:
        got = os.preadv(file, [buffer[done:]], offset + done)
        if not got:
            break
        done += got
    return done


def read_file(path: Path, most: int) -> bytes:
    """All of a file of at most ``most`` bytes.

    Raises:
        CheckpointError: it is missing, no regular file, or larger.
    """
    file = open_file(path)
    try:
        nbytes = size(file)
        if nbytes > most:
            raise CheckpointError(f"{path} has {nbytes} bytes, more than the {most} that such a file may have.")
        buffer = bytearray(nbytes)
        return bytes(buffer[: read_into(file, memoryview(buffer), 0)])
    finally:
        close(file)


def forget_pages(file: int, start: int = 0, nbytes: int = 0) -> None:
    """What is read next comes from the disk, where the system allows to ask for that; from ``start`` on, or all.

    Of what was just written, Linux begins to write out the pages, and goes on with that while we do something else.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


# -- locks -------------------------------------------------------------------------------------------------------------


def hold(file: int) -> bool:
    """Locks an open file until it is closed or this process ends in whatever way; False where another one holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(file: int) -> None:
    """Gives a lock back and closes the file: processes that were forked meanwhile have it open too."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def is_held(path: Path) -> bool:
    """Whether a process that lives holds it."""
    file = open_file(path)
    try:
        return not hold(file)
    finally:
        release(file)


def lock(path: Path) -> int | None:
    """A lock on a file that is there only as long as somebody holds it, or died with it; None: another one has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not hold(file):
            os.close(file)
            return None
        with suppress(FileNotFoundError):  # whoever had it may have removed it between the two calls above
            if os.path.samestat(os.lstat(path), os.fstat(file)):
                return file
        release(file)


def unlock(path: Path, file: int) -> None:
    os.unlink(path)
    release(file)


def sizes(path: Path) -> dict[str, int]:
    """Bytes of each thing in a directory."""
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                found[entry.name] = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # renamed just now
                continue
    return found
