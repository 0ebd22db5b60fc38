"""Native kernels are compiled once: a process of the tests finds on disk what another one has compiled.

A run needs some hundred kernels, each of them in most of its processes, and Numba takes half a second for each. What it
compiled is kept below ``.test_cache/`` of the checkout, by the hash of all that it depends on: the kernel's code, what
its free variables are, the package's kernel sources, Numba's version and the processor. A file there is a pickle, as in
Numba's own cache; the folder is the checkout owner's alone. The package itself has no such cache: its users compile.
"""

import functools
import hashlib
import os
import pickle
import platform
from pathlib import Path
from types import CodeType
from typing import Any

import llvmlite.binding
import numba
from numba.core import serialize
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from shardopt.kernels import native_formats, native_words
from tests.support.paths import ROOT

FOLDER = ROOT / ".test_cache" / "kernels"
SOURCES = ROOT / "shardopt" / "kernels"
_COMPILE = Dispatcher.compile


def install() -> None:
    """From now on this process, and those forked from it, look there first."""
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    Dispatcher.compile = _compile


def _compile(self: Any, signature: Any) -> Any:
    key = None if self.overloads else _key(self.py_func, signature)
    if key is None:
        return _COMPILE(self, signature)
    path = FOLDER / key
    with global_compiler_lock:
        if path.exists():
            result = CompileResult._rebuild(self.targetctx, *pickle.loads(path.read_bytes()))
            self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
            self.add_overload(result)
            return result.entry_point
        entry = _COMPILE(self, signature)
    (result,) = self.overloads.values()
    if not result.library.has_dynamic_globals:  # an address of this process in its code
        # Under a name of its own first: another process may be writing, or reading, the same one.
        draft = path.with_name(f"{key}.{os.getpid()}")
        draft.write_bytes(serialize.dumps(result._reduce()))
        draft.replace(path)
    return entry


def _key(function: Any, signature: Any) -> str | None:
    """None: not one of the package's kernels, or one whose free variables have no name."""
    file = function.__code__.co_filename
    if not (file.startswith("<shardopt native ") or Path(file).parent == SOURCES):
        return None
    cells = [_name(cell.cell_contents) for cell in function.__closure__ or ()]
    if None in cells:
        return None
    told = (_code(function.__code__), cells, str(signature), _environment())
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _name(value: Any) -> str | None:
    """Of what a kernel closes over: a number, or a word of the vocabulary."""
    if isinstance(value, int | float | str):
        return repr(value)
    for module in (native_words, native_formats):
        for name, each in vars(module).items():
            if each is value:
                return f"{module.__name__}.{name}"
    if isinstance(value, numba.types.Type | type):
        return repr(value)
    return None


def _code(code: CodeType) -> tuple[Any, ...]:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code.hex(), constants, code.co_names, code.co_freevars, code.co_varnames


@functools.cache
def _environment() -> str:
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.py")))
    cpu = llvmlite.binding.get_host_cpu_name(), sorted(llvmlite.binding.get_host_cpu_features().items())
    versions = platform.python_version(), numba.__version__, llvmlite.__version__
    return repr((hashlib.sha256(sources).hexdigest(), cpu, versions))
