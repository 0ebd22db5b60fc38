"""Ranks for tests: a pool of processes, forked once a session, that run a function with a fresh group each time.

::

    def sums(value):                     # of a module, so that the processes can import it
        return shardopt_or_torch_code(dist.get_rank(), value)

    def test_sums(ranks):                # the fixture of conftest.py
        assert ranks.run(sums, 7, world=3) == [...]   # what each rank returned, by rank

A grid of settings belongs inside one function: processes and groups are then paid once. What a rank raises is raised in
the test with its traceback. A job that is not done in time fails the test with the stack of every thread of every rank.
After any failure the processes of the job are replaced: what it left behind cannot fail the next one. They are forked
from a process that has imported everything (``preload.py``), which takes milliseconds.

Deadlines only bound a hang: they are far from what a job takes on a busy machine. A test of a deadline of the package's
own makes the moment (``moments.py``, ``absence.py``).
"""

import faulthandler
import gc
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

from tests.support.coverage_contexts import attributed
from tests.support.fork_servers import fork_server, start_with_frameworks
from tests.support.parcels import dumps

MAX_WORLD = 8
TIMEOUT = 300.0  # seconds, of one wait in the group: deadlines only end a hang, however busy the machine is
DEADLINE = 600.0  # seconds, of a job
_AFTER_A_FAILURE = 30.0  # seconds that the others have to tell what they saw of it
_ENDS = 60.0  # seconds that a process may take to end, or to write where it stands


class RankFailure(AssertionError):
    """A job did not return on every rank; the message holds each failing rank's traceback."""


@dataclass
class Worker:
    """One process, and the file into which it writes its stacks when it is asked where it stands."""

    process: BaseProcess
    pipe: connection.Connection
    stacks: Path


class Pool:
    """Processes kept from test to test; a job at world size N runs on the first N."""

    def __init__(self, frameworks: bool = False) -> None:
        """``frameworks``: they are forked from a process that has imported what ``preload_frameworks.py`` does."""
        self._frameworks = frameworks
        self._folder = tempfile.TemporaryDirectory(prefix="shardopt-ranks-")
        self._workers: list[Worker] = []
        self._started = 0
        self._jobs = 0

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world: int,
        timeout: float = TIMEOUT,
        deadline: float = DEADLINE,
        group: bool = True,
        doomed: Collection[int] = (),
        backend: str = "gloo",
    ) -> list[Any]:
        """``function(*arguments)`` on ``world`` ranks; what each returned.

        Args:
            timeout: of the process group's waits.
            deadline: of the whole job.
            group: False: no process group.
            backend: of the process group. With "nccl" each rank has a GPU of its own, which is its current one.
            doomed: ranks that die or are stopped. None is returned for them; all processes of the job are replaced.

        Raises:
            RankFailure: an exception, a death or a missed deadline on some rank.
        """
        assert 1 <= world <= MAX_WORLD
        if backend == "nccl" and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs")
        while len(self._workers) < world:
            self._workers.append(self._start())
        self._jobs += 1
        workers = self._workers[:world]
        store = str(Path(self._folder.name) / f"store{self._jobs}") if group else None
        work = dumps(attributed(function, arguments))
        try:
            for rank, worker in enumerate(workers):
                worker.pipe.send_bytes(pickle.dumps((work, rank, world, store, timeout, not doomed, backend)))
        except OSError as error:
            codes = [worker.process.exitcode for worker in workers]
            self._stop(self._workers)
            raise RankFailure(f"a process died behind its last job, which succeeded; exit codes: {codes}") from error
        results, failures = self._collect(workers, time.monotonic() + deadline, doomed)
        if failures:
            told = "\n".join(f"-- rank {rank} of {world} --\n{failures[rank]}" for rank in sorted(failures))
            raise RankFailure(f"{function.__module__}.{function.__qualname__} failed.\n{told}")
        return [results.get(rank) if rank in doomed else results[rank] for rank in range(world)]

    def _collect(
        self, workers: list[Worker], end: float, doomed: Collection[int]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in doomed}
        broken = False
        while waiting and not broken:
            ready = connection.wait(list(waiting), timeout=max(end - time.monotonic(), 0))
            broken = not ready
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                    (results if succeeded else failures)[rank] = value
                except (EOFError, ConnectionError):
                    workers[rank].process.join(_ENDS)
                    failures[rank] = f"the process died, exit code {workers[rank].process.exitcode}"
                    broken = True
            if failures:
                end = min(end, time.monotonic() + _AFTER_A_FAILURE)
        if broken:
            for rank in waiting.values():
                failures[rank] = f"not done in time; it stood here:\n{_stacks_of(workers[rank])}"
        if failures or doomed:
            self._stop(workers)
        return results, failures

    def _start(self) -> Worker:
        self._started += 1
        stacks = Path(self._folder.name) / f"stacks{self._started}"
        context = fork_server()
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        start_with_frameworks(process) if self._frameworks else process.start()
        theirs.close()
        return Worker(process, ours, stacks)

    def _stop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = [each for each in self._workers if all(each is not gone for gone in workers)]

    def close(self) -> None:
        for worker in self._workers:
            with suppress(OSError):  # it died
                worker.pipe.send_bytes(pickle.dumps(None))
        for worker in self._workers:
            worker.process.join(10)
        self._stop(self._workers)
        self._folder.cleanup()


def _stacks_of(worker: Worker) -> str:
    if worker.process.pid is None or not worker.process.is_alive() or not worker.stacks.exists():
        return "(no stack: it was not up yet)"
    os.kill(worker.process.pid, signal.SIGUSR1)
    end, text = time.monotonic() + _ENDS, ""
    # The main thread's stack is written last, and ends in the module that was run.
    while "in <module>" not in text.partition("Current thread")[2]:
        if not worker.process.is_alive() or time.monotonic() > end:
            break
        time.sleep(0.01)
        text = worker.stacks.read_text()
    return text


# -- in a worker -------------------------------------------------------------------------------------------------------


def _serve(pipe: connection.Connection, stacks: str) -> None:
    with open(f"{stacks}.new", "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.replace(f"{stacks}.new", stacks)  # there from now on: before, the signal would end the process
        torch.set_num_threads(1)
        # What torch.empty gives is then NaN: padding that is read as data shows.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        warnings.filterwarnings("error", category=UserWarning)
        # Of torch, once a process, where a backward adds to a gradient of other strides: whichever test comes first.
        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
                if job is not None:
                    job = *pickle.loads(job[0]), *job[1:]
            except EOFError:  # the test process is gone
                return
            except Exception:
                pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
                continue
            if job is None:
                return
            # What is there before a job, the modules that it imports among others, no collection needs to walk again.
            # But garbage that a thread of the last job still held at its end would stay for good.
            gc.collect()
            gc.freeze()
            pipe.send_bytes(dumps(_run_job(*job)))


def _run_job(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world: int,
    store: str | None,
    timeout: float,
    meets: bool,
    backend: str,
) -> tuple[bool, Any]:
    """(whether it returned, what it returned or its traceback)."""
    outcome: tuple[bool, Any]
    # A job draws the same, whatever came before it; as in fresh processes each rank draws its own, but for torch's.
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(0)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if store is not None:
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
        with warnings.catch_warnings():  # what a job silences is heard in the next one
            outcome = True, function(*arguments)
        if dist.is_initialized() and meets:
            # A rank that tears its connections down while another still sends aborts that one.
            dist.barrier(device_ids=[rank] if backend == "nccl" else None)
    except BaseException:
        outcome = False, traceback.format_exc()
    gc.collect()  # frames of an exception keep tensors, and gloo's threads abort the process over them
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    return outcome


def _forget_meshes() -> None:
    """Torch keeps what it found of DTensors by the equality of meshes: a job would meet the groups of an earlier one.

    It asks for groups by name, and a job that makes them in another order gives the names to other ranks. And the
    meshes in its tables hold their groups: each of gloo's keeps threads that wake up a hundred times a second.
    """
    for cache in ("", "_python", "_fast_path"):  # not every version has all of the calls
        getattr(debug, f"_clear{cache}_sharding_prop_cache", lambda: None)()
    for table in (
        _redistribute._gen_transform_infos,
        _collective_utils.MeshTopoInfo.build_from_mesh,
        DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached,
    ):
        table.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    gc.collect()
