"""PyTorch's CUDA build on a machine without a GPU: its own allocator, streams, autograd and ProcessGroupNCCL, executed.

``scripts/gpu_without_gpu.sh`` makes an environment with PyTorch's CUDA build and, in place of NVIDIA's libraries, those
of ``runtime/``. Memory of the device is memory of the host. Streams are queues whose operations run as late as waits
allow, so a wait that is missing gives wrong numbers, and ranks that wait for each other are told so at a deadline.

* ``runtime/queues``: streams, and the thread that carries operations out.
* ``runtime/memory``, ``copies``, ``streams``, ``device``: the functions of libcudart.
* ``runtime/board``, ``communicator``, ``collectives``, ``messages``, ``nccl``: the functions of libnccl.
* ``runtime/operations``: ATen's operations, which the CPU carries out when their stream gets there.
* ``launches.py``: Triton's launches, whose PTX ``tests/support/ptx`` executes when their stream gets there.
* ``build.py`` compiles all of that; ``installed.py`` is what every process of the environment loads with torch.

What is real: all of PyTorch that runs on the host, Triton's compiler, the compiled kernels of this package. What is
not: the arithmetic of ATen's kernels, of cuBLAS and cuDNN (the CPU's), the time that anything takes.

With ``WITHOUT_GPU_NULL=1`` the device is a *null device*, for the host's time: launches (ATen's own and those of
Triton's own launcher), copies, waits and collectives return at once, nothing computes, and what is read of the device
is zeros. ``runtime/driver`` is what Triton calls of libcuda; ``counts.py`` reads how often the program called what.
"""

import os


def is_here() -> bool:
    """True in that environment."""
    return "WITHOUT_GPU_COUNT" in os.environ


def is_null() -> bool:
    """True if nothing computes there."""
    return os.environ.get("WITHOUT_GPU_NULL") == "1"


def sized(full: int, reduced: int) -> int:
    """A size of a test: on a GPU, and here, where an element takes a microsecond."""
    return reduced if is_here() else full
