"""A notice board in each rank's memory, which its neighbours read: how far it has come, and where its buffers lie.

Waiting for a neighbour is then looking at its board (a microsecond), without a message. A board says in which round of
reduction its rank is, and at which attempt. A rank that gives an attempt up after an exception is at the next one from
then on: those who wait for it in the earlier attempt notice and give it up too, those who are at the next one already
wait for it there, and nobody adds what it fills now to what others hold of the attempt before.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from ...errors import CommunicationError
from .group import Ranks
from .peer_memory import Neighbours

SLOTS = 64  # addresses that a board can hold; more buffers are never under way at once
# In the order in which a neighbour must read them: memory is copied from lower to higher addresses.
_AT, _MISSED, _FAILED, _FILLED, _TAKEN, _FIRST_ADDRESS = range(6)
_ATTEMPTS = 1 << 20  # of one round, at most; round and attempt are one number, so that both change at once
# A look takes a microsecond, a wait for a rank that computes milliseconds: after some looks the core is left to it.
_EAGER_LOOKS = 20
_NAP = 50e-6  # seconds
_LOOKS_A_ROLL_CALL = 500  # looks at one rank between two at all ranks: naps take far longer than looks


class Nap:
    """Between two looks."""

    def __init__(self, seconds: float):
        """``seconds``: how long to go on looking."""
        self.looks, self._end = 0, time.monotonic() + seconds

    def take(self) -> bool:
        """Whether to look again."""
        self.looks += 1
        if self.looks <= _EAGER_LOOKS:
            return True
        time.sleep(_NAP)
        return time.monotonic() < self._end


class Notice(NamedTuple):
    """What a rank's board says."""

    at: int  # rounds that all ranks finished before this one, times _ATTEMPTS; attempts at it that were given up
    missed: int  # one more than the rank for whose sake it gave the last attempt up; 0: an error of its own
    failed: int  # the last closure of a step that raised on it, counted from 1
    filled: int  # buffers that may be read, in this attempt
    taken: int  # buffers of every other rank that it has read, in this attempt
    addresses: tuple[int, ...]


class Board:
    """This rank's board, and the sight of the others'."""

    def __init__(self, ranks: Ranks, neighbours: Neighbours, pids: tuple[int, ...]):
        """Collective."""
        self._ranks, self._neighbours, self.pids = ranks, neighbours, pids
        self._own = np.zeros(_FIRST_ADDRESS + SLOTS, dtype=np.int64)
        self._own[_AT] = -1
        self.closure = 0  # that runs now, counted from 1 and the same on all ranks; 0: none
        self._fence = threading.Lock()
        where = ranks.exchange([self._own.ctypes.data], torch.device("cpu"), "exchanging notice boards")
        self._addresses = [address for (address,) in where]
        self._seen = torch.empty(self._own.size, dtype=torch.int64)

    def begin(self, round_number: int) -> None:
        self._ranks.check_usable("beginning to reduce gradients")
        self._own[_MISSED] = 0
        self._go_to(max(round_number * _ATTEMPTS, int(self._own[_AT])))

    def leave(self, round_number: int) -> None:
        """Tells the neighbours that this rank gives up its attempt at the round."""
        self._go_to(max(round_number * _ATTEMPTS, int(self._own[_AT])) + 1)

    def fail(self, closure: int) -> None:
        """Tells the neighbours that this closure raised here: who waits for this rank in it, at any attempt, gives up.

        A number of the attempt would not do: who begins the closure later would catch up with it, and wait.
        """
        self._publish(_FAILED, closure)

    def catch_up(self, round_number: int) -> None:
        """Goes to the attempt that the neighbours are at: they gave one up that this rank perhaps had not begun."""
        for rank in range(self._ranks.size):
            with suppress(CommunicationError):  # who is gone is missed when it is waited for
                at = self._look(rank, "beginning anew").at
                if at // _ATTEMPTS == round_number and at > max(round_number * _ATTEMPTS, int(self._own[_AT])):
                    self._go_to(at)

    def _go_to(self, at: int) -> None:
        self._own[_FILLED] = self._own[_TAKEN] = 0
        self._publish(_AT, at)

    def fill(self, position: int, address: int) -> None:
        """The buffer of this position is at ``address`` and may be read until all ranks have taken it."""
        self._own[_FIRST_ADDRESS + position % SLOTS] = address
        self._publish(_FILLED, position + 1)

    def take(self, position: int) -> None:
        self._publish(_TAKEN, position + 1)

    def _publish(self, where: int, value: int) -> None:
        # No store from before may become visible after this one. Leaving a lock keeps what is before it from moving
        # behind, taking one keeps what is behind it from moving before: one is left, then taken, on any processor.
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
            self._neighbours.read(self.pids[rank], address, into)
        except CommunicationError as error:
            self._own[_MISSED] = rank + 1
            raise CommunicationError(f"while {phase}: rank {rank} is gone. {error}") from error

    def _look(self, rank: int, phase: str) -> Notice:
        self.read(rank, self._addresses[rank], self._seen, phase)
        at, missed, failed, filled, taken, *addresses = self._seen.tolist()
        return Notice(at, missed, failed, filled, taken, tuple(addresses))

    def ready(self, rank: int, reached: Callable[[Notice], bool], phase: str) -> Notice | None:
        """The rank's notice if it has reached the point; None if it is still on the way.

        Raises:
            CommunicationError: it died, or left this round.
        """
        notice = self._look(rank, phase)
        own = int(self._own[_AT])
        if self.closure and notice.failed == self.closure:
            self._own[_MISSED] = rank + 1
            raise CommunicationError(
                f"while {phase}: rank {rank} gave up this backward, after an error of its closure; look at its output. "
                "Params and states are unchanged: call zero_grad() on every rank and go on together."
            )
        if notice.at < own:
            return None
        if notice.at > own:
            self._own[_MISSED] = notice.missed or rank + 1
            reason = f"as rank {notice.missed - 1} did not come" if notice.missed else "after an error of its own"
            raise CommunicationError(
                f"while {phase}: rank {rank} gave up this backward, {reason} or for a step that this rank did not "
                "take; look at its output. Its gradients would have been mixed with those of another backward, so "
                "params and states are unchanged: call zero_grad() on every rank and go on together."
            )
        return notice if reached(notice) else None

    def wait(self, rank: int, reached: Callable[[Notice], bool], phase: str) -> Notice:
        """The rank's notice once it has reached the point.

        Raises:
            CommunicationError: as ``ready``, or it is late, or any rank died.
        """
        nap = Nap(self._ranks.seconds)
        while (notice := self.ready(rank, reached, phase)) is None:
            if nap.looks % _LOOKS_A_ROLL_CALL == _EAGER_LOOKS:
                # The awaited rank may have given up for the sake of one that died, and then never comes to the attempt
                # that this rank is at. No rank ends a round without all others.
                for each in range(self._ranks.size):
                    self._look(each, phase)
            if not nap.take():
                self._own[_MISSED] = rank + 1
                raise CommunicationError(
                    f"while {phase}: rank {rank} did not come within {self._ranks.seconds:g} s. It stalled or made "
                    "other calls: every rank must run the same forwards, backwards and steps. Look at its output. "
                    "Params and states are unchanged: call zero_grad() on every rank and go on together."
                )
        return notice
