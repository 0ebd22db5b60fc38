"""A socket that the other ranks find: in a folder of the user's own if all of them share a kernel, else on a port.

The folder of a process that was killed stays. The next process of the same user on the same machine removes it, since
no process listens there any more. A socket gets its final name once its process listens, so that no process removes a
folder which another one is still making.
"""

import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from multiprocessing import connection, util
from pathlib import Path
from typing import Any

BACKLOG = 1024  # connections that wait to be accepted: all other ranks may connect at once
_NAME = "socket"
# Seconds after which a folder without a socket belongs to a dead process. Test:
# test_a_killed_process_leaves_nothing_for_long in tests/partition/test_serve.py.
_UNFINISHED = 3600.0


class Listener:
    """Accepts connections.

    Attributes:
        address: a path, or (host, port).
    """

    def __init__(self, address: tuple[str, int] | None):
        """
        Args:
            address: None for a path.

        Raises:
            OSError: no folder could be made, or there is no such address.
        """
        self.address: Any
        if address is None:
            self._socket, self.address = _listen_in_folder()
        else:
            self._socket = socket.create_server(address, backlog=BACKLOG)
            self.address = self._socket.getsockname()
        # Not atexit, which a process of multiprocessing does not run; a forked child runs neither.
        folder = os.path.dirname(self.address) if address is None else None
        util.Finalize(self, _end, (self._socket, folder), exitpriority=0)

    @property
    def family(self) -> str:
        return self._socket.family.name

    def accept(self, seconds: float | None) -> "connection.Connection[Any, Any] | None":
        """Returns the next connection; None if none came within so many seconds."""
        if not connection.wait([self._socket], seconds):
            return None
        there, _ = self._socket.accept()
        there.setblocking(True)
        return connection.Connection(there.detach())

    def forget(self) -> None:
        """Closes the copy of the socket in a forked child, which does not answer: after the parent's death callers
        would wait for the child.
        """
        self._socket.close()


def _end(there: socket.socket, folder: str | None) -> None:
    there.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _listen_in_folder() -> tuple[socket.socket, str]:
    roots = dict.fromkeys((tempfile.gettempdir(), "/tmp"))  # a socket's path may be 107 bytes long on Linux
    errors: list[OSError] = []
    for root in roots:
        try:
            reclaim(Path(root))
            folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))  # 0700
        except OSError as error:
            errors.append(error)
            continue
        there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            there.bind(str(folder / "new"))
            there.listen(BACKLOG)
            os.rename(folder / "new", folder / _NAME)
        except OSError as error:
            errors.append(error)
            there.close()
            shutil.rmtree(folder, ignore_errors=True)
            continue
        return there, str(folder / _NAME)
    raise errors[0]


def reclaim(root: Path) -> None:
    """Removes the folders of killed processes of this user on this machine from a directory."""
    pattern = re.compile(re.escape(_prefix()) + "[a-z0-9_]+")
    for name in os.listdir(root):
        if pattern.fullmatch(name):
            with suppress(OSError):  # another process reclaims it at the same time
                status = os.lstat(root / name)
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and not status.st_mode & 0o077 and _is_dead(root / name, status):
                    shutil.rmtree(root / name)


def _is_dead(folder: Path, status: os.stat_result) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # if the backlog is full, a process listens
        try:
            probe.connect(str(folder / _NAME))
        except ConnectionRefusedError:
            return True
        except FileNotFoundError:
            return time.time() - status.st_mtime > _UNFINISHED
        except OSError:
            return False
    return False


def _prefix() -> str:
    """The start of a folder's name, with the kernel in it: machines may share a directory, but not a socket."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = socket.gethostname()
    return f"shardopt-serve-{hashlib.sha256(kernel.encode()).hexdigest()[:8]}-"
