"""A gather after an update that the step does not wait for: each bucket is waited for when it is needed.

Messages and NCCL's collectives travel while this rank computes; by host, a thread reads what the others have. (Where
all ranks read each other's memory, nothing travels, and every step waits for its gather.) Two things differ from
:class:`.transport.Gather`:

* Memory into which another rank's shard will arrive holds NaN until then. No older value is ever read as the new one,
  not even by C++ code that no guard of Python's sees.
* No barrier ends it, as ranks come to their waits in any order. Each rank sends each other one a status after its last
  shard: whether it could make all of its shards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...errors import CommunicationError
from ...gpu_stream import current_stream, on_stream
from .tags import FIRST_TAG

if TYPE_CHECKING:
    from .all_gather import AllGather, Window
    from .group import Pending, Ranks


class AsyncGather:
    """``start`` each window once this rank's shard is final; ``send_status``; ``wait`` for a window; ``finish``."""

    def __init__(self, ranks: Ranks, all_gather: AllGather, phase: str, number: int):
        """
        Args:
            number: of the messages that carry statuses; no window has it.
        """
        self._ranks, self._all_gather, self._phase = ranks, all_gather, phase
        self._tag = FIRST_TAG + number
        self._ends = all_gather.ends  # of the windows that were not waited for yet
        self._coded: set[int] = set()  # the windows that are decoded once they have arrived
        self._statuses: list[torch.Tensor] = []  # by rank: 1 if it failed
        self._status_messages: Pending | None = None
        self._device = torch.device("cpu")
        self._step_stream: torch.cuda.Stream | None = None
        self.received = 0  # bytes

    def start(self, window: Window) -> None:
        if not window.nbytes_received:
            return
        self._device = window.flat.device
        self._step_stream = current_stream(self._device)
        # Code that no guard sees would train on the old values without notice. NaN is noticed. Test:
        # test_what_has_not_arrived_is_nan_and_never_older in tests/module/test_arriving.py.
        for rank in range(self._ranks.size):
            if rank != self._ranks.rank:
                window.shard(rank).fill_(math.nan)
        if window.code is not None:
            self._coded.add(window.number)
            self.received += self._all_gather.start_encoded(window, self._ranks.rank)
            return
        self._all_gather.start(window)
        self.received += window.nbytes_received

    def send_status(self, failed: bool) -> None:
        """Sends the other ranks whether this rank could make its shards. Called once all windows are started."""
        if self._ranks.size == 1 or self._statuses:
            return
        if self._all_gather.go_on is not None:
            self._all_gather.go_on()
        own = torch.tensor([int(failed)])
        size, rank = self._ranks.size, self._ranks.rank
        self._statuses = [own if peer == rank else torch.empty_like(own) for peer in range(size)]
        self._status_messages = self._ranks.exchange_slices([own] * size, self._statuses, self._tag, self._phase)

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
        # Most of a script runs on the stream of the step. If a param is read first on another stream (a copy of the
        # weights, say), kernels on the stream of the step would not wait for the gather. So that stream waits as well.
        here = current_stream(self._device)
        if self._step_stream is not None and here is not None and self._step_stream != here:
            if number in self._coded:  # decoding again would write what may be read by now
                self._step_stream.wait_stream(here)
            else:
                with on_stream(self._step_stream):
                    end()
        del self._ends[number]  # last: after an error the next wait meets the same error

    def finish(self, failed: bool = False) -> None:
        """Waits for all windows, and for the status of every rank.

        Args:
            failed: True if this rank could not make its shards.

        Raises:
            CommunicationError: a rank failed, died or is late.
        """
        self.send_status(failed)
        for number in list(self._ends):
            self._wait(number)
        if self._status_messages is not None:
            self._ranks.wait(self._status_messages)
            self._status_messages = None
        for rank, status in enumerate(self._statuses):
            if status.item() and rank != self._ranks.rank:
                raise CommunicationError(f"while {self._phase}: rank {rank} could not go on.")
