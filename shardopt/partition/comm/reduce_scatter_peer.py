"""Reduction between ranks of one machine: every rank reads its slice in the others' memory."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .group import Ranks
from .peer_board import SLOTS, Board, Nap
from .reduce_scatter import CHUNK, PHASE, Job, chunks, sum_into
from .traffic import Traffic


class NeighbourScatter:
    """Reads this rank's slice out of every other rank's buffer as soon as that is filled."""

    tells, on_stream = True, False

    def __init__(self, ranks: Ranks, board: Board, traffic: Traffic):
        self._ranks, self._board, self._traffic = ranks, board, traffic
        self._others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        self._jobs: deque[Job] = deque()  # from the oldest whose buffer may still be read
        self._first = 0  # position of that job
        self._summed = self._shown = 0  # jobs of this round that are summed here; that the others may read
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def begin(self, round_number: int) -> None:
        self._jobs.clear()
        self._first = self._summed = self._shown = 0
        self._board.begin(round_number)

    def start(self, job: Job) -> None:
        self._jobs.append(job)
        self._show()

    def _show(self) -> None:
        """Lets the others read as many buffers as the board has room for."""
        while self._shown < self._first + len(self._jobs) and self._shown < self._first + SLOTS:
            self._board.fill(self._shown, self._jobs[self._shown - self._first].buffer.data_ptr())
            self._shown += 1

    def progress(self) -> list[torch.Tensor]:
        return self._advance(0)

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        free, nap = self.progress(), Nap(patience)
        while len(self._jobs) > limit and nap.take():
            free += self.progress()
        return free

    def finish(self) -> list[torch.Tensor]:
        free = self._advance(len(self._jobs))
        self._meet()
        return free

    def _meet(self) -> None:
        """Until every rank has come here: what follows goes by messages, of which none can be taken back."""
        self._board.take(self._first)  # as if there were one more job
        for rank in self._others:
            self._board.wait(rank, lambda notice: notice.taken > self._first, PHASE)
        self._first += 1
        self._summed = self._shown = self._first

    def watch(self, closure: int) -> None:
        self._board.closure = closure

    def fail(self, closure: int) -> None:
        self._board.fail(closure)

    def leave(self, round_number: int) -> None:
        self._board.leave(round_number)

    def catch_up(self, round_number: int) -> None:
        self._board.catch_up(round_number)

    def _advance(self, must: int) -> list[torch.Tensor]:
        """Sums and frees jobs in order; waits for the first ``must``, for the rest looks once."""
        free: list[torch.Tensor] = []
        while self._summed < self._first + len(self._jobs):
            look = self._board.wait if self._summed < self._first + must else self._board.ready
            if not self._sum(self._summed, look):
                break
        while self._jobs:
            position, see = self._first, self._board.wait if must > 0 else self._board.ready
            # A buffer is free when every rank has taken its slice of it.
            if self._summed <= position or not all(
                see(rank, lambda notice: notice.taken > position, PHASE)  # noqa: B023
                for rank in self._others
            ):
                break
            free.append(self._jobs.popleft().buffer)
            self._first += 1
            self._show()
            must -= 1
        return free

    def _sum(self, position: int, look: Callable[..., Any]) -> bool:
        addresses = {}
        for rank in self._others:
            notice = look(rank, lambda notice: notice.filled > position, PHASE)
            if notice is None:
                return False
            addresses[rank] = notice.addresses[position % SLOTS]
        job = self._jobs[position - self._first]
        numel, itemsize = job.target.numel(), job.buffer.element_size()
        own = job.slice_of(self._ranks.rank)
        scratch = self._scratch_of(job.buffer.dtype)
        for part in chunks(numel):

            def terms(part: slice = part) -> Iterator[torch.Tensor]:
                for rank in range(self._ranks.size):
                    if rank == self._ranks.rank:
                        yield own[part]
                    else:
                        into = scratch[: part.stop - part.start]
                        at = addresses[rank] + (job.start_of(self._ranks.rank) + part.start) * itemsize
                        self._board.read(rank, at, into, PHASE)
                        yield into

            sum_into(job.target[part], terms(), job.add)
        self._traffic.gradients += (self._ranks.size - 1) * numel * itemsize
        self._summed += 1
        self._board.take(position)
        return True

    def _scratch_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype]
