"""How gradients are summed where they are owned: one mechanism for each kind of wire, the same on all ranks.

========================  ===========================================================================================
tensors, group            mechanism
========================  ===========================================================================================
one rank                  :class:`NoScatter`
NCCL, or any but gloo     :class:`CollectiveScatter`: the backend's own reduce-scatter
CPU, ranks of one machine :class:`NeighbourScatter`: every rank reads its slice in the others' memory
CPU, gloo                 :class:`MessageScatter`: slices go straight to their owners (gloo's reduce-scatter is slower
                          than its all-reduce)
CUDA, gloo                :class:`StagedScatter`: the same, through host memory
========================  ===========================================================================================

Where the sum is ours it is taken in fp32 and in the order of ranks, so that its bits depend on nothing else.

A buffer that was handed to ``start`` belongs to the mechanism, which other ranks may be reading from, until it comes
back from ``progress`` or ``settle``.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .board import SLOTS, Board
from .collectives import Pending, Ranks
from .neighbours import Neighbours
from .traffic import Traffic

# Elements summed at a time: what is read from a neighbour is still in the cache when it is added.
CHUNK = 1 << 17

PHASE = "reducing gradients"


@dataclass(frozen=True)
class Job:
    """One bucket to be summed."""

    buffer: torch.Tensor  # 1D [size * slice_numel], any float dtype: this rank's gradients
    target: torch.Tensor  # 1D [slice_numel] fp32: the sum over ranks of our slice goes here
    add: bool  # to what the target holds, instead of replacing it

    def slice_of(self, rank: int) -> torch.Tensor:
        numel = self.target.numel()
        return self.buffer[rank * numel : (rank + 1) * numel]


class Scatter(Protocol):
    """Rounds of reduction: every rank starts the same jobs in the same order."""

    def begin(self, round_number: int) -> None: ...

    def start(self, job: Job) -> None: ...

    def progress(self) -> list[torch.Tensor]:
        """Goes on as far as is possible without waiting; returns buffers that are free again."""

    def settle(self, limit: int) -> list[torch.Tensor]:
        """Waits until at most ``limit`` jobs are under way; returns buffers that are free again.

        Raises:
            CommunicationError: a rank died, is late, or left the round.
        """

    def leave(self, round_number: int) -> None:
        """Gives up the round after an error on this rank; the others are told where that is possible."""

    def catch_up(self, round_number: int) -> None:
        """Before all ranks begin the round again: follows the others, if they gave it up and this rank did not."""


def make_scatter(
    ranks: Ranks,
    device: torch.device,
    neighbours: Neighbours | None,
    pids: tuple[int, ...],
    traffic: Traffic,
    number: int,
) -> Scatter:
    """Collective. ``number``: which other mechanisms for these ranks do not have; the same on all of them."""
    if ranks.size == 1:
        return NoScatter()
    if neighbours is not None:
        return NeighbourScatter(ranks, Board(ranks, neighbours, pids), traffic)
    if ranks.has_collectives(device):
        return CollectiveScatter(ranks, traffic)
    kind = MessageScatter if device.type == "cpu" else StagedScatter
    return kind(ranks, traffic, number)


class NoScatter:
    """One rank owns everything."""

    def __init__(self) -> None:
        self._done: list[torch.Tensor] = []

    def begin(self, round_number: int) -> None:
        self._done = []

    def start(self, job: Job) -> None:
        if job.add:
            job.target.add_(job.buffer)
        else:
            job.target.copy_(job.buffer)
        self._done.append(job.buffer)

    def progress(self) -> list[torch.Tensor]:
        done, self._done = self._done, []
        return done

    def settle(self, limit: int) -> list[torch.Tensor]:
        return self.progress()

    def leave(self, round_number: int) -> None:
        pass

    def catch_up(self, round_number: int) -> None:
        pass


class NeighbourScatter:
    """Reads this rank's slice out of every other rank's buffer as soon as that is filled."""

    def __init__(self, ranks: Ranks, board: Board, traffic: Traffic):
        self._ranks, self._board, self._traffic = ranks, board, traffic
        self._others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        self._jobs: deque[Job] = deque()  # from the oldest whose buffer may still be read
        self._first = 0  # position of that job
        self._summed = 0  # jobs of this round that are summed here
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def begin(self, round_number: int) -> None:
        self._jobs.clear()
        self._first = self._summed = 0
        self._board.begin(round_number)

    def start(self, job: Job) -> None:
        assert len(self._jobs) < SLOTS
        self._board.fill(self._first + len(self._jobs), job.buffer.data_ptr())
        self._jobs.append(job)

    def progress(self) -> list[torch.Tensor]:
        return self._advance(0, self._board.ready)

    def settle(self, limit: int) -> list[torch.Tensor]:
        free = self._advance(max(len(self._jobs) - limit, 0), self._board.wait)
        if not limit:
            self._meet()
        return free

    def _meet(self) -> None:
        """Until every rank has come here: what follows goes by messages, of which none can be taken back."""
        self._board.take(self._first)  # as if there were one more job
        for rank in self._others:
            self._board.wait(rank, lambda notice: notice.taken > self._first, PHASE)
        self._first += 1
        self._summed = self._first

    def leave(self, round_number: int) -> None:
        self._board.leave(round_number)

    def catch_up(self, round_number: int) -> None:
        self._board.catch_up(round_number)

    def _advance(self, must: int, look: Callable[..., Any]) -> list[torch.Tensor]:
        """Sums and frees jobs in order; waits for the first ``must``, for the rest looks once."""
        free = []
        while self._summed < self._first + len(self._jobs):
            waiting = self._summed < self._first + must
            if not self._sum(self._summed, look if waiting else self._board.ready):
                break
        while self._jobs:
            position, waiting = self._first, must > 0
            see = look if waiting else self._board.ready
            # A buffer is free when every rank has taken its slice of it.
            if self._summed <= position or not all(
                see(rank, lambda notice: notice.taken > position, PHASE)  # noqa: B023
                for rank in self._others
            ):
                break
            free.append(self._jobs.popleft().buffer)
            self._first += 1
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
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)

            def terms(start: int = start, stop: int = stop) -> Iterator[torch.Tensor]:
                for rank in range(self._ranks.size):
                    if rank == self._ranks.rank:
                        yield own[start:stop]
                    else:
                        into = scratch[: stop - start]
                        at = addresses[rank] + (self._ranks.rank * numel + start) * itemsize
                        self._board.read(rank, at, into, PHASE)
                        yield into

            _sum_into(job.target[start:stop], terms(), job.add)
        self._traffic.gradients += (self._ranks.size - 1) * numel * itemsize
        self._summed += 1
        self._board.take(position)
        return True

    def _scratch_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype]


def _sum_into(target: torch.Tensor, terms: Iterator[torch.Tensor], add: bool) -> None:
    """``target (+)= terms[0] + terms[1] + ...``, in this order, in fp32. A term may be overwritten by the next one."""
    total = torch.empty_like(target) if add else target
    for index, term in enumerate(terms):
        if index == 0:
            total.copy_(term)
        else:
            total.add_(term)
    if add:
        target.add_(total)


class MessageScatter:
    """Slices sent straight to their owners, under way while backward goes on."""

    def __init__(self, ranks: Ranks, traffic: Traffic, number: int):
        self._ranks, self._traffic, self._number = ranks, traffic, number
        self._jobs: deque[tuple[Job, list[torch.Tensor], Pending]] = deque()
        self._round = self._attempt = self._position = 0

    def begin(self, round_number: int) -> None:
        if self._jobs:  # a round that was left: its messages must not meet those of this one
            self.settle(0)
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
        free = []
        while self._jobs and all(work.is_completed() for work in self._jobs[0][2].works):
            free.append(self._finish_first())
        return free

    def settle(self, limit: int) -> list[torch.Tensor]:
        free = []
        while len(self._jobs) > limit:
            free.append(self._finish_first())
        return free

    def _finish_first(self) -> torch.Tensor:
        job, slices, pending = self._jobs.popleft()
        self._ranks.wait(pending)
        _sum_into(job.target, iter(slices), job.add)
        return job.buffer

    def leave(self, round_number: int) -> None:
        pass  # the others meet the deadline

    def catch_up(self, round_number: int) -> None:
        pass


class CollectiveScatter:
    """The backend's reduce-scatter, which sums in the dtype of the buffer; NCCL's runs on its own stream."""

    def __init__(self, ranks: Ranks, traffic: Traffic):
        self._ranks, self._traffic = ranks, traffic
        self._jobs: deque[tuple[Job, torch.Tensor, Pending]] = deque()

    def begin(self, round_number: int) -> None:
        self._jobs.clear()

    def start(self, job: Job) -> None:
        direct = job.buffer.dtype == job.target.dtype and not job.add
        result = job.target if direct else torch.empty_like(job.slice_of(0))
        work = _reduce_scatter_single()(result, job.buffer, group=self._ranks.group, async_op=True)
        self._traffic.gradients += (self._ranks.size - 1) * job.target.numel() * job.buffer.element_size()
        self._jobs.append((job, result, Pending(PHASE, (work,))))

    def progress(self) -> list[torch.Tensor]:
        return []

    def settle(self, limit: int) -> list[torch.Tensor]:
        free = []
        while len(self._jobs) > limit:
            job, result, pending = self._jobs.popleft()
            self._ranks.wait(pending)  # orders the current stream behind the reduction; the host goes on
            if result is not job.target:
                _sum_into(job.target, iter([result]), job.add)
            free.append(job.buffer)
        return free

    def leave(self, round_number: int) -> None:
        pass

    def catch_up(self, round_number: int) -> None:
        pass


class StagedScatter:
    """CUDA tensors over a group that carries only CPU tensors: several ranks on one GPU, for tests of correctness."""

    def __init__(self, ranks: Ranks, traffic: Traffic, number: int):
        self._messages = MessageScatter(ranks, traffic, number)
        self._jobs: deque[tuple[Job, Job]] = deque()

    def begin(self, round_number: int) -> None:
        self._messages.begin(round_number)
        self._jobs.clear()

    def start(self, job: Job) -> None:
        staged = Job(job.buffer.cpu(), job.target.cpu(), job.add)
        self._messages.start(staged)
        self._jobs.append((job, staged))

    def progress(self) -> list[torch.Tensor]:
        return []

    def settle(self, limit: int) -> list[torch.Tensor]:
        free = []
        for _ in self._messages.settle(limit):
            job, staged = self._jobs.popleft()
            job.target.copy_(staged.target)
            free.append(job.buffer)
        return free

    def leave(self, round_number: int) -> None:
        self._messages.leave(round_number)

    def catch_up(self, round_number: int) -> None:
        pass


def _reduce_scatter_single() -> Callable[..., Any]:
    # Renamed in torch 2.13; the older name warns there.
    newer = getattr(dist, "reduce_scatter_single", None)
    return newer if newer is not None else dist.reduce_scatter_tensor
