"""Ranks that do not come, among others that are faster or slower.

Tests of what a rank does about a missing one need a short deadline. On a busy machine a short deadline ends waits for
ranks that are only slow. So here it holds for the missing ranks alone, and it begins when they will not come any more.
All other waits last longer than the job may: one that nobody ends is a failure.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from shardopt.partition.comm.group import Pending, Ranks
from shardopt.partition.comm.peer_board import PeerBoard
from tests.support.moments import Moments, until
from tests.support.ranks import DEADLINE

SOON = 0.05  # seconds that a rank waits for one that is missing
LATER = 4 * DEADLINE  # seconds: as good as never, for a job that is killed long before

_BOARD_WAIT = PeerBoard.wait
_WAIT = Ranks.wait
_OUT, _WAITS = "is out", "waits"


class Roll:
    """How far each rank has come: it waits for others, or is out, as it ended with an error or is about to."""

    def __init__(self, moments: Moments, name: str, rank: int, world: int):
        self._moments, self._name, self._rank = moments, name, rank
        self.others = frozenset(range(world)) - {rank}

    def say(self, point: str = _OUT) -> None:
        self._moments.say(f"{self._name}, rank {self._rank} {point}")

    def has(self, rank: int, point: str) -> bool:
        """Whether the rank has come to the point, or is out."""
        return any(self._moments.was_said(f"{self._name}, rank {rank} {each}") for each in (point, _OUT))

    def wait(self, point: str) -> None:
        """Waits until all others have come to the point."""
        until(lambda: all(self.has(rank, point) for rank in self.others), f"others to come to '{point}'")


@contextmanager
def given_up(absent: Collection[int], roll: Roll) -> Iterator[None]:
    """Waits for the absent ranks, and for a collective if there are any, end ``SOON`` after they are out.

    A rank that waits itself does not come either: so two that wait for each other are both absent to the other.
    """
    messages = itertools.count()

    def are_gone() -> bool:
        return all(roll.has(rank, _WAITS) for rank in absent)

    def wait_for_board(board: PeerBoard, rank: int, reached: Callable[[Any], bool], phase: str) -> Any:
        if rank not in absent:
            with _deadline(board._ranks, LATER):
                return _BOARD_WAIT(board, rank, reached, phase)
        found = []

        def has_come() -> bool:
            found[:] = [board.ready(rank, reached, phase)]
            return found[0] is not None

        if not has_come():
            roll.say(_WAITS)
            until(lambda: are_gone() or has_come(), "the absent to be gone")
        with _deadline(board._ranks, SOON):
            return _BOARD_WAIT(board, rank, reached, phase)

    def wait(ranks: Ranks, pending: Pending, limit: timedelta | None = None) -> None:
        for work, peer in itertools.zip_longest(pending.works, pending.peers):
            is_in_vain = bool(absent) and (peer is None or peer in absent)
            if is_in_vain:
                # Gloo cannot be asked whether the message is there. Its deadline cuts all connections, which would end
                # what another rank still has to receive: all come to this message before anyone's time begins.
                point = f"message {next(messages)}"
                roll.say(_WAITS)
                roll.say(point)
                until(are_gone, "the absent to be gone")
                until(lambda point=point: all(roll.has(each, point) for each in roll.others - set(absent)), point)
            with _deadline(ranks, SOON if is_in_vain else LATER):
                _WAIT(ranks, Pending(pending.phase, (work,), () if peer is None else (peer,)))

    with patch.object(PeerBoard, "wait", wait_for_board), patch.object(Ranks, "wait", wait):
        yield


def in_no_hurry() -> AbstractContextManager[None]:
    """Within it, no wait for a message has a short deadline: where ranks are only slow, none may be given up."""
    return waiting_for(LATER)


@contextmanager
def waiting_for(seconds: float) -> Iterator[None]:
    """Within it, a wait for a message lasts so long, whatever deadline the optimizer has. Few: for what must fail."""

    def wait(ranks: Ranks, pending: Pending, limit: timedelta | None = None) -> None:
        with _deadline(ranks, seconds):
            _WAIT(ranks, pending)

    with patch.object(Ranks, "wait", wait):
        yield


def _deadline(ranks: Ranks, seconds: float) -> Any:
    return patch.object(ranks, "_deadline", timedelta(seconds=seconds))
