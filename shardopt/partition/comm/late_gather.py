"""A gather after an update that the step leaves behind: each bucket is waited for when it is needed.

Messages and NCCL's collectives travel while this rank computes. (Where ranks read each other's memory, the reading is
this rank's own work, and no gather is left behind.) Two things differ from :class:`.transport.Gather`:

* Memory into which another rank's shard will arrive holds NaN until then. No older value is ever read as the new one,
  not even by C++ code that no guard of Python's sees.
* No barrier ends it, as ranks come to their waits in any order. Each rank tells each other one, by a message behind its
  last shard, whether it could make all of its shards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...errors import CommunicationError
from ..streams import current_stream
from .all_gather import FIRST_TAG

if TYPE_CHECKING:
    from .all_gather import AllGather, Window
    from .group import Pending, Ranks


class LateGather:
    """``start`` each window once this rank's shard is final, ``tell``, then ``wait`` for one or ``finish`` all."""

    def __init__(self, ranks: Ranks, all_gather: AllGather, phase: str, number: int):
        """
        Args:
            number: of no window; ranks tell each other by messages of this number.
        """
        self._ranks, self._all_gather, self._phase = ranks, all_gather, phase
        self._tag = FIRST_TAG + number
        self._ends = all_gather.ends  # of the windows that nobody has waited for
        self._words: list[torch.Tensor] = []  # by rank: 1 if it failed
        self._told: Pending | None = None
        self._device = torch.device("cpu")
        self._home: torch.cuda.Stream | None = None  # on which the step ran
        self.received = 0  # bytes

    def start(self, window: Window) -> None:
        if not window.nbytes_received:
            return
        for rank in range(self._ranks.size):
            if rank != self._ranks.rank:
                window.shard(rank).fill_(math.nan)
        self._device = window.flat.device
        self._home = current_stream(self._device)
        self._all_gather.start(window)
        self.received += window.nbytes_received

    def tell(self, failed: bool) -> None:
        """Tells the other ranks whether this rank could make its shards; all are started."""
        if self._ranks.size == 1 or self._words:
            return
        own = torch.tensor([int(failed)])
        self._words = [own if rank == self._ranks.rank else torch.empty_like(own) for rank in range(self._ranks.size)]
        self._told = self._ranks.exchange_slices([own] * self._ranks.size, self._words, self._tag, self._phase)

    def wait(self, window: Window) -> None:
        """Waits until the window holds every rank's shard, and this rank's shard is sent.

        Raises:
            CommunicationError: a rank died or is late.
        """
        if window.number in self._ends:
            self._wait(window.number)

    def _wait(self, number: int) -> None:
        end = self._ends[number]
        end()
        # The stream of the step is where most of a script runs. What is read first on another one, a copy of the
        # weights say, is ordered before all that follows there as well.
        if self._home is not None and self._home != current_stream(self._device):
            with torch.cuda.stream(self._home):
                end()
        del self._ends[number]  # last: after an error whoever waits again meets the error again

    def finish(self, failed: bool = False) -> None:
        """Waits for all windows, and for the word of every rank that it could make its shards.

        Args:
            failed: True if this rank could not make its shards.

        Raises:
            CommunicationError: a rank failed, died or is late.
        """
        self.tell(failed)
        for number in list(self._ends):
            self._wait(number)
        if self._told is not None:
            self._ranks.wait(self._told)
            self._told = None
        for rank, word in enumerate(self._words):
            if word.item() and rank != self._ranks.rank:
                raise CommunicationError(f"while {self._phase}: rank {rank} could not go on.")
