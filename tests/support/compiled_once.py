"""A kernel that several ranks need is compiled by one of them; the others wait for it, and find it in the cache.

All ranks of a job come to a kernel at the same time. In a fresh checkout none of them finds it: each would compile it.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

import torch
from torch.nn import Parameter

from shardopt import ShardedAdamW
from shardopt.compilers import cache
from shardopt.kernels import formats
from shardopt.kernels.formats import Format
from shardopt.kernels.native_step import compile_step
from shardopt.kernels.spec import Spec
from shardopt.rules.adam import adam
from shardopt.rules.passes import passes_of
from tests.support.paths import ROOT

KERNELS, LOCKS = ROOT / ".test_cache" / "kernels", ROOT / ".test_cache" / "locks"
_LONGEST = 60.0  # seconds that a rank waits for another one, which may have been killed or stopped meanwhile

# Of a param, its gradient, its master and its states.
OF_MOST_WORDS: tuple[tuple[Format, Format, Format | None, tuple[Format, ...]], ...] = (
    (formats.BF16, formats.BF16, formats.FP32, (formats.BF16, formats.BF16_DITHERED)),
    (formats.BF16, formats.FP32, formats.SPLIT, (formats.SIGNED8, formats.UNSIGNED8)),
    (formats.BF16, formats.BF16, formats.SPLIT24, (formats.SIGNED8, formats.FP32)),
    (formats.BF16_RANDOM, formats.FP16, None, ()),
)
_find, _keep = cache.find, cache.keep
_held: list[TextIO] = []  # of the kernel that this process compiles


def make_ready() -> None:
    """In a fresh checkout: compiles kernels of most formats, so that Numba is ready in all processes forked from here.

    Else each that compiles a kernel would make it ready, and compile the words of the formats, anew.
    """
    if KERNELS.exists():
        return
    group = ShardedAdamW([Parameter(torch.zeros(1))]).param_groups[0]
    passes = passes_of(adam.variant(group))
    with patch.dict(os.environ, {cache.VARIABLE: "0"}):
        for kept in OF_MOST_WORDS:
            compile_step.__wrapped__(Spec(passes, *kept), 0)


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
