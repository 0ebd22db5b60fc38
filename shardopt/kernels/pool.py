"""Threads that run native kernels over ranges of blocks.

Subnormals are kept, as on the GPU. Another library may have set the caller's thread to flush them to zero
(``torch.set_flush_denormal``, code built with ``-ffast-math``), and then bits would depend on which thread took which
block. So the threads are the pool's own, and the caller's after a check of its mode: it begins at once, and ends alone
what is short, where another one would still be waking.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import torch

from ..machine import cores_of_this_rank, ranks_here

# A thread takes a range of blocks at a time: short enough that the others can help a thread that was held up, long
# enough that the start of a range (a few microseconds in the interpreter) does not show beside rules that move little.
RANGES_PER_THREAD = 8
BLOCKS_PER_RANGE = 1024  # at least; 1 MiB of fp32 a stream

_SUBNORMAL = np.float32(2.0**-149)

_here = threading.local()  # num_threads: of what this thread runs; None: as many as torch would use
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
# A forked child (a DataLoader worker) has the table but not the threads, and would wait for them forever.
os.register_at_fork(after_in_child=_pools.clear)


@contextmanager
def beside_a_gpu() -> Iterator[None]:
    """A context of kernels on the CPU for params on a GPU: they have this rank's share of the cores.

    torchrun sets OMP_NUM_THREADS=1 where several ranks are on a machine, which suits ranks that compute on GPUs: torch
    says 1 thread then, and all cores but one a rank would be idle in the step. Another number is the user's own. Test:
    test_the_cpu_step_has_the_ranks_cores in tests/offload/test_cpu_step.py.
    """
    if torch.get_num_threads() == 1 and ranks_here() > 1:
        _here.num_threads = cores_of_this_rank()
    try:
        yield
    finally:
        _here.num_threads = None


def run_over_blocks(kernel: Callable[[int, int], None], num_blocks: int) -> None:
    """Calls ``kernel(first, last)`` until ``[0, num_blocks)`` is covered.

    It runs on as many threads as torch would use, but see :func:`beside_a_gpu`.
    """
    if num_blocks <= BLOCKS_PER_RANGE and _SUBNORMAL * np.float32(1) > 0:
        return kernel(0, num_blocks)
    num_threads = _num_threads()
    ranges = RANGES_PER_THREAD * num_threads if num_threads > 1 else 1  # one thread has nobody to wait for
    length = max(BLOCKS_PER_RANGE, -(-num_blocks // ranges))

    def run(number: int) -> None:
        kernel(number * length, min((number + 1) * length, num_blocks))

    _run_in_turn(run, -(-num_blocks // length), num_threads)


def run_each(tasks: Sequence[Callable[[], None]]) -> None:
    """Calls all of these, on as many threads as :func:`run_over_blocks`; each begins in its turn."""
    _run_in_turn(lambda number: tasks[number](), len(tasks), _num_threads())


def _num_threads() -> int:
    return getattr(_here, "num_threads", None) or torch.get_num_threads()


def _run_in_turn(run: Callable[[int], None], count: int, num_threads: int) -> None:
    """Calls ``run`` with 0 to ``count - 1``, on this thread, unless it flushes subnormals, and on the pool's."""
    is_alike = bool(_SUBNORMAL * np.float32(1) > 0)
    others = min(num_threads, count) - is_alike
    if others <= 0:
        for number in range(count):
            run(number)
        return
    numbers = itertools.count()  # its next() is atomic under the GIL
    interrupted = threading.Event()

    def work() -> None:
        while (number := next(numbers)) < count and not interrupted.is_set():
            run(number)

    tasks: list[Future[None]] = []
    try:
        _start(tasks, work, others, _pool(num_threads))
        if is_alike:
            work()
        else:
            wait(tasks)
    finally:  # after Ctrl-C too: kernels hold addresses that the caller may free
        interrupted.set()
        begun = [task for task in tasks if not task.cancel()]  # nothing is left for one that did not wake in time
        wait(begun)
    for task in begun:
        task.result()


def _start(tasks: list[Future[None]], work: Callable[[], None], count: int, pool: ThreadPoolExecutor) -> None:
    """Adds ``count`` tasks that do this work; or does it, where Python lets no thread begin any more."""
    try:
        for _ in range(count):
            tasks.append(pool.submit(work))
    except RuntimeError:
        # Python's thread pools refuse work once the main thread has ended, which a thread of the script's own may
        # outlive, and in atexit. Test: test_steps_after_the_main_thread in tests/kernels/test_kernels.py.
        with _keeping_subnormals():
            work()


@contextmanager
def _keeping_subnormals() -> Iterator[None]:
    """A context in which this thread does arithmetic as the pool's do."""
    flushes = not _SUBNORMAL * np.float32(1) > 0
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushes)


def _pool(num_threads: int) -> ThreadPoolExecutor:
    with _lock:
        if num_threads not in _pools:
            _pools[num_threads] = ThreadPoolExecutor(
                num_threads, thread_name_prefix="shardopt", initializer=torch.set_flush_denormal, initargs=(False,)
            )
        return _pools[num_threads]
