"""A notice board in each rank's memory, which its neighbours read: how far it has come, and where its buffers lie.

Waiting for a neighbour is then looking at its board (a microsecond), without a message. A board says in which round of
reduction its rank is, and at which attempt: a rank that left a round after an exception is noticed by all who wait for
it, and what it fills when it tries again is never added to what others hold of its earlier attempt.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ..errors import CommunicationError
from .collectives import Ranks
from .neighbours import Neighbours

SLOTS = 64  # addresses that a board can hold; more buffers are never under way at once
_FILLED, _TAKEN, _ROUND, _ATTEMPT, _LEFT, _FIRST_ADDRESS = range(6)
# A look takes a microsecond, a wait for a rank that computes milliseconds: after some looks the core is left to it.
_EAGER_LOOKS = 20
_NAP = 50e-6  # seconds


class Notice(NamedTuple):
    """What a rank's board says."""

    filled: int  # buffers that may be read, in this round
    taken: int  # buffers of every other rank that it has read, in this round
    round: int  # rounds that all ranks finished before this one
    attempt: int  # rounds that this rank has begun
    left: int  # the last attempt that it gave up
    addresses: tuple[int, ...]


class Board:
    """This rank's board, and the sight of the others'."""

    def __init__(self, ranks: Ranks, neighbours: Neighbours, pids: tuple[int, ...]):
        """Collective."""
        self._ranks, self._neighbours, self.pids = ranks, neighbours, pids
        self._own = np.zeros(_FIRST_ADDRESS + SLOTS, dtype=np.int64)
        self._own[_ROUND] = -1
        self._fence = threading.Lock()
        where = ranks.exchange([self._own.ctypes.data], torch.device("cpu"), "exchanging notice boards")
        self._addresses = [address for (address,) in where]
        self._seen = torch.empty(self._own.size, dtype=torch.int64)
        self._met: dict[int, int] = {}  # attempt at which each rank was first seen in this round

    def begin(self, round_number: int) -> None:
        self._met = {}
        self._own[_FILLED] = self._own[_TAKEN] = 0
        self._publish(_ATTEMPT, int(self._own[_ATTEMPT]) + 1)
        self._publish(_ROUND, round_number)

    def fill(self, position: int, address: int) -> None:
        """The buffer of this position is at ``address`` and may be read until all ranks have taken it."""
        self._own[_FIRST_ADDRESS + position % SLOTS] = address
        self._publish(_FILLED, position + 1)

    def take(self, position: int) -> None:
        self._publish(_TAKEN, position + 1)

    def leave(self) -> None:
        """Tells the neighbours that this rank gives up the round."""
        self._publish(_LEFT, int(self._own[_ATTEMPT]))

    def _publish(self, where: int, value: int) -> None:
        # Taking and leaving a lock orders every store before it ahead of the one behind it, on any processor.
        with self._fence:
            pass
        self._own[where] = value

    def _look(self, rank: int) -> Notice:
        self._neighbours.read(self.pids[rank], self._addresses[rank], self._seen)
        filled, taken, round_number, attempt, left, *addresses = self._seen.tolist()
        return Notice(filled, taken, round_number, attempt, left, tuple(addresses))

    def ready(self, rank: int, reached: Callable[[Notice], bool], phase: str) -> Notice | None:
        """The rank's notice if it has reached the point; None if it is still on the way.

        Raises:
            CommunicationError: it died, or left this round.
        """
        try:
            notice = self._look(rank)
        except CommunicationError as error:
            raise CommunicationError(f"while {phase}: rank {rank} is gone. {error}") from error
        own_round = int(self._own[_ROUND])
        if notice.round < own_round:
            return None
        met = self._met.setdefault(rank, notice.attempt)
        if notice.round > own_round or notice.attempt != met or notice.left == notice.attempt:
            raise CommunicationError(
                f"while {phase}: rank {rank} gave up this backward, after an error of its own or a step that this rank "
                "did not take; look at its output. Its gradients would have been mixed with those of another backward, "
                "so params and states are unchanged: call zero_grad() on every rank and go on together."
            )
        return notice if reached(notice) else None

    def wait(self, rank: int, reached: Callable[[Notice], bool], phase: str) -> Notice:
        """The rank's notice once it has reached the point.

        Raises:
            CommunicationError: as ``ready``, or it is late.
        """
        looks, end = 0, time.monotonic() + self._ranks.seconds
        while (notice := self.ready(rank, reached, phase)) is None:
            looks += 1
            if looks > _EAGER_LOOKS:
                time.sleep(_NAP)
                if time.monotonic() > end:
                    raise CommunicationError(
                        f"while {phase}: rank {rank} did not come within {self._ranks.seconds:g} s. It stalled or made "
                        "other calls: every rank must run the same forwards, backwards and steps. Look at its output. "
                        "Params and states are unchanged: call zero_grad() on every rank and go on together."
                    )
        return notice
