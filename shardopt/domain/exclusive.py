"""Threads of one process take turns with an optimizer: what changes its states is done by one of them at a time."""

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
    """A method that waits until no other thread is in one of these."""

    @wraps(method)
    def waiting(self: Self, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *arguments, **keywords)

    return waiting
