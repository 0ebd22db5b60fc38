"""Reduce-scatter in two stages: ranks of a host sum in shared memory, then one rank of each host exchanges the sums.

Rank 1 of 4, two on each host, owns the second slice, as rank 3 owns the last one. It sums both for its host, and sends
rank 3 the sum of the slice that is rank 3's::

    buffers of host 0             sums of rank 1                  of rank 3
    rank 0   a0 b0 c0 d0          b0+b1  (its own)                b2+b3 --> to rank 1, which owns b
    rank 1   a1 b1 c1 d1          d0+d1 --> to rank 3             d2+d3  (its own)

So each host sends every other one the bytes of one bucket's slices, however many ranks it has. A sum is taken in fp32
by host, in the order of hosts: (ranks of host 0) + (ranks of host 1) + ... Sums of hosts travel in fp32, or encoded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .peer_board import Backoff
from .reduce_scatter import CodedReduction, ReduceScatter, Reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .reduce_scatter import Blank
    from .reduce_scatter_p2p import P2PReduceScatter
    from .reduce_scatter_peer import PeerReduceScatter


@dataclass(eq=False)
class HostReduction(Reduction):
    """One bucket to be summed over the ranks of this host: slices of ranks with one number on all hosts.

    ``target`` is their sums, 1D [hosts * slice_numel], fp32.
    """

    of: Reduction
    owners: tuple[int, ...]

    def runs(self, rank: int) -> list[tuple[int, torch.Tensor]]:
        numel = self.of.target.numel()
        return [
            (self.of.start_of(owner), self.target[at * numel : (at + 1) * numel])
            for at, owner in enumerate(self.owners)
        ]


class HostReduceScatter(ReduceScatter):
    """A mechanism for the ranks of this host, and one between hosts, which takes over what the first has summed.

    Ranks of other hosts are not notified by a rank that abandons a round; their wait times out.
    """

    def __init__(self, near: PeerReduceScatter, between: P2PReduceScatter, owners: Sequence[int]):
        """
        Args:
            owners: the ranks between which sums of hosts travel, one on each host.
        """
        self._near, self._between, self._owners = near, between, tuple(owners)
        self._reductions: deque[Reduction] = deque()  # between hosts, in order

    def start_round(self, round_number: int, closure: int = 0) -> None:
        self._reductions.clear()
        self._near.start_round(round_number)
        self._between.start_round(round_number)

    def start(self, reduction: Reduction) -> None:
        numel = reduction.target.numel() * len(self._owners)
        sums = torch.empty(numel, dtype=torch.float32, device=reduction.target.device)
        self._near.start(HostReduction(reduction.buffer, sums, False, reduction, self._owners))

    def progress(self) -> list[Reduction]:
        self._send(self._near.progress())
        return self._arrived()

    def _send(self, summed: Sequence[Reduction]) -> None:
        """Sends sums of this host to the ranks that own them."""
        for each in summed:
            assert isinstance(each, HostReduction)
            whole = each.of
            between = Reduction(each.target, whole.target, whole.add)
            if isinstance(whole, CodedReduction):
                code = whole.code.of_sums(self._owners)
                between = CodedReduction(each.target, whole.target, whole.add, code, None)
            self._reductions.append(whole)
            self._between.start(between)

    def _arrived(self) -> list[Reduction]:
        return [self._reductions.popleft() for _ in self._between.progress()]

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        # A rank of another host sends its sum once it looks for those of its neighbours, which it cannot while it waits
        # for this rank in a collective of the model's own: so this wait has an end too.
        ended, backoff = self.progress(), Backoff(patience)
        while self._near.num_under_way + len(self._reductions) > limit and backoff.again():
            ended += self.progress()
        return ended

    def finish(self) -> list[Reduction]:
        ended = self._arrived()
        while self._near.num_under_way:
            self._send(self._near.end_first())
            ended += self._arrived()
        self._send(self._near.finish())
        return ended + [self._reductions.popleft() for _ in self._between.finish()]

    def abandon_round(self, round_number: int, rest: Sequence[Blank] | None) -> None:
        self._near.abandon_round(round_number, rest)

    def catch_up(self, round_number: int) -> None:
        self._near.catch_up(round_number)
