"""Object code of native kernels on disk, so that a second process compiles nothing.

A kernel is a file below ``$XDG_CACHE_HOME/shardopt/kernels`` (``~/.cache`` if that is not set), named by a hash of all
that its code depends on. What is in it runs in this process, so the folder must be the user's own and closed to
others; else it is neither read nor written. A file begins with a hash of its name and content: what a crash or a full
disk left behind is passed over, and compiled again. Nothing that goes wrong here fails a step.

``SHARDOPT_KERNEL_CACHE=0`` turns it off; an absolute path there is the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from ..version import __version__

VARIABLE = "SHARDOPT_KERNEL_CACHE"
_MOST = 16 << 20  # bytes of a file; kernels have some thousand
# Seconds after which a draft belongs to a process that was killed.
_UNFINISHED = 3600.0
_log = logging.getLogger("shardopt")


def key_of(*told: str) -> str | None:
    """Returns the name of a kernel's file; None if the cache is off."""
    surroundings = _surroundings() if folder() is not None else None
    return None if surroundings is None else hashlib.sha256(json.dumps([surroundings, *told]).encode()).hexdigest()


def find(key: str | None) -> tuple[str, bytes] | None:
    """Returns the symbol and the code that were kept; None if there is nothing, or nothing that can be trusted."""
    if key is None:
        return None
    with suppress(OSError), _opened() as opened:
        file = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened)
        with open(file, "rb") as stream:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            found = stream.read(_MOST)
        digest, content = found[:32], found[32:]
        if digest == _digest(key, content):
            symbol, _, code = content.partition(b"\0")
            return symbol.decode(), code
    return None


def keep(key: str | None, symbol: str, code: bytes) -> None:
    """Writes a kernel; another process finds all of it, or nothing."""
    if key is None:
        return
    content = symbol.encode() + b"\0" + code
    try:
        _make_folder()
        with _opened() as opened:
            _sweep(opened)
            draft = f".{secrets.token_hex(8)}"
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=opened)
            try:
                with open(file, "wb") as stream:
                    stream.write(_digest(key, content) + content)
                os.rename(draft, key, src_dir_fd=opened, dst_dir_fd=opened)
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=opened)
                raise
    except OSError as error:  # a home that is read-only, a disk that is full
        _log.info("kernels are not kept in %s (%s): the next process compiles them again.", folder(), error)


def folder() -> Path | None:
    """Returns where kernels are kept; None if nowhere.

    Raises:
        ValueError: ``SHARDOPT_KERNEL_CACHE`` is neither 0 nor an absolute path.
    """
    said = os.environ.get(VARIABLE, "")
    if said == "0":
        return None
    if said:
        if not os.path.isabs(said):
            raise ValueError(f"set {VARIABLE} to an absolute path, or to 0 for no cache of kernels: it is {said!r}.")
        return Path(said)
    root = os.environ.get("XDG_CACHE_HOME", "")
    root = root if os.path.isabs(root) else os.path.expanduser("~/.cache")
    return Path(root, "shardopt", "kernels") if os.path.isabs(root) else None


def _make_folder() -> None:
    wanted = folder()
    assert wanted is not None
    if wanted.exists():
        return
    above = next(each for each in wanted.parents if each.exists())
    if above.stat().st_uid not in (0, os.geteuid()):
        # Such as sudo with the home of another user, who could then not write there.
        raise PermissionError(f"{above} is another user's")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _opened() -> Iterator[int]:
    """A context with the folder's descriptor: what is checked is what is read, whoever renames folders meanwhile.

    Raises:
        OSError: there is no folder, or it is not this user's alone.
    """
    wanted = folder()
    assert wanted is not None
    opened = os.open(wanted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            _say_foreign(str(wanted))
            raise PermissionError(f"{wanted} is not this user's alone")
        yield opened
    finally:
        os.close(opened)


@functools.cache  # once
def _say_foreign(path: str) -> None:
    _log.warning(
        "run chmod 700 %s, or set %s to another folder: kernels are compiled anew in each process. That folder is not "
        "this user's alone, so that what it holds could be another user's code.",
        path,
        VARIABLE,
    )


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _sweep(opened: int) -> None:
    """Removes drafts of processes that were killed."""
    for name in os.listdir(opened):
        if name.startswith("."):
            with suppress(OSError):
                if time.time() - os.stat(name, dir_fd=opened, follow_symlinks=False).st_mtime > _UNFINISHED:
                    os.unlink(name, dir_fd=opened)


@functools.cache
def _surroundings() -> tuple[object, ...] | None:
    """Returns all that code depends on beside the kernel's own text; None if it cannot be told."""
    try:
        import llvmlite.binding as llvm

        versions = [__version__, sys.version, *map(metadata.version, ("numba", "llvmlite", "numpy"))]
        package = Path(__file__).parent.parent
        rooms = (package / "compilers", package / "kernels", package / "offload" / "disk")
        sources = [path.read_bytes() for room in rooms for path in sorted(room.glob("*.py"))]
        settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
        file = Path(".numba_config.yaml")  # which Numba reads
        sources.append(file.read_bytes() if file.exists() else b"")
        # A name does not tell what a virtual machine or an older system leaves out.
        processor = [platform.machine(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    except Exception:  # a broken installation raises anything
        return None
    text = hashlib.sha256(b"\0".join(hashlib.sha256(each).digest() for each in sources)).hexdigest()
    return versions, text, settings, processor
