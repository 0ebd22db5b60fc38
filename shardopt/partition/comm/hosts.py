"""The ranks of each host, where several hosts have several ranks: what crosses to a host crosses once.

::

              member 0   member 1
    host 0    rank 0     rank 1       ranks of a row read each other's memory
    host 1    rank 2     rank 3       ranks of a column send each other messages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...errors import BindingError
from .host_marks import HostMarks

if TYPE_CHECKING:
    from datetime import timedelta

    from .group import Pending, Ranks
    from .peer_memory import PeerMemory


class SomeRanks:
    """Some ranks of a group, this one among them.

    Attributes:
        members: their numbers in the group.
        size, rank: how many they are, and this rank's number among them.
    """

    def __init__(self, ranks: Ranks, members: Sequence[int]):
        self.members, self.size, self.rank = tuple(members), len(members), members.index(ranks.rank)
        self._ranks = ranks

    def exchange_slices(
        self, own: Sequence[torch.Tensor], others: Sequence[torch.Tensor], tag: int, phase: str
    ) -> Pending:
        """Starts to send ``own[i]`` to member ``i`` and to receive ``others[i]`` from it."""
        return self._ranks.exchange_slices(own, others, tag, phase, self.members)

    def wait(self, pending: Pending, limit: timedelta | None = None) -> None:
        """See :meth:`Ranks.wait`."""
        self._ranks.wait(pending, limit)


@dataclass(frozen=True, eq=False)
class Hosts:
    """The hosts of a group's ranks, each of as many ranks, and what reads the memory of this host's.

    Attributes:
        table: the ranks of each host, in order; hosts are in the order of their first ranks.
        near: the ranks of this host.
        column: the ranks with this one's number on each host.
        pids: process numbers, by rank.
        marks: of windows that are gathered.
    """

    table: tuple[tuple[int, ...], ...]
    near: SomeRanks
    column: SomeRanks
    memory: PeerMemory
    pids: tuple[int, ...]
    marks: HostMarks

    @staticmethod
    def of(ranks: Ranks, reach: Sequence[Sequence[int]], memory: PeerMemory, pids: Sequence[int]) -> Hosts | None:
        """Collective: returns the hosts; None if there is one, or if each has one rank: then nothing crosses twice.

        Args:
            reach: by rank: 1 for each rank whose memory it can read.

        Raises:
            BindingError: hosts have unequal numbers of ranks; on all ranks.
        """
        table = host_table(reach)
        numbers = [len(host) for host in table]
        if len(set(numbers)) > 1:
            raise BindingError(
                "start as many ranks on each host, or omit Tuning(by_host=True): hosts of "
                f"{numbers} ranks were found, and each rank exchanges sums with one rank of every other host. Ranks "
                "that cannot read each other's memory (another user, container or namespace) count as hosts."
            )
        if len(table) == 1 or numbers[0] == 1:
            return None
        (near,) = (host for host in table if ranks.rank in host)
        column = [host[near.index(ranks.rank)] for host in table]
        marks = HostMarks(ranks, memory, pids)
        return Hosts(table, SomeRanks(ranks, near), SomeRanks(ranks, column), memory, tuple(pids), marks)


def host_table(reach: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each host: those that all read each other's memory."""
    found: list[list[int]] = []
    for rank in range(len(reach)):
        for host in found:
            if all(reach[rank][other] and reach[other][rank] for other in host):
                host.append(rank)
                break
        else:
            found.append([rank])
    return tuple(map(tuple, found))
