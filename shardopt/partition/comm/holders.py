"""The ranks that hold gathered buckets between them while nobody uses these: some of a transport's ranks.

Each keeps a part, and a later gather of the same values needs these ranks alone. With four ranks, two of them a host::

    rank                    0      1      2      3
    slices of the bucket    0      1      2      3      a first gather crosses hosts
    parts that are held    0 1    2 3    0 1    2 3     a later one stays within a host

A holder reads another one's part by its address once that one has said that it is there: by a message after each
:meth:`Holders.announce`. Any other holders send each other their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from .all_gather import Window, by_batches, by_messages, by_reading
from .hosts import SomeRanks
from .tags import FIRST_TAG

if TYPE_CHECKING:
    from datetime import timedelta

    from .all_gather import AllGather
    from .group import Pending, Ranks
    from .peer_memory import PeerMemory


class Holders(SomeRanks):
    """Some ranks of a transport's, this one among them."""

    def __init__(self, ranks: Ranks, members: Sequence[int], device: torch.device, memory: PeerMemory | None):
        """``memory``: reads the other holders' memory; None if some holder cannot."""
        super().__init__(ranks, members)
        self._device, self._memory = device, memory
        self._ready: dict[int, Pending] = {}  # by the number of a window: that the holders' parts of it are there

    @property
    def reads_memory(self) -> bool:
        """True if a part must stay where it was when its window was opened."""
        return self._memory is not None

    def announce(self, number: int, phase: str) -> None:
        """Sends the other holders that this rank's part of the window of this number is in place."""
        if self._memory is not None:
            earlier = self._ready.pop(number, None)
            if earlier is not None:  # of a part that nobody read
                self.wait(earlier)
            others = [torch.empty(1, dtype=torch.uint8) for _ in self.members]
            own = [torch.ones(1, dtype=torch.uint8)] * self.size
            self._ready[number] = self.exchange_slices(own, others, FIRST_TAG + number, phase)

    def all_gather(self, phase: str, limit: timedelta | None) -> AllGather:
        """Returns an all-gather of parts that each holder has announced."""
        if self._memory is not None:
            return by_reading(self, self._memory, partial(self._wait_for_parts, limit=limit))
        if self._ranks.has_collectives(self._device):
            return by_batches(self._ranks, self.members, phase)
        return by_messages(self, phase, limit)

    def _wait_for_parts(self, window: Window, limit: timedelta | None) -> None:
        pending = self._ready.pop(window.number, None)
        if pending is not None:  # else an earlier gather of the same values has waited
            self.wait(pending, limit)

    def window(self, flat: torch.Tensor, number: int, peers: tuple[tuple[int, int], ...]) -> Window:
        """Returns a window on a whole bucket, in which each holder owns a part.

        Args:
            peers: process numbers and addresses of all parts, by holder; empty unless holders read memory.
        """
        return Window(flat, flat.numel() // self.size, number, peers, flat.dtype)


def part_of(flat: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Returns this rank's part of a whole bucket."""
    numel = flat.numel() // holders.size
    return flat[holders.rank * numel : (holders.rank + 1) * numel]
