"""Functions that torch.compile leaves out of its graphs."""

from collections.abc import Callable
from typing import Any, TypeVar

# Part of torch itself: torch.compiler.disable() would import all of Dynamo.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[Function], Function]:
    """Keeps a function, and all that it calls, out of compiled code, as ``torch.compiler.disable(reason=...)`` does.

    That would wrap the function in one that tells Dynamo so anew in each call, at ten times the price of a hook.

    Args:
        reason: what Dynamo says where graphs may not break, before anything has run.
    """

    def mark(function: Function) -> Function:
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        return function

    return mark
