"""Imports and compiles as at the beginning of the process, whatever a script has changed since.

The compilers load at the first step, after the script's own lines. By then it may have replaced ``builtins.print`` (so
that rank 0 alone prints), put a folder with any names in front of ``sys.path``, left its directory, or made warnings
errors. Numba looks its functions up by identity and fails with another ``print``.
"""

import builtins
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import BuiltinImporter, ModuleSpec

# An empty entry is the current directory, which may be another one by then.
_PATH = tuple(each for each in sys.path if each)
_BUILTINS = ModuleSpec("builtins", BuiltinImporter)  # type: ignore[arg-type]  # typeshed: of an instance
_lock = threading.RLock()  # two threads that began at once would put each other's changes back in the wrong order


@contextmanager
def as_at_the_beginning() -> Iterator[None]:
    """A context with Python's own builtins, the ``sys.path`` of ``import shardopt``, and warnings that raise nothing.

    What other threads do meanwhile, a second at most, is under it too: a ``print`` that the script had made silent
    prints. Test: tests/optim/test_first_use.py.
    """
    with _lock, warnings.catch_warnings(), ExitStack() as then:
        warnings.simplefilter("ignore")
        then.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path[:] = [*_PATH, *(each for each in sys.path if each not in _PATH)]
        then.callback(vars(builtins).update, dict(vars(builtins)))
        # Python keeps a copy of what builtins held before any script ran, and this puts it back in place.
        BuiltinImporter.create_module(_BUILTINS)
        then.enter_context(_some_directory())
        yield


@contextmanager
def _some_directory() -> Iterator[None]:
    """A context in which there is a current directory; libraries ask for it when they are imported."""
    try:
        os.getcwd()
    except OSError:  # it was removed
        with ExitStack() as then:
            with suppress(OSError):
                before = os.open(".", os.O_RDONLY)
                then.callback(os.close, before)
                then.callback(os.chdir, before)
                os.chdir("/")
            yield
    else:
        yield
