"""Roll call: before a host waits for collectives of its device, every rank says whether it has issued its own.

A collective of the device ends once every rank has issued it. A host that waits for the device notices nothing else: a
rank that never issues its own leaves it waiting until the backend aborts the process. So the ranks first send each
other, through host memory, that all collectives of a round are issued::

    rank 0    issue  issue  issue  send ISSUED, receive all, wait for the device          time ->
    rank 1    issue  an error: issue the rest, of zeros, send LEFT; raise the error
    rank 2    issue  issue  issue  send ISSUED, receive LEFT of rank 1: raise an error that names it

A rank that leaves sends its status without waiting. What it issued in place of the rest ends the queues of all devices,
so that the group can be used in the next round. Where it can issue nothing it sends STUCK, and no rank uses the group
again.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ...errors import CommunicationError
from .group import Pending
from .left import error_of, kind_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from .group import Ranks

# First tag of statuses: above those of messages that carry gradients (below 1 << 30) and shards (below 3 << 29).
_FIRST_TAG = 3 << 29
_CALLS = 1 << 18  # messages of one roll call, before tags repeat
_ROLL_CALLS = 1 << 11  # roll calls of one group, before tags repeat

_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


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
        number = next(_NUMBERS.setdefault(ranks.group, itertools.count()))
        self._tag, self._sent = _FIRST_TAG + number % _ROLL_CALLS * _CALLS, 0
        self._own = torch.empty(0)
        self._others: list[torch.Tensor] = []
        self._pending = Pending(phase, ())
        # Messages that this rank did not wait for. They write to memory that must not be freed.
        self._unheard: list[tuple[torch.Tensor, list[torch.Tensor], Pending]] = []

    def send(self, status: RankStatus) -> None:
        """Sends this rank's status to all other ranks, without waiting for theirs.

        With it goes the type of the error that is handled, if this rank left by one.
        """
        ranks = self._ranks
        self._own = torch.tensor([status, 0 if status is RankStatus.ISSUED else kind_of(sys.exc_info()[1])])
        # Zeros are ISSUED: torch's fake groups, by which one process measures many ranks, deliver no message.
        self._others = [torch.zeros_like(self._own) for _ in range(ranks.size)]
        tag = self._tag + self._sent % _CALLS
        self._sent += 1
        self._pending = ranks.exchange_slices([self._own] * ranks.size, self._others, tag, self._phase)
        self._unheard.append((self._own, self._others, self._pending))

    def wait_for_all(self) -> None:
        """Waits for the statuses of all ranks.

        Raises:
            CommunicationError: a rank left, died or is late.
        """
        received = self._ranks.size - 1
        for index, (work, peer) in enumerate(zip(self._pending.works, self._pending.peers, strict=True)):
            self._ranks.wait(Pending(self._phase, (work,), (peer,), self._pending.is_on_host))
            if index < received:
                status, kind = self._others[peer].tolist()
                self._check(peer, RankStatus(status), kind)
        self._unheard.pop()

    def _check(self, rank: int, status: RankStatus, kind: int) -> None:
        if status is RankStatus.LEFT:
            raise error_of(kind)(
                f"call zero_grad() on every rank and go on together: rank {rank} left after an error of its own (look "
                "at its output), and its gradients are missing. Params and states are unchanged, "
                f"{self._ranks.at(self._phase)}."
            )
        if status is RankStatus.STUCK:
            self._ranks.give_up(f"rank {rank} left while {self._phase}")
            raise CommunicationError(
                f"restart the ranks from a checkpoint: rank {rank} left after an error of its own (look at its output) "
                "and issued no more collectives, so that this rank's device waits for it. Params and states are "
                f"unchanged, {self._ranks.at(self._phase)}."
            )
