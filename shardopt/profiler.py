"""Labels in torch's profiler, for what the ranks exchange."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def label(kind: str, name: object) -> AbstractContextManager[object]:
    """The context of ``shardopt: <kind> <name>`` while a profiler records, else nothing."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"shardopt: {kind} {name}")
