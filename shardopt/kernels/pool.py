"""Threads that run native kernels over ranges of blocks.

Subnormals are kept, as on the GPU. Another library may have set the caller's thread to flush them to zero
(``torch.set_flush_denormal``, code built with ``-ffast-math``), and then bits would depend on which thread took which
block. So the threads are the pool's own; the caller's thread runs only short work, after a check of its mode.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

# A thread takes a range of blocks at a time: short enough that the others can help a thread that was held up, long
# enough that the start of a range (a few microseconds in the interpreter) does not show beside rules that move little.
RANGES_PER_THREAD = 8
BLOCKS_PER_RANGE = 1024  # at least; 1 MiB of fp32 a stream

_SUBNORMAL = np.float32(2.0**-149)

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
# A forked child (a DataLoader worker) has the table but not the threads, and would wait for them forever.
os.register_at_fork(after_in_child=_pools.clear)


def run_over_blocks(kernel: Callable[[int, int], None], num_blocks: int) -> None:
    """Calls ``kernel(first, last)`` until ``[0, num_blocks)`` is covered, on as many threads as torch would use."""
    if num_blocks <= BLOCKS_PER_RANGE and _SUBNORMAL * np.float32(1) > 0:
        kernel(0, num_blocks)  # another thread would take longer to wake than this takes to run
        return
    num_threads = torch.get_num_threads()
    length = max(BLOCKS_PER_RANGE, -(-num_blocks // (RANGES_PER_THREAD * num_threads)))
    ranges = itertools.count(0, length)  # its next() is atomic under the GIL
    interrupted = threading.Event()

    def work() -> None:
        while (first := next(ranges)) < num_blocks and not interrupted.is_set():
            kernel(first, min(first + length, num_blocks))

    pool = _pool(num_threads)
    tasks = [pool.submit(work) for _ in range(min(num_threads, -(-num_blocks // length)))]
    try:
        wait(tasks)
    finally:  # after Ctrl-C too: kernels hold addresses that the caller may free
        interrupted.set()
        wait(tasks)
    for task in tasks:
        task.result()


def _pool(num_threads: int) -> ThreadPoolExecutor:
    with _lock:
        if num_threads not in _pools:
            _pools[num_threads] = ThreadPoolExecutor(
                num_threads, thread_name_prefix="shardopt", initializer=torch.set_flush_denormal, initargs=(False,)
            )
        return _pools[num_threads]
