"""All-gather in two stages: each shard crosses to every other host once, where the host's ranks read each other's.

Rank 1 of 4, two on each host, receives shard 3 by a message, and reads shards 0 and 2 in the window of rank 0::

    rank 0    0 . . .    messages ->  0 . 2 .    reading ->  0 1 2 3
    rank 1    . 1 . .                 . 1 . 3                0 1 2 3

A rank shows on a board that its messages have come, and where its windows lie; or that they have not come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import CommunicationError
from .all_gather import FIRST_TAG, AllGather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .all_gather import Window
    from .group import Pending, Ranks
    from .hosts import Hosts


class HostGather:
    """The windows of one gather, on their way."""

    def __init__(self, ranks: Ranks, hosts: Hosts, phase: str):
        self._ranks, self._hosts, self._board, self._phase = ranks, hosts, hosts.board, phase
        self._started: list[tuple[Window, Pending]] = []
        # What ranks of this host may read until the barrier: encoded shards lie nowhere else.
        self._shown: tuple[list[Window], torch.Tensor] | None = None

    def begin(self, window: Window) -> Callable[[], None]:
        """Sends this rank's shard to one rank of every other host."""
        column = self._hosts.column
        own = [window.shard(self._ranks.rank)] * column.size
        others = [window.shard(rank) for rank in column.members]
        pending = column.exchange_slices(own, others, FIRST_TAG + window.number, self._phase)
        self._started.append((window, pending))
        return self._end

    def _end(self) -> None:
        """Fills all windows that were begun, at the first call."""
        started, self._started = self._started, []
        if not started:
            return
        windows, number = [window for window, _ in started], next(self._hosts.gathers)
        self._board.start_round(number)
        try:
            for _, pending in started:
                self._ranks.wait(pending)
        except BaseException:
            self._board.abandon_round(number)
            raise
        addresses = torch.tensor([window.flat.data_ptr() for window in windows])
        self._shown = windows, addresses
        self._board.mark_filled(0, addresses.data_ptr())
        near = self._hosts.near
        for step in range(1, near.size):  # every rank starts with another one
            member = (near.rank + step) % near.size
            self._read_from(near.members[member], member, windows)

    def _read_from(self, rank: int, member: int, windows: Sequence[Window]) -> None:
        """Reads what a rank of this host, with this number on it, has: its own shards, and those that came to it."""
        try:
            notice = self._board.wait(rank, lambda notice: notice.filled > 0, self._phase)
        except CommunicationError as error:  # whose words are those of a backward
            raise CommunicationError(
                f"look at the output of rank {rank}: it ended or did not come, or nothing came to it from "
                f"another host, {self._ranks.at(self._phase)}."
            ) from error
        memory, pid = self._hosts.memory, self._hosts.pids[rank]
        addresses = torch.empty(len(windows), dtype=torch.int64)
        memory.read(pid, notice.addresses[0], addresses)
        for window, address in zip(windows, addresses.tolist(), strict=True):
            for host in self._hosts.table:
                target = window.shard(host[member])
                memory.read(pid, address + target.data_ptr() - window.flat.data_ptr(), target)


def by_hosts(ranks: Ranks, hosts: Hosts, phase: str) -> AllGather:
    """Returns an all-gather whose windows all ranks begin in one order, and end together; a barrier follows."""
    return AllGather(HostGather(ranks, hosts, phase).begin)
