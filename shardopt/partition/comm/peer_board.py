"""A notice board in each rank's memory, which its peers read: the rank's progress, and the addresses of its buffers.

Waiting for a peer is then reading its board (a microsecond), without a message. A board names the round of reduction of
its rank, and the attempt at that round. A rank that abandons an attempt after an exception goes to the next attempt.
Peers that wait for the rank in the earlier attempt notice that and abandon it too; peers at the next attempt wait for
the rank there. So no rank adds this attempt's gradients to sums of the attempt before.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ...errors import CommunicationError
from .ended import ended_ranks
from .host_group import host_group
from .left import error_of, kind_of
from .messages import book_of, waiting

if TYPE_CHECKING:
    from .group import Ranks
    from .peer_memory import PeerMemory

# Addresses that a board holds. A rank with more buffers under way publishes the rest later. Test:
# test_many_buckets_and_a_late_rank in tests/step/test_stages.py.
MAX_ADDRESSES = 64
# Peers read in this order: memory is copied from lower to higher addresses.
_AT, _MISSED, _KIND, _FAILED, _FILLED, _CONSUMED, _FIRST_ADDRESS = range(7)
# Attempts at one round, at most. Round and attempt are one number: a peer that reads while both change would see the
# new round with the old attempt.
_ATTEMPTS = 1 << 20
# Reading a board takes a microsecond, a wait for a rank that computes takes milliseconds. After some reads this rank
# sleeps between two of them, which leaves the core to the other rank.
_READS_WITHOUT_PAUSE = 20
_PAUSE = 50e-6  # seconds
# A pause grows to this part of what was waited for so far: the wait is hardly longer, and takes far fewer reads.
_PART = 1 / 16
_LONGEST_PAUSE = 1e-3
# Reads of one board between two reads of all boards. 500 pauses are 25 to 500 ms, so that reading all costs little.
_READS_BEFORE_ALL = 500


class Backoff:
    """The pauses between two reads of a board: none at first, then short ones, until a deadline."""

    def __init__(self, seconds: float, ranks: Ranks | None = None):
        """``seconds``: until the wait is given up, unless one of the ranks reads alone."""
        self.reads, self._began, self._seconds, self._ranks = 0, time.monotonic(), seconds, ranks
        self._pause = _PAUSE

    def again(self) -> bool:
        """Sleeps after many reads. Returns True if the caller should read again, False after the deadline."""
        self.reads += 1
        if self.reads <= _READS_WITHOUT_PAUSE:
            return True
        time.sleep(self._pause)
        now = time.monotonic()
        self._pause = min(max(_PAUSE, (now - self._began) * _PART), _LONGEST_PAUSE)
        if now >= self._began + self._seconds and self._ranks is not None and self._ranks.is_read_alone(self._began):
            self._began = now
        return now < self._began + self._seconds


class Notice(NamedTuple):
    """The contents of a rank's board."""

    # Rounds that all ranks finished before this one, times _ATTEMPTS, plus the attempts at it that were abandoned.
    at: int
    # One more than the rank that did not come, so that the last attempt was abandoned; 0: an error of its own.
    missed: int
    kind: int  # of the error by which the last attempt was abandoned; see left.py
    failed: int  # the last closure of a step that raised on this rank, counted from 1
    filled: int  # buffers of this attempt that may be read
    consumed: int  # buffers of every other rank that this rank has read in this attempt
    addresses: Sequence[int]


class Reached(NamedTuple):
    """A point of an attempt: a rank has reached it once a number on its board is above ``position``."""

    where: int
    position: int

    @staticmethod
    def filled(position: int) -> Reached:
        """Its buffer of this position may be read."""
        return Reached(_FILLED, position)

    @staticmethod
    def consumed(position: int) -> Reached:
        """It has read the buffers of this position."""
        return Reached(_CONSUMED, position)

    def __call__(self, notice: Notice) -> bool:
        return (notice.filled if self.where == _FILLED else notice.consumed) > self.position


class PeerBoard:
    """This rank's board, and reads of the other ranks' boards.

    Attributes:
        members: the ranks that read each other's boards, this one among them.
    """

    def __init__(self, ranks: Ranks, memory: PeerMemory, pids: tuple[int, ...], members: Sequence[int] | None = None):
        """Collective, whoever the members are; None: all ranks."""
        self._ranks, self._memory, self.pids = ranks, memory, pids
        self.members = tuple(range(ranks.size) if members is None else members)
        self._own = np.zeros(_FIRST_ADDRESS + MAX_ADDRESSES, dtype=np.int64)
        self._own[_AT] = -1
        assert ranks.group is not None
        self._group = host_group(ranks.group)
        self._book = book_of(self._group)
        self._book.boards += 1
        self._tag = -self._book.boards * _FIRST_ADDRESS
        # With the board goes what is noted of it, else each closed optimizer would leave two numbers to the group.
        forget = self._book.counts.pop
        for place in (_FILLED, _CONSUMED):
            weakref.finalize(self, forget, self._tag + place, None).atexit = False
        self.closure = 0  # the closure that runs now, counted from 1 and the same on all ranks; 0: none
        self._fence = threading.Lock()
        where = ranks.exchange([self._own.ctypes.data], "exchanging notice boards")
        self._addresses = [address for (address,) in where]
        self._seen = torch.empty(self._own.size, dtype=torch.int64)
        self._numbers = self._seen.numpy()  # the same memory, which NumPy reads in a fifth of the time

    def start_round(self, round_number: int) -> None:
        self._ranks.check_usable("beginning to reduce gradients")
        self._own[_MISSED] = 0
        self._go_to(max(round_number * _ATTEMPTS, int(self._own[_AT])))

    def abandon_round(self, round_number: int) -> None:
        """Shows the peers that this rank abandons its attempt at the round, and by what error, if one is handled."""
        self._own[_KIND] = kind_of(sys.exc_info()[1])
        self._go_to(max(round_number * _ATTEMPTS, int(self._own[_AT])) + 1)

    def fail_closure(self, closure: int) -> None:
        """Shows the peers that this closure raised here. A peer that waits for this rank in it, at any attempt, raises.

        The number of the attempt would not do: a rank that begins the closure later would catch up with the attempt,
        and wait.
        """
        self._publish(_FAILED, closure)

    def catch_up(self, round_number: int) -> None:
        """Goes to the attempt of the peers: they abandoned one that this rank perhaps had not begun."""
        for rank in self.members:
            with suppress(CommunicationError):  # the wait for a dead rank reports it
                at = self._read_notice(rank, "beginning anew").at
                if at // _ATTEMPTS == round_number and at > max(round_number * _ATTEMPTS, int(self._own[_AT])):
                    self._go_to(at)

    def _go_to(self, at: int) -> None:
        self._own[_FILLED] = self._own[_CONSUMED] = 0
        self._publish(_AT, at)
        for where in (_FILLED, _CONSUMED):
            self._note(where, 0)

    def mark_filled(self, position: int, address: int) -> None:
        """Lets peers read the buffer of this position, at ``address``, until all ranks have read it."""
        self._own[_FIRST_ADDRESS + position % MAX_ADDRESSES] = address
        self._publish(_FILLED, position + 1)
        self._note(_FILLED, position + 1)

    def mark_consumed(self, position: int) -> None:
        self._publish(_CONSUMED, position + 1)
        self._note(_CONSUMED, position + 1)

    def _note(self, where: int, value: int) -> None:
        """Notes for ranks that run apart how far this rank has come."""
        self._book.counts[self._tag + where] = self._count(value)

    def _count(self, value: int) -> int:
        """Returns a number on the board as one that grows from attempt to attempt."""
        return (int(self._own[_AT]) << 32) + value

    def _publish(self, where: int, value: int) -> None:
        # A release fence: no earlier store may become visible after this one. The release of a lock keeps earlier
        # stores before it, the acquisition of a lock keeps later stores after it; the lock is released, then acquired,
        # on any processor.
        for _ in range(2):
            with self._fence:
                pass
        self._own[where] = value

    def read(self, rank: int, address: int, into: torch.Tensor, phase: str) -> None:
        """Fills ``into`` from the rank's memory.

        Raises:
            CommunicationError: the rank died.
        """
        try:
            self._memory.read(self.pids[rank], address, into)
        except CommunicationError as error:
            self._own[_MISSED] = rank + 1
            raise CommunicationError(f"{error} It is rank {rank}; others were {phase}.") from error

    def _read_notice(self, rank: int, phase: str) -> Notice:
        self.read(rank, self._addresses[rank], self._seen, phase)
        at, missed, kind, failed, filled, consumed, *addresses = self._numbers.tolist()
        return Notice(at, missed, kind, failed, filled, consumed, addresses)

    def ready(self, rank: int, reached: Reached, phase: str) -> Notice | None:
        """Returns the rank's notice if it has reached the point; None if it is still on the way.

        Raises:
            CommunicationError: the rank died, or abandoned this round.
        """
        notice = self._read_notice(rank, phase)
        own = int(self._own[_AT])
        if self.closure and notice.failed == self.closure:
            self._own[_MISSED] = rank + 1
            raise CommunicationError(
                "call zero_grad() on every rank and go on together: params and states are unchanged. "
                f"While {phase}: rank {rank} gave up this backward, after an error of its closure; look at its output."
            )
        if notice.at < own:
            return None
        if notice.at > own:
            self._own[_MISSED] = notice.missed or rank + 1
            reason = f"as rank {notice.missed - 1} did not come" if notice.missed else "after an error of its own"
            was_abandoned = notice.at // _ATTEMPTS == own // _ATTEMPTS  # else that rank took a step more
            raise error_of(notice.kind if was_abandoned else 0)(
                "call zero_grad() on every rank and go on together: params and states are unchanged, as gradients of "
                f"two backwards would have been mixed. While {phase}: rank {rank} gave up this backward, {reason} or "
                "for a step that this rank did not take; look at its output."
            )
        return notice if reached(notice) else None

    def wait(self, rank: int, reached: Reached, phase: str) -> Notice:
        """Waits until the rank has reached the point; returns its notice.

        Raises:
            CommunicationError: as ``ready``, or the rank is late, or any rank died.
        """
        notice = self.ready(rank, reached, phase)
        if notice is not None:
            return notice
        with waiting(self._group, self._tag + reached.where, phase, number=self._count(reached.position + 1)):
            return self._wait(rank, reached, phase)

    def _wait(self, rank: int, reached: Reached, phase: str) -> Notice:
        backoff = Backoff(self._ranks.seconds, self._ranks)
        while (notice := self.ready(rank, reached, phase)) is None:
            if backoff.reads % _READS_BEFORE_ALL == _READS_WITHOUT_PAUSE:
                # The awaited rank may have abandoned its attempt because another rank died, and then never comes to the
                # attempt of this rank. No rank ends a round without all others, so all boards are read: that of a dead
                # rank raises.
                for each in self.members:
                    self._read_notice(each, phase)
                self._check_comes(rank, reached, phase)
            if not backoff.again():
                self._own[_MISSED] = rank + 1
                raise CommunicationError(
                    "call zero_grad() on every rank and go on together: params and states are unchanged. Every rank "
                    f"must run the same forwards, backwards and steps. While {phase}: rank {rank} did not come within "
                    f"{self._ranks.seconds:g} s: it stalled or made other calls; look at its output."
                )
        return notice

    def _check_comes(self, rank: int, reached: Reached, phase: str) -> None:
        """Raises CommunicationError if the rank's process ends before the point: its board does not change any more."""
        if rank in ended_ranks(self._ranks.group) and self.ready(rank, reached, phase) is None:
            self._own[_MISSED] = rank + 1
            raise CommunicationError(
                f"look at the output of rank {rank}, whose process has ended, and start the ranks again: this rank "
                f"waited for it in vain, {self._ranks.at(phase)}. Every rank must run the same forwards, backwards and "
                "steps. Params and states are unchanged."
            )
