"""Triton's interpreter patches the language at each call of a function that a kernel calls. Here a launch patches once.

What it patches stays until the launch ends, so the calls that follow change nothing: they took half of its time.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[int] = set()  # the modules of the language that this launch has patched


class _Launch:
    """The scope of a launch, which ends it."""

    def __init__(self, scope: Any):
        self._scope = scope

    def restore(self) -> None:
        _patched.clear()
        self._scope.restore()


def install() -> None:
    """From now on this process, and those forked from it, interpret so."""
    interpreter._patch_lang = _patch_once


def _patch_once(function: Any) -> Any:
    languages = {id(each) for each in function.__globals__.values() if each is tl or each is tl.core}
    if languages <= _patched:
        return None  # a call within a launch, which does not look at its scope
    _patched.update(languages)
    return _Launch(_patch(function))
