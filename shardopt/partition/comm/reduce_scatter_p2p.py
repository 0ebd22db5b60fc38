"""Reduction by messages: slices go straight to their owners, who add them up."""

from collections import deque
from typing import Any

import torch

from .group import Pending, Ranks
from .reduce_scatter import PHASE, Job, chunks, sum_into
from .traffic import Traffic


class MessageScatter:
    """Slices sent straight to their owners, under way while backward goes on."""

    tells = on_stream = False

    def __init__(self, ranks: Ranks, traffic: Traffic, number: int):
        self._ranks, self._traffic, self._number = ranks, traffic, number
        self._jobs: deque[tuple[Job, list[torch.Tensor], Pending]] = deque()
        self._abandoned: list[Any] = []
        self._round = self._attempt = self._position = 0

    def begin(self, round_number: int) -> None:
        # Of a round that was left, messages may be under way: they write to memory that must not be given back. Nobody
        # waits for them, as the other ranks may have left sooner; tags keep them from meeting those of this round.
        self._abandoned += self._jobs
        self._jobs.clear()
        self._attempt = self._attempt + 1 if round_number == self._round else 0
        self._round, self._position = round_number, 0

    def start(self, job: Job) -> None:
        rank = self._ranks.rank
        slices = [job.slice_of(each) for each in range(self._ranks.size)]
        others = [each if owner == rank else torch.empty_like(each) for owner, each in enumerate(slices)]
        pending = self._ranks.exchange_slices(slices, others, self._tag(), PHASE)
        self._traffic.gradients += (self._ranks.size - 1) * job.target.numel() * job.buffer.element_size()
        self._position += 1
        others[rank] = slices[rank]
        self._jobs.append((job, others, pending))

    def _tag(self) -> int:
        """Says who, round, attempt and bucket, so that no message is taken for another; repeats after 1,024 rounds."""
        who, round_number = self._number % 64, self._round % 1024
        return (who << 24 | round_number << 14 | self._attempt % 4 << 12 | self._position % 4096) + 1

    def progress(self) -> list[torch.Tensor]:
        return []

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        return [self._finish_first() for _ in range(len(self._jobs) - limit)]

    def finish(self) -> list[torch.Tensor]:
        return [self._finish_first() for _ in range(len(self._jobs))]

    def _finish_first(self) -> torch.Tensor:
        job, slices, pending = self._jobs.popleft()
        self._ranks.wait(pending)
        for part in chunks(job.target.numel()):
            sum_into(job.target[part], (each[part] for each in slices), job.add)
        return job.buffer

    def watch(self, closure: int) -> None:
        pass

    def fail(self, closure: int) -> None:
        pass

    def leave(self, round_number: int) -> None:
        pass  # the others meet the deadline

    def catch_up(self, round_number: int) -> None:
        pass
