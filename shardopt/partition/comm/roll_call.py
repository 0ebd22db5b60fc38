"""Roll call: before a host waits for collectives of its device, every rank says whether it has issued its own.

A collective of the device ends once every rank has issued it. A host that waits for the device notices nothing else: a
rank that never issues its own leaves it waiting until the backend aborts the process. So the ranks first tell each
other, through host memory, that all collectives of a round are issued::

    rank 0    issue  issue  issue  tell ISSUED, hear all, wait for the device          time ->
    rank 1    issue  an error: issue the rest, of zeros, tell LEFT; raise the error
    rank 2    issue  issue  issue  tell ISSUED, hear LEFT of rank 1: raise an error that names it

They do so by one all-to-all of a word each: one call, however many ranks there are, in which each hears of each at
once, and a word that has not come names its rank. A rank that leaves tells its status without waiting. What it issued
in place of the rest ends the queues of all devices, so that the group can be used in the next round. Where it can issue
nothing it tells STUCK, and no rank uses the group again.
"""

from __future__ import annotations

import os
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CommunicationError
from . import collectives
from .group import Pending
from .left import error_of, kind_of
from .notes import note_of, noted
from .patience import end_waits

if TYPE_CHECKING:
    from .group import Ranks

_UNHEARD = -1  # in place of a word that has not come
# A word, from its lowest bit: a RankStatus, the type of the error, and which roll call this is: of which optimizer, and
# how often it was made. Else a rank that left between the rounds of two optimizers would be heard in the other one's.
_STATUS_BITS, _KIND_BITS, _CALL_BITS, _NUMBER_BITS = 2, 8, 32, 20


class _RollCalls:
    """The roll calls of a group.

    Attributes:
        count: of the objects that make them.
        told: the work by which this rank told last that it left, without waiting for the others.
    """

    count = 0
    told: Any = None


class RankStatus(IntEnum):
    """The progress of a rank in the round that it is in."""

    ISSUED = 0
    """It issued all collectives of the round."""

    LEFT = 1
    """It left the round after an error, and issued the rest of its collectives all the same."""

    STUCK = 2
    """It left the round after an error, and did not issue the rest."""


class RollCall:
    """The statuses of the ranks of one group, round by round."""

    def __init__(self, ranks: Ranks, phase: str):
        """Every rank of the group makes its roll calls in the same order."""
        self._ranks, self._phase = ranks, phase
        assert ranks.group is not None
        calls = note_of(ranks.group, _RollCalls)
        calls.count += 1
        self._first = calls.count % (1 << _NUMBER_BITS) << _CALL_BITS
        self._call = self._first  # the number of this roll call among all of the group's
        self._words = torch.empty(0)  # from each rank
        self._pending = Pending(phase, ())

    def send(self, status: RankStatus) -> None:
        """Tells all other ranks this rank's status, without waiting for theirs.

        With it goes the type of the error that is handled, if this rank left by one.
        """
        kind = 0 if status is RankStatus.ISSUED else kind_of(sys.exc_info()[1])
        self._call = self._first + (self._call + 1) % (1 << _CALL_BITS)
        word = (self._call << _KIND_BITS | kind) << _STATUS_BITS | status
        own = torch.full((self._ranks.size,), word)  # to each rank
        self._words = torch.full_like(own, _UNHEARD)  # anew: abandoned ones may still come
        self._pending = self._ranks.begin(self._phase, collectives.all_to_all, self._words, own)
        if status is not RankStatus.ISSUED:
            note_of(self._ranks.host, _RollCalls).told = self._pending.works[0]

    def wait_for_all(self) -> None:
        """Waits for the statuses of all ranks.

        Raises:
            CommunicationError: a rank left, died or is late.
        """
        self._ranks.wait(self._pending, absent=self._absent)
        own = self._call << _KIND_BITS << _STATUS_BITS  # ISSUED
        for rank, word in enumerate(self._words.tolist()):
            # A fake group, by which one process measures many ranks, delivers no word.
            if word in (own, _UNHEARD):
                continue
            rest, status = divmod(word, 1 << _STATUS_BITS)
            call, kind = divmod(rest, 1 << _KIND_BITS)
            raise self._left(rank, RankStatus(status), kind) if call == self._call else self._elsewhere(rank)

    def _absent(self) -> list[int]:
        """The ranks whose word has not come; of these only the ones whose connection has ended, if there are any."""
        words, own = self._words.tolist(), self._ranks.rank
        # This rank's own has not come either where gloo had no thread for the call yet.
        absent = [rank for rank, word in enumerate(words) if word == _UNHEARD and rank != own]
        return self._ranks.lost(absent) or absent

    def _elsewhere(self, rank: int) -> CommunicationError:
        self._ranks.give_up(f"rank {rank} was in another round while {self._phase}")
        return CommunicationError(
            f"restart the ranks from a checkpoint: rank {rank} is in another round than this rank, as one of them left "
            "by an error (look at its output) before the others had begun that round, or made other calls. Params and "
            f"states are unchanged, {self._ranks.at(self._phase)}."
        )

    def _left(self, rank: int, status: RankStatus, kind: int) -> CommunicationError:
        if status is RankStatus.LEFT:
            return error_of(kind)(
                f"call zero_grad() on every rank and go on together: rank {rank} left after an error of its own (look "
                "at its output), and its gradients are missing. Params and states are unchanged, "
                f"{self._ranks.at(self._phase)}."
            )
        self._ranks.give_up(f"rank {rank} left while {self._phase}")
        return CommunicationError(
            f"restart the ranks from a checkpoint: rank {rank} left after an error of its own (look at its output) "
            "and issued no more collectives, so that this rank's device waits for it. Params and states are "
            f"unchanged, {self._ranks.at(self._phase)}."
        )


def end_what_was_told() -> None:
    """Ends roll calls of rounds that this rank left and that others do not come to, as its process ends.

    Threads of gloo's run them, for which a process waits at its end.
    """
    for group, calls in noted(_RollCalls):
        if calls.told is not None and not calls.told.is_completed():
            end_waits(group, (group.rank() + 1) % group.size())


def _forget() -> None:
    for _, calls in noted(_RollCalls):
        calls.told = None


os.register_at_fork(after_in_child=_forget)  # the connections are the parent's
