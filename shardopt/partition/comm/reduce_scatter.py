"""What a reduction is, whichever way gradients travel: each is summed where it is owned, by one of several mechanisms.

Where the sum is ours it is taken in fp32 and in the order of ranks, so that its bits depend on nothing else. What it is
added to, or replaces, may be kept in less: it is then rounded once, to nearest, when all of this reduction is in it::

    target = round(sum of ranks)               the first of a step
    target = round(target + sum of ranks)      what is added to it

A buffer that was handed to ``start`` belongs to the mechanism, which other ranks may be reading from, until it comes
back from ``progress`` or ``settle``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

PHASE = "reducing gradients"
# Elements summed at a time: what is read from a neighbour is still in the cache when it is added, and what is kept in
# less than fp32 needs no more fp32 beside it than this.
CHUNK = 1 << 17


@dataclass(frozen=True)
class Job:
    """One bucket to be summed: each rank its slice; or each of them all, where the target is as long as the buffer.

    All of it takes (size - 1) times the buffer from the wire, twice as much at 4 ranks as slices that are gathered
    behind it. But it needs no second meeting of the ranks, for which none of them could wait in mid-backward.
    """

    buffer: torch.Tensor  # 1D [size * slice_numel], or [slice_numel]; any float dtype: this rank's gradients
    target: torch.Tensor  # 1D [slice_numel], fp32 or what is kept of it: the sum over ranks of our slice goes here
    add: bool  # to what the target holds, instead of replacing it

    @property
    def is_whole(self) -> bool:
        """Whether every rank's slice is all of the bucket."""
        return self.target.numel() == self.buffer.numel()

    def start_of(self, rank: int) -> int:
        """Where the rank's slice begins in the buffer."""
        return 0 if self.is_whole else rank * self.target.numel()

    def slice_of(self, rank: int) -> torch.Tensor:
        start = self.start_of(rank)
        return self.buffer[start : start + self.target.numel()]


class Scatter(Protocol):
    """Rounds of reduction: every rank starts the same jobs in the same order.

    Attributes:
        tells: who waits for a rank that left the round notices at once.
        on_stream: the host does not wait, the current stream does.
    """

    @property
    def tells(self) -> bool: ...

    @property
    def on_stream(self) -> bool: ...

    def begin(self, round_number: int) -> None: ...

    def start(self, job: Job) -> None: ...

    def progress(self) -> list[torch.Tensor]:
        """Goes on as far as is possible without waiting; returns buffers that are free again."""

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        """As ``progress``, until at most ``limit`` jobs are under way; for ``patience`` seconds at most.

        Gloo's messages cannot be asked whether they have arrived, so that :class:`MessageScatter` does not give up.
        """

    def finish(self) -> list[torch.Tensor]:
        """Waits for all jobs; what follows on any rank cannot disturb them. Returns buffers that are free again.

        Raises:
            CommunicationError: a rank died, is late, or left the round.
        """

    def watch(self, closure: int) -> None:
        """A closure of a step begins, counted from 1 on all ranks; 0: it ended."""

    def fail(self, closure: int) -> None:
        """It raised on this rank: who waits for this rank in it is told, where that is possible."""

    def leave(self, round_number: int) -> None:
        """Gives up the round after an error on this rank; the others are told where that is possible."""

    def catch_up(self, round_number: int) -> None:
        """Before all ranks begin the round again: follows the others, if they gave it up and this rank did not."""


class NoScatter:
    """One rank owns everything."""

    tells, on_stream = True, False

    def __init__(self) -> None:
        self._done: list[torch.Tensor] = []

    def begin(self, round_number: int) -> None:
        self._done = []

    def start(self, job: Job) -> None:
        if job.target is not job.buffer:  # of one rank nothing needs to be summed
            take(job.target, job.buffer, job.add)
        self._done.append(job.buffer)

    def progress(self) -> list[torch.Tensor]:
        done, self._done = self._done, []
        return done

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        return self.progress()

    def finish(self) -> list[torch.Tensor]:
        return self.progress()

    def watch(self, closure: int) -> None:
        pass

    def fail(self, closure: int) -> None:
        pass

    def leave(self, round_number: int) -> None:
        pass

    def catch_up(self, round_number: int) -> None:
        pass


def chunks(numel: int) -> Iterator[slice]:
    """Of so many elements, a chunk at a time."""
    return (slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))


def take(target: torch.Tensor, term: torch.Tensor, add: bool) -> None:
    """``target (+)= term``, in fp32, rounded once to what the target is kept in."""
    # Where dtypes differ torch's CPU kernels widen all of them in memory first; a GPU's do it in registers.
    for part in chunks(target.numel()) if target.device.type == "cpu" else [slice(None)]:
        if add:
            target[part].add_(term[part])
        else:
            target[part].copy_(term[part])


def sum_into(target: torch.Tensor, terms: Iterator[torch.Tensor], add: bool) -> None:
    """``target (+)= terms[0] + terms[1] + ...``, in this order, in fp32, rounded once to what the target is kept in.

    A term may be overwritten by the next one. The sum is made beside the target, but for one that replaces what an fp32
    target holds: callers hand over chunks.
    """
    is_direct = target.dtype is torch.float32 and not add
    total = target if is_direct else torch.empty_like(target, dtype=torch.float32)
    for index, term in enumerate(terms):
        if index == 0:
            total.copy_(term)
        else:
            total.add_(term)
    if not is_direct:
        take(target, total, add)
