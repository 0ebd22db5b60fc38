"""A kernel that several ranks need is compiled by one of them; the others wait for it, and find it in the cache.

All ranks of a job come to a kernel at the same time. In a fresh checkout none of them finds it: each would compile it.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from shardopt.compilers import cache
from tests.support.paths import ROOT

KERNELS, LOCKS = ROOT / ".test_cache" / "kernels", ROOT / ".test_cache" / "locks"
_LONGEST = 60.0  # seconds that a rank waits for another one, which may have been killed or stopped meanwhile

_find, _keep = cache.find, cache.keep
_held: list[TextIO] = []  # of the kernel that this process compiles


def install() -> None:
    cache.find, cache.keep = find, keep


def find(key: str | None) -> tuple[str, bytes] | None:
    """As the cache's own. Behind a find in vain nobody else compiles the kernel before it is kept."""
    _release()  # a kernel that could not be compiled was never kept
    found = _find(key)
    if found is not None or key is None or os.environ.get(cache.VARIABLE) != str(KERNELS):
        return found
    LOCKS.mkdir(parents=True, exist_ok=True)
    _held.append(open(Path(LOCKS, key), "w"))  # noqa: SIM115
    end = time.monotonic() + _LONGEST
    while not _is_ours(_held[0]) and time.monotonic() < end:
        time.sleep(0.005)
    found = _find(key)
    if found is not None:
        _release()
    return found


def keep(key: str | None, symbol: str, code: bytes) -> None:
    _keep(key, symbol, code)
    _release()


def _is_ours(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process: a child that it forks has no part in it
    except OSError:
        return False
    return True


def _release() -> None:
    while _held:
        _held.pop().close()
