"""All-gather in two stages: each shard crosses to every other host once, where the host's ranks read each other's.

Rank 1 of 4, two on each host, receives shard 3 by a message, and reads shards 0 and 2 in the window of rank 0::

    rank 0    0 . . .    messages ->  0 . 2 .    reading ->  0 1 2 3
    rank 1    . 1 . .                 . 1 . 3                0 1 2 3

A rank marks that the messages of a window have come, and where it lies; or that they have not come. A window may be
written to, or freed, once all ranks of the host have read it.

Nobody can read what came to a rank that computes, unless that rank marks it. So where ranks compute meanwhile, a thread
of each does all this: it never waits for what another rank's script does.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from .all_gather import AllGather
from .host_group import host_group
from .host_marks import FILLED, READ
from .messages import waiting
from .tags import FIRST_TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from .all_gather import Window
    from .group import Pending, Ranks
    from .hosts import Hosts

    # A window, the number of its gather, its messages, and what is done once all of this host have read it.
    Begun = tuple[Window, int, Pending, Future[None]]


class HostGather:
    """The windows that this rank gathers."""

    def __init__(self, ranks: Ranks, hosts: Hosts, phase: str, limit: timedelta | None):
        self._ranks, self._hosts, self._marks, self._phase, self._limit = ranks, hosts, hosts.marks, phase, limit
        self._begun: list[Begun] = []  # and not filled by a thread

    def begin(self, window: Window) -> Callable[[], None]:
        """Sends this rank's shard to one rank of every other host."""
        column = self._hosts.column
        own = [window.shard(self._ranks.rank)] * column.size
        others = [window.shard(rank) for rank in column.members]
        pending = column.exchange_slices(own, others, FIRST_TAG + window.number, self._phase)
        here = Future[None]()
        self._begun.append((window, self._marks.begin(window.number), pending, here))
        return partial(self._end, pending, here)

    def fill_beside(self) -> None:
        """Fills the windows that were begun by a thread: this rank computes meanwhile."""
        begun, self._begun = self._begun, []
        if begun:
            threading.Thread(target=self._fill, args=(begun,), name="shardopt-by-host", daemon=True).start()

    def _end(self, pending: Pending, here: Future[None]) -> None:
        """Waits for one window. Without a thread, the first call fills all of them."""
        begun, self._begun = self._begun, []
        self._fill(begun)
        assert self._ranks.group is not None
        # What this thread waits for tells ranks that run apart, although another one meets the others.
        with waiting(host_group(self._ranks.group), pending.tag, self._phase):
            here.result()

    def _fill(self, begun: Sequence[Begun]) -> None:
        for number, (window, gather, pending, here) in enumerate(begun):
            try:
                self._fill_one(window, gather, pending)
                here.set_result(None)
            except BaseException as error:  # raised by each wait for one of these
                for window, gather, _, here in begun[number:]:
                    self._marks.mark_failed(window.number, gather)
                    here.set_exception(error)
                return

    def _fill_one(self, window: Window, gather: int, pending: Pending) -> None:
        near, number = self._hosts.near, window.number
        self._ranks.wait(pending, self._limit)
        self._marks.mark_filled(number, gather, window.flat.data_ptr())
        # Every rank starts with another one.
        members = [(near.rank + step) % near.size for step in range(1, near.size)]
        for member in members:
            address = self._marks.wait(near.members[member], number, FILLED, gather, self._limit, self._phase)
            self._read_from(member, address, window)
        self._marks.mark_read(number, gather)
        for member in members:
            self._marks.wait(near.members[member], number, READ, gather, self._limit, self._phase)

    def _read_from(self, member: int, address: int, window: Window) -> None:
        """Reads what a rank of this host has: its own shard, and those that came to it."""
        pid = self._hosts.pids[self._hosts.near.members[member]]
        for host in self._hosts.table:
            target = window.shard(host[member])
            self._hosts.memory.read(pid, address + target.data_ptr() - window.flat.data_ptr(), target)


def by_hosts(ranks: Ranks, hosts: Hosts, phase: str, limit: timedelta | None = None) -> AllGather:
    """Returns an all-gather by host; ``limit``: of each wait, see :meth:`Ranks.wait`."""
    gather = HostGather(ranks, hosts, phase, limit)
    return AllGather(gather.begin, go_on=gather.fill_beside)
