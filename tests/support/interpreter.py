"""Triton's interpreter patches ``triton.language`` at each call of a function within a kernel; here, once a launch.

A patch stays until the launch ends, so the later ones of a launch change nothing, and took a good part of its time.
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
    if languages and languages <= _patched:
        return interpreter._LangPatchScope()  # of a call within a launch: nothing is to be restored
    _patched.update(languages)
    return _Launch(_patch(function))
