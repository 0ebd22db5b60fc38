"""Fork servers of ``multiprocessing`` that are forked themselves, from this process before it runs a first test.

A server that ``multiprocessing`` starts would import anew what this process has imported (``preload.py``): 5 seconds.
The one with frameworks (``preload_frameworks.py``) imports these, and only when the first process of it is asked for.
"""

import faulthandler
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

_WITH_FRAMEWORKS = forkserver.ForkServer()
_filters: list[Any] = []
_needed: list[int] = []  # the end of a pipe that tells the server with frameworks to begin


def begin() -> None:
    """Forks the servers: early, as processes are to find no test's modules, patches or files."""
    if _needed:
        return
    before = list(warnings.filters)
    from tests.support import preload  # noqa: F401

    _filters[:] = [each for each in warnings.filters if each not in before]  # of the libraries
    begins, needed = os.pipe()
    _WITH_FRAMEWORKS.set_forkserver_preload(["tests.support.preload_frameworks"])
    _start(_WITH_FRAMEWORKS, begins)
    os.close(begins)
    _needed.append(needed)
    forkserver._forkserver.set_forkserver_preload([])  # type: ignore[attr-defined]
    _start(forkserver._forkserver)  # type: ignore[attr-defined]


def fork_server() -> ForkServerContext:
    """Starts processes as ``multiprocessing``'s contexts do, with all that ``preload.py`` imports in them already."""
    begin()
    context = get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    return context


def start_with_frameworks(process: BaseProcess) -> None:
    """Starts a process of :func:`fork_server` with what ``preload_frameworks.py`` imports in it as well."""
    os.write(_needed[0], b"1")
    with patch.object(forkserver, "connect_to_new_process", _WITH_FRAMEWORKS.connect_to_new_process):
        process.start()


def _start(server: forkserver.ForkServer, begins: int | None = None) -> None:
    """``begins``: what the server reads from first, so that it waits until it is needed."""

    def fork(_: str, arguments: Sequence[str], passed: Sequence[int]) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a worker has a thread that waits for messages
            child = os.fork()
        if not child:
            _serve(arguments[-1], [*passed, *([] if begins is None else [begins])], begins)
        return child

    resource_tracker.ensure_running()  # a process of its own, that is not forked
    with patch.object(util, "spawnv_passfds", fork):
        server.ensure_running()


def _filter_as_python_does() -> None:
    """As in a new process; those of pytest make every warning an error."""
    warnings.resetwarnings()
    warnings.filters.extend(_filters)  # type: ignore[attr-defined]
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__", append=True)
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category=category, append=True)


def _serve(program: str, passed: Sequence[int], begins: int | None) -> None:
    """In the server: leaves what belongs to pytest and its workers, and runs what a new interpreter would run."""
    code = 1
    try:
        faulthandler.disable()  # it would write to a file of pytest's
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in map(int, os.listdir("/dev/fd")):
            if each > 2 and each not in passed and each != nothing:
                # Not closed: what still knows the number must not close another file that gets it.
                os.dup2(nothing, each)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        sys.meta_path = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest.")]
        _filter_as_python_does()
        for each_server in (_WITH_FRAMEWORKS, forkserver._forkserver):  # type: ignore[attr-defined]
            each_server.__init__()  # a lock is held, and processes may begin servers of their own
        _needed.clear()
        gc.collect()
        gc.freeze()
        if begins is None or os.read(begins, 1):
            exec(program, {})
        code = 0
    except SystemExit:  # the process of the tests has ended
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
