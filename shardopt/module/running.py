"""Tells if a call still runs: torch calls no hook after a KeyboardInterrupt, a SystemExit, a cancelled task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

MODULE_FILE = nn.Module.__call__.__code__.co_filename


def frame_of_call() -> FrameType | None:
    """Returns the frame of the module's call whose hook runs; None if torch calls the hook from elsewhere.

    It keeps what the call holds, its inputs among others: drop it when the call has ended.
    """
    frame: FrameType | None = sys._getframe(3)  # below the hook
    while frame is not None and frame.f_code.co_filename != MODULE_FILE:
        frame = frame.f_back
    return frame


def is_left(frame: FrameType) -> bool:
    """True if the call of this frame, of any thread, has returned or raised."""
    stacks = sys._current_frames().values()
    return all(each is not frame for stack in stacks for each in _frames_from(stack))


def in_backward() -> bool:
    """True in the functions and hooks that autograd calls."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_runs() -> bool:
    """True while a backward runs, in any thread: on a GPU autograd has threads of its own, and the caller waits."""
    return in_backward() or bool(threads_in_backward())


def threads_in_backward() -> set[int]:
    """Returns the threads that called a backward which has not returned."""
    callers = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
    stacks = sys._current_frames().items()
    return {thread for thread, stack in stacks if any(each.f_code in callers for each in _frames_from(stack))}


def roots_of_backward() -> list[torch.Tensor]:
    """Returns the tensors whose ``backward()`` runs, in any thread: autograd itself tells nobody."""
    code = torch.autograd.backward.__code__
    frames = [each for stack in sys._current_frames().values() for each in _frames_from(stack) if each.f_code is code]
    return [root for each in frames for root in each.f_locals["tensors"] if isinstance(root, torch.Tensor)]


def runs_a_method(root: nn.Module) -> bool:
    """True if a method of the model, or of a module in it, is running: of the user's, ``state_dict()`` is none."""
    modules = set(root.modules())
    for frame in _frames_from(sys._getframe(1)):
        names = frame.f_code.co_varnames
        if names and names[0] == "self" and frame.f_code.co_filename != MODULE_FILE:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in modules:
                return True
    return False


def runs(function: Callable[..., Any]) -> bool:
    """True if a call of this function runs on this thread."""
    return any(frame.f_code is function.__code__ for frame in _frames_from(sys._getframe(1)))


def callers_of(method: Callable[..., Any]) -> Iterator[Any]:
    """Yields the objects whose method this is, in its calls that run on this thread, the innermost first."""
    for frame in _frames_from(sys._getframe(1)):
        if frame.f_code is method.__code__:
            yield frame.f_locals["self"]


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
