"""Peers whose processes end, as a rank that goes on sees them: it says so to those for which it waits in vain.

A process that ends goes on serving its states (:mod:`.peers`), so its connections stay, and whoever waits for it in an
exchange does not notice. So it says first that it ends. A rank that waits for it answers: the process then goes, its
connections break, and the wait ends in an error. A rank that reads its states, or may still do so, does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..partition.comm.ended import begun, is_ahead, note_ended, waits
from ..partition.comm.host_group import host_group

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks

_PAUSE = 0.1  # seconds between two looks at whether this rank waits
# Looks in a row at one wait, before it counts as in vain: what the other rank sent before its end may be on its way.
_LOOKS = 10


class EndedPeers:
    """The peers of one optimizer whose processes end."""

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()):
        """``groups``: see :func:`groups_between`."""
        self.groups = groups
        self._peers: list[connection.Connection[Any, Any]] = []
        self._lock = threading.Lock()

    def keep(self, peer: connection.Connection[Any, Any], facts: Sequence[Any]) -> None:
        """Keeps the connection of a peer that ends, until this rank waits for it in vain.

        Args:
            facts: what :func:`facts_of` returned there.
        """
        for group, (rank, count) in zip(self.groups, facts, strict=True):
            note_ended(group, int(rank), int(count))
        with self._lock:
            self._peers.append(peer)
            if len(self._peers) == 1:
                threading.Thread(target=self._watch, name="shardopt-ended-peers", daemon=True).start()

    def _watch(self) -> None:
        looks, last = 0, list[int]()
        while self._drop_gone() and looks < _LOOKS:
            now = [begun(group) for group in self.groups]
            looks = looks + 1 if is_ahead(self.groups) and waits() and now == last else 0
            last = now
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            with peer, suppress(OSError):
                peer.send_bytes(b"\0")

    def _drop_gone(self) -> bool:
        """Waits a moment, and drops the peers that have gone meanwhile. Returns True if any are left."""
        gone = connection.wait(self._peers, _PAUSE)
        with self._lock:
            for peer in gone:
                assert isinstance(peer, connection.Connection)
                self._peers.remove(peer)
                peer.close()
            return bool(self._peers)


def groups_between(several: Iterable[Ranks]) -> list[dist.ProcessGroup]:
    """Returns the groups in which these ranks wait for each other: theirs, those beside them, and that of all ranks.

    In one order on all ranks that share an optimizer.
    """
    found = [group for ranks in several if (group := ranks.group) is not None]
    found += [*map(host_group, found), *([dist.group.WORLD] if dist.group.WORLD is not None else [])]
    return list(dict.fromkeys(found))


def facts_of(groups: Sequence[dist.ProcessGroup]) -> list[list[int]]:
    """Returns this rank's number in each group, and how many exchanges it has begun there."""
    return [[group.rank(), begun(group)] for group in groups]
