"""A lock for the threads of one process: one of them at a time changes the states of an optimizer."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Locked(Protocol):
    lock: "threading.RLock"  # a thread may take it several times: a closure may load states


Self = TypeVar("Self", bound=_Locked)


def exclusive(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Makes a method wait until no other thread is in an exclusive method of the same object."""

    @wraps(method)
    def waiting(self: Self, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *arguments, **keywords)

    return waiting
