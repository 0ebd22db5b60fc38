"""Whose turn it is: one call at a time reads or changes what an optimizer holds.

A step is of one moment only between its end and the next one's beginning. Any call may come in the middle of it: from
another thread, which can wait, or on the same thread (from a signal handler, a finalizer, a hook), which cannot::

    the thread that trains   | step( closure )  update, gather | ........ | step() ...
    another thread             state_dict() waits ............ | copies |   the step waits
    a handler                  as before a step   StateError     right      StateError

While its closure runs, a step has lent its turn: a closure may load states or save. Hooks on forward and backward hold
the turn one by one. From the first gradient of a backward to the last one no hook need run, but sums are half made: a
round is open, which is a fact of the reducer.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ..errors import StateError

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks
    from ..partition.reducer import Reducer

_Method = TypeVar("_Method", bound=Callable[..., Any])

_PAUSE = 0.001  # seconds between two looks at a round; far less than a backward takes


class Turn:
    """The turn of one optimizer, and the call that has it.

    Attributes:
        call: what the thread that holds the turn does; None: nothing, or its closure runs. That thread alone writes it.
        trainer: the thread that ran the last forward, whose backward a round belongs to.
        alone: the context in which this rank reads alone, while it is open.
        reducer: of the main domain, while hooks take gradients for it: its round is open once a backward has brought
            some gradients, and not all.
    """

    def __init__(self, ranks: Callable[[], Ranks], updates_in_round: bool):
        """
        Args:
            ranks: returns the ranks that make collective calls together; the deadline of a wait is theirs.
            updates_in_round: a backward is a step (``release_gradients``).
        """
        self.call: str | None = None
        self.trainer = 0
        self.alone: str | None = None
        self.reducer: Reducer | None = None
        # Is called ahead of a call that all ranks make together.
        self.before_together: Callable[[str], None] = lambda _: None
        self._lock = threading.RLock()
        self._frame: FrameType | None = None  # the one whose `with` holds the turn
        self._is_lent = False
        self._ranks, self._updates_in_round = ranks, updates_in_round

    @property
    def is_round_open(self) -> bool:
        """True if a backward has brought some gradients, and not all."""
        return self.reducer is not None and self.reducer.is_open

    # -- public calls ----------------------------------------------------------------------------------------------

    def take(self, call: str) -> _Taken:
        """A context of a public call that reads or changes states, on this rank alone.

        Raises:
            StateError: this thread is in the middle of another call, or another thread has the turn for too long.
        """
        return _Taken(self, call, self._updates_in_round)

    def take_between(self, call: str) -> _Taken:
        """Like ``take``, for a call that cannot come in the middle of a backward either."""
        return _Taken(self, call, True)

    def take_together(self, call: str) -> _Taken:
        """Like ``take_between``, for a call that all ranks make together. On several ranks no signal handler can.

        Each rank's handler runs at another point of the script: where one is in a handler, another may be in a step.
        Test: test_handlers_on_all_ranks in tests/step/test_turns.py.
        """
        self.check(call)
        self.before_together(call)
        if _is_in_signal_handler() and self._ranks().size > 1:  # in this order: ranks that cannot be told can close
            raise StateError(
                f"set a flag in the signal handler, and call {call} on every rank once step() has returned: a handler "
                "runs at another point of the script on each rank, so messages of this call would meet those of "
                "another one. Nothing was done."
            )
        return _Taken(self, call, True)

    def check(self, call: str, between: bool = True) -> None:
        """Raises StateError if this thread is in the middle of another call. Does not wait.

        Args:
            between: the call cannot come in the middle of a backward.
        """
        if between:
            self._check_with_others(call)
        if not self._lock.acquire(blocking=False):
            return  # another thread has it
        try:
            self._check_within(call, between)
        finally:
            self._lock.release()

    def _check_with_others(self, call: str) -> None:
        if self.alone is not None:
            raise StateError(
                f"leave `with optimizer.{self.alone}:` before {call}, which every rank makes: inside, the other ranks "
                "wait for this one. Nothing was done."
            )

    def _check_within(self, call: str, between: bool) -> None:
        """Raises StateError if this thread, which holds the lock, is in the middle of another call."""
        inside = self._inside()
        if inside is None and between and self.is_round_open and _in_backward():
            inside = "backward()"
        if inside is not None:
            raise StateError(
                f"set a flag (in a signal handler, say), and call {call} once {inside} has returned: it was called in "
                f"the middle of {inside}, on the same thread, where values of two moments lie side by side. Nothing "
                "was done."
            )

    def _inside(self) -> str | None:
        """The call that this thread, which holds the lock, is in the middle of."""
        if self.call is not None and not _is_on_stack(self._frame):
            # An interrupt (Ctrl-C) came as the context was left, and kept it from giving the turn back.
            self.call = self._frame = None
            self._lock.release()
        return self.call

    # -- within a call ---------------------------------------------------------------------------------------------

    @contextmanager
    def lend(self) -> Iterator[None]:
        """A context of the call that has the turn, in which this thread may make other calls: its closure runs."""
        before = self.call, self._frame, self._is_lent
        self.call, self._frame, self._is_lent = None, None, True
        try:
            yield
        finally:
            self.call, self._frame, self._is_lent = before

    def hold(self, what: str) -> _Held:
        """A context of a hook of ours on forward or backward, wherever it runs."""
        return _Held(self, what)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, call: str) -> None:
        seconds = self._ranks().seconds
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise self._too_late(call, seconds, self.call or "a closure")

    def _wait_for_round(self, call: str) -> None:
        """Waits until the backward of another thread is through. The lock is held before and after, not meanwhile."""
        seconds = self._ranks().seconds
        end = time.monotonic() + seconds
        while self.is_round_open:
            self._lock.release()
            time.sleep(_PAUSE)
            self._wait(call)
            if time.monotonic() > end and self.is_round_open:
                self._lock.release()
                raise self._too_late(call, seconds, "backward()")

    def _too_late(self, call: str, seconds: float, inside: str) -> StateError:
        return StateError(
            f"make the call once {inside} of the other thread has returned, or give a longer Tuning(timeout=...): "
            f"{call} waited for it for {seconds:g} s. Nothing was done."
        )


class _Taken:
    """The context of a public call, as often as the call is made."""

    __slots__ = ("_between", "_call", "_turn")

    def __init__(self, turn: Turn, call: str, between: bool):
        self._turn, self._call, self._between = turn, call, between

    def __enter__(self) -> None:
        # One look at each fact: steps and forwards come here, and nearly always find the turn free.
        turn, call, between = self._turn, self._call, self._between
        if between and turn.alone is not None:
            turn._check_with_others(call)
        if not turn._lock.acquire(blocking=False):
            turn._wait(call)
        is_open = between and turn.reducer is not None and turn.reducer.is_open
        if is_open or turn.call is not None:
            try:
                turn._check_within(call, between)
            except StateError:
                turn._lock.release()
                raise
            if is_open and turn.trainer != threading.get_ident():
                turn._wait_for_round(call)
        turn._frame = sys._getframe(1)
        turn.call = self._call  # last: what interrupts this thread before finds the turn free

    def __exit__(self, *_: object) -> None:
        turn = self._turn
        turn.call = turn._frame = None  # this thread had no other call, or had lent its turn
        turn._lock.release()


class _Held:
    """The context of one hook."""

    __slots__ = ("_before", "_turn", "_what")

    def __init__(self, turn: Turn, what: str):
        self._turn, self._what = turn, what
        self._before: tuple[str | None, FrameType | None] | None = None  # None: the turn is not held

    def __enter__(self) -> None:
        turn = self._turn
        if not turn._lock.acquire(blocking=False):
            if turn._is_lent:
                return  # a thread of autograd's works for the closure, whose thread has the turn
            turn._wait(self._what)
        self._before = turn.call, turn._frame
        turn._frame = sys._getframe(1)
        turn.call = self._what

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._turn.call, self._turn._frame = self._before
            self._turn._lock.release()


def holding(what: str) -> Callable[[_Method], _Method]:
    """Makes a method of an object that has a ``turn`` hold it: a hook of ours on forward or backward."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def held(self: Any, *arguments: Any, **keywords: Any) -> Any:
            turn: Turn = self.turn
            if not turn._lock.acquire(False):
                with turn.hold(what):
                    return method(self, *arguments, **keywords)
            # What `hold` does, in place: a context that is made anew would double the calls of a hook.
            before, turn._frame, turn.call = (turn.call, turn._frame), sys._getframe(), what
            try:
                return method(self, *arguments, **keywords)
            finally:
                turn.call, turn._frame = before
                turn._lock.release()

        return cast(_Method, held)

    return decorate


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _is_on_stack(frame: FrameType | None) -> bool:
    return any(each is frame for each in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in_signal_handler() -> bool:
    """True if a function that handles a signal runs on this thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(each)) for each in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame in _frames())


def _code_of(handler: Any) -> object:
    """Returns the code that runs as a function, a method, a partial or an object is called; None of anything else."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
