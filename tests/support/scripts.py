"""Programs run as a user runs them, in a process that has imported torch already.

::

    done = run_script(path, "--steps", "3", cwd=tmp_path)
    done = run_module("shardopt", "plan", "--params", "7e8")
    assert done.returncode == 0 and "stage 1" in done.stdout, done.stderr

The process is forked from one that has imported torch, Numba and shardopt (``preload.py``), runs the program as
``__main__`` with its own arguments, folder and environment, and ends as an interpreter does: threads are joined, then
``atexit`` functions run. What depends on a process that has imported nothing (import time, absent libraries) needs
``subprocess``.
"""

import atexit
import os
import runpy
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.fork_servers import fork_server, start_with_frameworks

DEADLINE = 600.0  # seconds, of a program


class Done(NamedTuple):
    """How a program ended."""

    returncode: int | None  # minus the signal that killed it; None: it did not end in time, and was killed
    stdout: str
    stderr: str


class Program:
    """A program that runs."""

    def __init__(
        self,
        target: str,
        arguments: tuple[str, ...] = (),
        is_module: bool = False,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        warn: bool = False,
        frameworks: bool = False,
    ) -> None:
        """Starts it.

        Args:
            target: a file or, where ``is_module``, the name of a module.
            warn: every warning is an error.
            frameworks: the process has imported Transformers, Accelerate and Lightning as well.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="shardopt-script-")
        for name in ("stdout", "stderr"):
            Path(self._folder.name, name).touch(0o600)
        job = (self._folder.name, target, arguments, is_module, str(cwd or os.getcwd()), dict(env or {}), warn)
        self.process: BaseProcess = fork_server().Process(target=_run, args=job)
        start_with_frameworks(self.process) if frameworks else self.process.start()

    def printed(self) -> str:
        """What stands on its standard output so far."""
        return Path(self._folder.name, "stdout").read_text()

    def wait(self, seconds: float = DEADLINE) -> Done:
        """Waits for its end."""
        self.process.join(seconds)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        texts = [(Path(self._folder.name) / name).read_text() for name in ("stdout", "stderr")]
        self._folder.cleanup()
        return Done(code, *texts)


def run_script(path: Path | str, *arguments: Any, **options: Any) -> Done:
    """``python PATH ARGUMENTS``; options are those of :class:`Program`."""
    return Program(str(path), tuple(map(str, arguments)), **options).wait()


def run_module(name: str, *arguments: Any, **options: Any) -> Done:
    """``python -m NAME ARGUMENTS``."""
    return Program(name, tuple(map(str, arguments)), is_module=True, **options).wait()


# -- in the process ----------------------------------------------------------------------------------------------------


def _run(
    folder: str, target: str, arguments: tuple[str, ...], is_module: bool, cwd: str, env: dict[str, str], warn: bool
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    if warn:
        warnings.simplefilter("error")
    sys.argv = [target, *arguments]
    code = 0
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        # As an interpreter does with what nobody caught.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # As an interpreter ends; a forked child would skip both.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
