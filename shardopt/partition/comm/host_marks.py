"""Marks of windows in each rank's memory, which the other ranks of its host read: what came, and where it lies.

A window has one row on every rank. Each gather of the window has a number there, the same on all ranks::

    filled    of the last gather whose messages have come; its negative: they did not
    address   of the window's memory in that gather
    read      of the last gather in which this rank has read what the others of its host have

So gathers may begin in any order, and be waited for by several threads at once.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...errors import CommunicationError
from .ended import ended_ranks
from .peer_board import Backoff

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from .group import Ranks
    from .peer_memory import PeerMemory

FILLED, ADDRESS, READ = range(3)
_ROWS = 1 << 16  # windows of one transport that gather at the same time do not lie that far apart
_READS_BEFORE_LOOK = 500  # of a mark, between two looks whether its rank has ended: 25 ms


class HostMarks:
    """This rank's marks, and waits for those of the other ranks of its host."""

    def __init__(self, ranks: Ranks, memory: PeerMemory, pids: Sequence[int]):
        """Collective.

        Args:
            pids: process numbers, by rank.
        """
        self._ranks, self._memory, self._pids = ranks, memory, pids
        self._own = np.zeros((_ROWS, 3), dtype=np.int64)  # the system allocates what is used
        self._gathers = dict[int, int]()  # by row
        self._fence = threading.Lock()
        where = ranks.exchange([self._own.ctypes.data], "exchanging marks of windows")
        self._addresses = [address for (address,) in where]

    def begin(self, window: int) -> int:
        """Returns the number of a new gather of this window."""
        row = window % _ROWS
        self._gathers[row] = self._gathers.get(row, 0) + 1
        return self._gathers[row]

    def mark_filled(self, window: int, gather: int, address: int) -> None:
        """Lets the host's ranks read what came."""
        self._own[window % _ROWS, ADDRESS] = address
        self._publish(window, FILLED, gather)

    def mark_read(self, window: int, gather: int) -> None:
        """Shows that this rank has read what the others have."""
        self._publish(window, READ, gather)

    def mark_failed(self, window: int, gather: int) -> None:
        """Shows that nothing came, or could be read."""
        self._publish(window, FILLED, -gather)
        self._publish(window, READ, -gather)

    def _publish(self, window: int, column: int, value: int) -> None:
        for _ in range(2):  # a release fence, see PeerBoard._publish
            with self._fence:
                pass
        self._own[window % _ROWS, column] = value

    def wait(self, rank: int, window: int, column: int, gather: int, limit: timedelta | None, phase: str) -> int:
        """Waits until a rank of this host has filled the window, or has read. Returns where its window lies.

        A rank begins the window's next gather once all have read in this one, or once it failed here: then nobody may
        read what it shows, and it reads nothing of this gather any more.

        Raises:
            CommunicationError: the rank died, failed, or is late.
        """
        seconds = self._ranks.seconds if limit is None else min(self._ranks.seconds, limit.total_seconds())
        backoff, marks = Backoff(seconds, self._ranks), torch.empty(3, dtype=torch.int64)
        at = self._addresses[rank] + window % _ROWS * marks.nbytes
        try:
            while True:
                looks = backoff.reads % _READS_BEFORE_LOOK == _READS_BEFORE_LOOK - 1
                has_ended = looks and rank in ended_ranks(self._ranks.group)
                self._memory.read(self._pids[rank], at, marks)
                reached, is_past = int(marks[column]), abs(int(marks[column])) > gather
                if reached == gather or (is_past and column == READ):
                    return int(marks[ADDRESS])
                if reached == -gather or is_past or has_ended or not backoff.again():
                    break
        except CommunicationError as error:
            if column == READ:  # its process is gone, as after the last line of its script: it reads nothing any more
                return 0
            raise self._lost(rank, phase) from error
        raise self._lost(rank, phase)

    def _lost(self, rank: int, phase: str) -> CommunicationError:
        return CommunicationError(
            f"look at the output of rank {rank}: it ended or did not come, or nothing came to it from another host, "
            f"{self._ranks.at(phase)}."
        )
