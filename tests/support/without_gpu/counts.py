"""How often this process called what costs the host something on a GPU: launches, copies, events, waits."""

import ctypes
from functools import cache

from tests.support.without_gpu.build import CUDART, LIBRARIES


@cache
def _runtime() -> ctypes.CDLL:
    found = ctypes.CDLL(str(LIBRARIES / CUDART))
    found.without_gpu_count_names.restype = ctypes.c_char_p
    return found


def counts() -> dict[str, int]:
    """Calls since the process began, by kind."""
    names = _runtime().without_gpu_count_names().decode().split(",")
    found = (ctypes.c_uint64 * len(names))()
    _runtime().without_gpu_counts(found)
    return dict(zip(names, found, strict=True))
