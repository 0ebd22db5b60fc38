"""Writes of slices of sharded params, in an order with the gathers that read them.

Where ranks read each other's memory, a rank waits before it writes until no rank gathers the old values, and before the
next gather until all ranks have written::

    rank 0   gather   before_write   write                 after_writes   gather          time ->
    rank 1      gather   before_write   write   write      after_writes   gather

Over other connections each rank sends its own slice, and these waits return at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..errors import CommunicationError

if TYPE_CHECKING:
    from ..partition.comm.transport import Transport


class SliceWrites:
    """Orders the writes of slices that some transports gather.

    Attributes:
        transports: in one order on all ranks.
        written: those of slices that some ranks may not have written yet.
        count: how often slices of each may have changed, the same on all of its ranks.
    """

    def __init__(self) -> None:
        self.transports: list[Transport] = []
        self.written: set[Transport] = set()
        self.count: Counter[Transport] = Counter()

    @property
    def is_alone(self) -> bool:
        """True if no other rank reads this rank's slices, so that it may write them at any time."""
        return all(each.ranks.size == 1 for each in self.transports)

    def before_write(self, transport: Transport) -> None:
        """Collective at the first of several writes: waits until no rank reads the old values."""
        self.count[transport] += 1
        if transport not in self.written:
            transport.barrier("waiting for ranks that still gather params")
            self.written.add(transport)

    def after_writes(self) -> None:
        """Collective if slices were written: waits until every rank has written its own."""
        if self.written:
            written, self.written = self.written, set()
            for each in self.transports:
                if each in written:
                    each.barrier("waiting for params that were written")

    def confirm(self, problem: Exception | None) -> None:
        """Collective: raises on all ranks if one could not write its slices.

        Raises:
            Exception: this rank's problem.
            CommunicationError: the problem is another rank's.
        """
        is_known = False
        for each in self.transports:
            try:
                each.ranks.barrier(problem is not None, "writing offloaded params")
            except CommunicationError:
                is_known = True
        if is_known:
            raise problem or CommunicationError(
                "load a checkpoint: another rank could not write its slices of the params, and its output says why. "
                "The slices of the ranks may now belong to different steps."
            )

    def barrier(self) -> None:
        """Collective: waits until no rank gathers any more."""
        for each in self.transports:
            each.barrier("giving params back")
