"""How long a wait for another rank may take: its deadline, and longer while one rank reads the params alone.

A rank that reads alone (:mod:`shardopt.domain.alone`) says so all the time to the servers of the other ranks. A wait of
theirs whose time is up goes on for as long again if such a beat has come since it began. What waits in torch cannot be
given more time once it waits, and a message whose time is up breaks gloo's connections. So messages are waited for
without an end, and a thread ends the wait.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .notes import note_of
from .tags import NEVER_SENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .messages import AskingGather

_TICK = 0.05  # seconds between two looks at the waits for messages
_WITHOUT_END = timedelta(days=365)

_NEWS = 2.0  # seconds in which a rank hears that a reader was killed, once a connection of a backend has ended


class _Readers:
    """The ranks of a group that read alone.

    Attributes:
        beat: when one of them has last said so.
        count: how many do at this moment.
    """

    beat, count = 0.0, 0


def note_beat(groups: Sequence[dist.ProcessGroup]) -> None:
    """Records that a rank of these groups reads alone at this moment."""
    for group in groups:
        note_of(group, _Readers).beat = time.monotonic()


def is_read_alone(group: dist.ProcessGroup | None, since: float) -> bool:
    """True if some rank of the group has said since then that it reads alone."""
    return group is not None and note_of(group, _Readers).beat > since


@contextmanager
def attending(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """A context in which a rank of these groups reads alone."""
    for group in groups:
        note_of(group, _Readers).count += 1
    try:
        yield
    finally:
        for group in groups:
            note_of(group, _Readers).count -= 1


def await_news_of_readers(group: dist.ProcessGroup | None) -> None:
    """Waits a moment, after an exchange has failed, until it is known whether a rank that reads alone was killed."""
    end = time.monotonic() + _NEWS
    while group is not None and note_of(group, _Readers).count and time.monotonic() < end:
        time.sleep(_TICK)


def wait_for_collective(work: Any, deadline: timedelta, group: dist.ProcessGroup) -> None:
    """Waits for a collective. Raises RuntimeError after its deadline."""
    while True:
        began = time.monotonic()
        try:
            work.wait(deadline)
            return
        except RuntimeError:
            if work.is_completed() or not is_read_alone(group, began):
                raise


def wait_for_message(
    work: Any, deadline: timedelta, group: dist.ProcessGroup, peer: int, asking: AskingGather | None = None
) -> None:
    """Waits for a message of gloo. Raises RuntimeError after its deadline; the group cannot be used any more then."""
    wait = _MessageWait(group, peer, deadline.total_seconds(), asking)
    _WATCH.add(wait)
    try:
        work.wait(_WITHOUT_END)
    except RuntimeError as error:
        if wait.is_over:
            raise RuntimeError(f"no message came within {wait.seconds:g} s") from error
        raise
    finally:
        _WATCH.remove(wait)


def end_waits(group: dist.ProcessGroup, peer: int) -> None:
    """Ends all that gloo waits for in a group, and its connections, by a message whose time is up at once."""
    with suppress(RuntimeError):
        never: Any = dist.irecv(torch.empty(1), group_src=peer, group=group, tag=NEVER_SENT)
        never.wait(timedelta(milliseconds=1))


@dataclass(eq=False)
class _MessageWait:
    group: dist.ProcessGroup
    peer: int
    seconds: float
    asking: AskingGather | None
    began: float = field(default_factory=lambda: time.monotonic())
    is_over: bool = False

    def look(self) -> None:
        """Ends the wait if its time is up."""
        if self.asking is not None:
            with suppress(RuntimeError):  # no more threads: the deadline still holds, as do those of other waits
                self.asking.look()
        if time.monotonic() < self.began + self.seconds or self.is_over:
            return
        if is_read_alone(self.group, self.began):
            self.began = note_of(self.group, _Readers).beat
            return
        self.is_over = True
        end_waits(self.group, self.peer)


class _Watch:
    """The thread that ends waits for messages; it ends when nothing waits."""

    def __init__(self) -> None:
        self._waits: dict[_MessageWait, None] = {}
        self._lock = threading.Lock()
        self._is_on = False

    def add(self, wait: _MessageWait) -> None:
        with self._lock:
            self._waits[wait] = None
            if not self._is_on:
                self._is_on = True
                threading.Thread(target=self._run, name="shardopt-deadlines", daemon=True).start()

    def remove(self, wait: _MessageWait) -> None:
        with self._lock:
            self._waits.pop(wait, None)

    def _run(self) -> None:
        while True:
            time.sleep(_TICK)
            with self._lock:
                waits = list(self._waits)
                if not waits:
                    self._is_on = False
                    return
            for each in waits:
                each.look()


_WATCH = _Watch()
# A forked child has the table but not the thread.
os.register_at_fork(after_in_child=_WATCH.__init__)  # type: ignore[misc]
