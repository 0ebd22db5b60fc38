"""Labels in torch's profiler, for what the ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

_NOTHING = nullcontext()
_T = TypeVar("_T")


def labelled(kind: str, name: object, call: Callable[..., _T], *arguments: object) -> _T:
    """Returns what a call returns, which runs within its :func:`label`."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return call(*arguments)
    with label(kind, name):
        return call(*arguments)


def label(kind: str, name: object) -> AbstractContextManager[object]:
    """The context of ``shardopt: <kind> <name>`` while a profiler records, else nothing."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"shardopt: {kind} {name}")
