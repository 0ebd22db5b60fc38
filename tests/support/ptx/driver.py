"""A driver for Triton without a GPU: what is launched is compiled for one as ever, and its PTX is executed.

Arguments are specialised, the kernel is compiled down to PTX, and a launch's arguments are flattened by the signature,
as Triton's launcher in C does it. ptxas, a quarter of a second a kernel, is left out: nobody looks at its code here.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as drivers

from tests.support.no_driver import NoDriver

from .machine import Machine
from .memory import GlobalMemory
from .text import Kernel, parse

# At a time, so that the words of a register stay in the processor's cache.
THREADS_AT_A_TIME = 1 << 15


class Loaded(NamedTuple):
    """A kernel on its way from the compiler to a launch."""

    ptx: str
    ttir: str  # the form before it is laid out over threads, which tells of every line of the source
    shared: int  # bytes of a block


class Driver(NoDriver, DriverBase):
    """A context in which Triton launches through this driver.

    Attributes:
        memory: what kernels may touch beside the tensors of their own launch.
        executed: the kernels that were.
    """

    def __init__(self, target: GPUTarget | None = None, edit: Callable[[str], str] = str) -> None:
        """
        Args:
            target: the GPU to compile for; an H100 if none is given.
            edit: makes another PTX of each kernel's, before it is executed.
        """
        super().__init__(target or GPUTarget("cuda", 90, 32))
        self._edit = edit
        self.memory, self.executed = GlobalMemory(), set[Loaded]()
        self.utils, self.launcher_cls = _Utils(), _Launcher

    def __enter__(self) -> "Driver":
        self._before = drivers._active, knobs.runtime.add_stages_inspection_hook
        drivers.set_active(self)
        knobs.runtime.add_stages_inspection_hook = _without_machine_code  # type: ignore[assignment]
        knobs.runtime.kernel_load_start_hook.add(self.utils.note)
        return self

    def __exit__(self, *_: object) -> None:
        knobs.runtime.kernel_load_start_hook.remove(self.utils.note)
        drivers._active, knobs.runtime.add_stages_inspection_hook = self._before

    def launch(self, grid: int, loaded: Loaded, arguments: list[Any]) -> None:
        kernel = parsed(self._edit(loaded.ptx))
        memory = GlobalMemory(dict(self.memory.regions))
        memory.allow(*(each for each in arguments if isinstance(each, torch.Tensor)))
        words = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        words += [0] * (len(kernel.params) - len(words))  # of scratch memory, which has no bytes
        step = max(THREADS_AT_A_TIME // kernel.threads, 1)
        for first in range(0, grid, step):
            Machine(kernel, grid, words, memory, loaded.shared, first, min(first + step, grid)).run()
        self.executed.add(loaded)

    # -- what Triton asks ----------------------------------------------------------------------------------------------

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def _without_machine_code(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str] | None:
    """Triton asks first for what tells these kernels from others in its caches, and then for the stages."""
    if stages is None:
        return "without machine code", "without machine code"
    stages["cubin"] = lambda source, metadata: b""
    return None


@cache
def parsed(ptx: str) -> Kernel:
    return parse(ptx)


class _Utils:
    """Takes what was compiled: the hook names its files, the call that follows would load its machine code."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def note(self, module: Any, function: Any, name: str, files: dict[str, str], hash: str) -> None:
        paths = map(Path, files.values())
        self._texts = {path.suffix: path.read_text() for path in paths if path.suffix in (".ptx", ".ttir")}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Loaded, int, int, int]:
        """Returns module, function, registers, spills, threads that a block may have."""
        return name, Loaded(self._texts[".ptx"], self._texts[".ttir"], shared), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}


class _Launcher:
    """Made once for a kernel, for whichever driver is active when it is launched."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._signature = tuple(source.signature.values())
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0

    def __call__(self, x: int, y: int, z: int, stream: int, loaded: Loaded, *others: Any) -> None:
        """``others``: metadata twice, two hooks, then the arguments."""
        assert y == z == 1
        active = drivers.active
        assert isinstance(active, Driver)
        active.launch(x, loaded, [*_flat(self._signature, others[4:])])


def _flat(signature: Any, arguments: Any) -> Iterator[Any]:
    """The arguments that the kernel is handed: tuples one by one, no constants."""
    for kind, value in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield value
