"""Calls of torch's pipelines on params and gradients, which an error would leave half-way: the other ranks would wait.

A zero-bubble schedule computes the gradients of weights apart from those of inputs, by ``torch.autograd.grad``, and
adds them to ``param.grad``: no hook fires, so nothing is reduced. The schedule goes on to its end on all ranks. What it
has added is kept as gradients under ``no_sync()`` are, and all ranks hear in the step that it was not reduced.
"""

import sys
from types import FrameType

_PACKAGE = "torch.distributed.pipelining."

ZERO_BUBBLE = (
    "Run a zero-bubble schedule at stage 1 under `with optimizer.no_sync():`, and call optimizer.reduce_gradients() "
    "after it."
)


def hint() -> str:
    """Returns ``ZERO_BUBBLE`` behind a space, where the process has imported schedules, else nothing."""
    return f" {ZERO_BUBBLE}" if f"{_PACKAGE}schedules" in sys.modules else ""


def is_called_by_pipeline() -> bool:
    """True if a schedule of ``torch.distributed.pipelining`` called what runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            return True
        frame = frame.f_back
    return False
