"""Ranks as ``torchrun`` starts them: new processes that find each other through the environment, for frameworks.

They are forked from a process that has imported torch, and the frameworks where these are asked for, and has done
nothing else (``preload.py``).

::

    def trains(folder):                   # of a module, so that the processes can import it
        ...
        return losses

    launch(trains, folder, killed=True)   # each rank dies of SIGKILL when the function has returned
    losses = launch(trains, folder)       # what each rank returned, by rank

``ranks.py`` is what other tests use: its processes are kept from test to test, and have a process group. A framework
makes its own, keeps singletons, and must be resumed by processes that remember nothing.
"""

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.coverage_contexts import attributed
from tests.support.fork_servers import fork_server, start_with_frameworks


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    world: int = 2,
    killed: bool = False,
    frameworks: bool = False,
    deadline: float = 600.0,
) -> list[Any]:
    """``function(*arguments)`` on ``world`` new ranks; what each returned.

    Args:
        frameworks: forked from a process that has imported Transformers, Accelerate and Lightning.
        killed: each rank kills itself once the function has returned: nothing at the end of a script is run.
        deadline: seconds, of the whole.

    Raises:
        AssertionError: a rank ended otherwise; with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="shardopt-launch-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((*attributed(function, arguments), killed)))
        # As torchrun's, at a port that the system gives: one that is looked for may be another's when it is used.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [_start(folder, rank, world, store.port, frameworks) for rank in range(world)]
        try:
            _wait(processes, time.monotonic() + deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        told = "\n".join(f"-- rank {rank} --\n{(folder / f'out{rank}').read_text()}" for rank in range(world))
        assert codes == [-signal.SIGKILL if killed else 0] * world, f"{function.__name__} ended with {codes}.\n{told}"
        results = [folder / f"result{rank}" for rank in range(world)]
        assert all(result.exists() for result in results), f"{function.__name__} did not return in time.\n{told}"
        return [pickle.loads(result.read_bytes()) for result in results]


def _start(folder: Path, rank: int, world: int, port: int, frameworks: bool) -> BaseProcess:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "launch",  # how frameworks know torchrun
    }
    process = fork_server().Process(target=_serve, args=(str(folder), rank, environment), daemon=False)
    start_with_frameworks(process) if frameworks else process.start()
    return process


def _wait(processes: list[BaseProcess], end: float) -> None:
    """Until all have ended, one has failed, or time is up."""
    while time.monotonic() < end:
        codes = [process.exitcode for process in processes]
        if all(code is not None for code in codes) or any(code is not None and code > 0 for code in codes):
            return
        connection.wait([each.sentinel for each in processes if each.exitcode is None], timeout=end - time.monotonic())


def _serve(name: str, rank: int, environment: dict[str, str]) -> None:
    """In a rank: runs the job in the folder."""
    folder = Path(name)
    out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    function, arguments, killed = pickle.loads((folder / "job").read_bytes())
    result = pickle.dumps(function(*arguments))
    (folder / f"draft{rank}").write_bytes(result)
    (folder / f"draft{rank}").rename(folder / f"result{rank}")
    if killed:
        _wait_for_all(folder)
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_all(folder: Path) -> None:
    """A rank that dies while another one is still in a collective with it would take that one along."""
    end = time.monotonic() + 600
    while len(list(folder.glob("result*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.01)
