"""Triton's launches on streams of the stand-in: PTX is executed when its stream gets there."""

import ctypes
import gc
import itertools
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.support.ptx.driver import THREADS_AT_A_TIME, Driver, Loaded, parsed
from tests.support.ptx.machine import Machine
from tests.support.ptx.memory import GlobalMemory
from tests.support.without_gpu.build import CUDART, LIBRARIES

_MOST_ALLOCATIONS = 4096


class OnDevice(Driver):
    """A driver for a GPU that torch believes to have."""

    def launch(self, grid: int, loaded: Loaded, arguments: list[Any]) -> None:
        words = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        device = torch.cuda.current_device()
        name = next((line.split()[-1] for line in loaded.ptx.splitlines() if ".entry" in line), "a kernel of Triton's")
        enqueue(name, lambda: self._execute(grid, loaded, words, device))
        self.executed.add(loaded)

    def _execute(self, grid: int, loaded: Loaded, words: list[int], device: int) -> None:
        kernel = parsed(self._edit(loaded.ptx))
        words = words + [0] * (len(kernel.params) - len(words))  # of scratch memory, which has no bytes
        memory = GlobalMemory(allocations(device))
        step = max(THREADS_AT_A_TIME // kernel.threads, 1)
        for first in range(0, grid, step):
            Machine(kernel, grid, words, memory, loaded.shared, first, min(first + step, grid)).run()

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_current_stream(self, device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())


@cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(LIBRARIES / CUDART))


def allocations(device: int) -> dict[int, Any]:
    """The memory that a kernel on this device may touch: its own, and what the host has pinned."""
    found = (ctypes.c_uint64 * (2 * _MOST_ALLOCATIONS))()
    count = _runtime().without_gpu_allocations(device, found, _MOST_ALLOCATIONS)
    assert count <= _MOST_ALLOCATIONS
    pairs = zip(found[0 : 2 * count : 2], found[1 : 2 * count : 2], strict=True)
    return {at: np.frombuffer((ctypes.c_uint8 * nbytes).from_address(at), dtype=np.uint8) for at, nbytes in pairs}


# -- calls of the device's thread --------------------------------------------------------------------------------------

_WAITING: dict[int, Callable[[], None]] = {}
_NUMBERS = itertools.count(1)


def enqueue(name: str, call: Callable[[], None]) -> None:
    """Calls it when the current stream gets there."""
    number = next(_NUMBERS)
    _WAITING[number] = call
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _runtime().without_gpu_enqueue(stream, name.encode(), _CALLED, ctypes.c_uint64(number))


@ctypes.CFUNCTYPE(None, ctypes.c_uint64)
def _CALLED(number: int) -> None:
    # A collection here would run finalisers of the program's on the device's thread, and one may wait for the device.
    collects = gc.isenabled()
    gc.disable()
    try:
        _WAITING.pop(number)()
    except BaseException:
        _runtime().without_gpu_fail(traceback.format_exc().encode())
    finally:
        if collects:
            gc.enable()
