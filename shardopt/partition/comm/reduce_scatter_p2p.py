"""Reduce-scatter by messages: slices go straight to their owners, who add them up."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from .reduce_scatter import PHASE, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .group import Pending, Ranks, Traffic
    from .hosts import SomeRanks
    from .reduce_scatter import Reduction

# Held by the end of a message until the message has come, which gloo does not tell: NaN as no arithmetic makes it, and
# no scale of codes. A message that does end so is only seen by those who wait for it.
_NOT_THERE = -1


class P2PReduceScatter(ReduceScatter):
    """Sends slices straight to their owners while backward goes on.

    Peers of a rank that abandons a round are not notified; their wait times out.
    """

    by_messages = True

    def __init__(self, ranks: Ranks | SomeRanks, traffic: Traffic, number: int):
        self._ranks, self._traffic, self._number = ranks, traffic, number
        self._reductions: deque[tuple[Reduction, list[torch.Tensor], list[torch.Tensor], Pending]] = deque()
        self._abandoned: list[Any] = []
        self._round = self._attempt = self._position = 0

    def start_round(self, round_number: int, closure: int = 0) -> None:
        # Messages of an abandoned round may be under way and write to memory, which therefore must not be freed: the
        # list keeps it. This rank does not wait for them, as the other ranks may have abandoned the round before they
        # sent anything. Tags keep these messages from matching messages of this round.
        self._abandoned += self._reductions
        self._reductions.clear()
        self._attempt = self._attempt + 1 if round_number == self._round else 0
        self._round, self._position = round_number, 0

    def start(self, reduction: Reduction) -> None:
        rank, own = self._ranks.rank, reduction.messages(self._ranks.size)
        others = [each if owner == rank else _room_for(each) for owner, each in enumerate(own)]
        pending = self._ranks.exchange_slices(own, others, self._tag(), PHASE)
        self._traffic.gradients += (self._ranks.size - 1) * own[rank].nbytes
        self._position += 1
        self._reductions.append((reduction, others, own, pending))

    def _tag(self) -> int:
        """Returns a tag of optimizer, round, attempt and bucket, so that no message matches another. Repeats after
        1,024 rounds.
        """
        who, round_number = self._number % 64, self._round % 1024
        return (who << 24 | round_number << 14 | self._attempt % 4 << 12 | self._position % 4096) + 1

    def progress(self) -> list[Reduction]:
        ended = []
        while self._reductions and self._has_come(self._reductions[0][1]):
            ended.append(self._finish_first())
        return ended

    def _has_come(self, messages: Sequence[torch.Tensor]) -> bool:
        """True if every rank's message has come, as far as their ends show it."""
        others = [each for rank, each in enumerate(messages) if rank != self._ranks.rank]
        return all(not each.numel() or _end_of(each).item() != _NOT_THERE for each in others)

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        return [self._finish_first() for _ in range(len(self._reductions) - limit)]

    def finish(self) -> list[Reduction]:
        return self.drain(0, math.inf)

    def _finish_first(self) -> Reduction:
        reduction, messages, _, pending = self._reductions.popleft()
        self._ranks.wait(pending)
        reduction.add_up(messages)
        return reduction


def _room_for(message: torch.Tensor) -> torch.Tensor:
    """Returns memory for what another rank sends in return for this message."""
    room = torch.empty_like(message)
    if room.numel():
        _end_of(room).fill_(_NOT_THERE)
    return room


def _end_of(message: torch.Tensor) -> torch.Tensor:
    return message.view(torch.uint8)[-4:].view(torch.int32)
