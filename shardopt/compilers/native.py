"""Native kernels: Numba compiles a function to object code once, and LLVM links that into each process.

A kernel takes int64 (``q``) and fp32 (``f``) by value, writes to addresses, and calls nothing. So its object code needs
neither Numba nor Python to run: a process that finds it in the cache never imports Numba, which takes half a second to
import, as much again to make ready for a first function, and its part of every full garbage collection.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..beginning import as_at_the_beginning
from ..errors import UnsupportedVersionError
from . import cache
from .versions import require

# IEEE arithmetic as written. No fastmath: LLVM must neither reorder nor contract into FMA. NumPy's error model: that of
# Python would test every divisor for zero. Nobody calls a kernel, or a word, from Python by way of Numba.
COMPILE_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
_KINDS: dict[str, Any] = {"q": ctypes.c_int64, "f": ctypes.c_float}
_lock = threading.Lock()


class ObjectCode(NamedTuple):
    symbol: str
    code: bytes


def native_kernel(text: str, kinds: str, function: Callable[[], Callable[..., Any]]) -> Callable[..., None]:
    """Returns a kernel, to be called from several threads at once; it runs without the GIL.

    Args:
        text: all that tells this kernel from others of this version of the package, for the cache.
        kinds: ``q`` or ``f`` for each argument.
        function: returns what Numba compiles; called if the cache does not have it.

    Raises:
        UnsupportedVersionError: Numba is needed, and missing, too old or switched off.
    """
    with _lock, as_at_the_beginning():
        key = cache.key_of(text, kinds)
        found = cache.find(key)
        if found is None:
            found = _compile(kinds, function)
            cache.keep(key, found.symbol, found.code)
        else:
            found = ObjectCode(*found)
        return _link(found, kinds)


def _compile(kinds: str, function: Callable[[], Callable[..., Any]]) -> ObjectCode:
    with _without_collections():
        require("numba", "cpu tensors")
        import numba

        if numba.config.DISABLE_JIT:
            raise UnsupportedVersionError(
                "unset NUMBA_DISABLE_JIT before this process starts: with it Numba compiles nothing, and the update "
                "for cpu tensors runs as compiled code alone, so no step can be taken."
            )
        types = {"q": numba.types.int64, "f": numba.types.float32}
        signature = numba.types.void(*(types[kind] for kind in kinds))
        (compiled,) = numba.njit(signature, **COMPILE_OPTIONS)(function()).overloads.values()
        _, _, (code, _) = compiled.library.serialize_using_object_code()
        return ObjectCode(compiled.fndesc.llvm_func_name, code)


@contextmanager
def _without_collections() -> Iterator[None]:
    """A context without garbage collections: a fifth of the first compilation, which makes objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _machine() -> tuple[Any, Any, str]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    return llvm, llvm.Target.from_triple(triple), triple


def _link(found: ObjectCode, kinds: str) -> Callable[..., None]:
    llvm, target, triple = _machine()
    module = llvm.parse_assembly("")
    module.triple = triple
    # An engine of its own: kernels that different processes compiled may have symbols of one name.
    engine = llvm.create_mcjit_compiler(module, target.create_target_machine(jit=True))
    engine.add_object_file(llvm.ObjectFileRef.from_data(found.code))
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *(_KINDS[kind] for kind in kinds))
    # Numba's convention: addresses for a result, here None, and for an exception, which a kernel does not have.
    nothing = ctypes.create_string_buffer(16)
    at = ctypes.addressof(nothing)
    kernel = functools.partial(prototype(engine.get_function_address(found.symbol)), at, at + 8)
    kernel.needs = engine, nothing  # type: ignore[attr-defined]
    return kernel
