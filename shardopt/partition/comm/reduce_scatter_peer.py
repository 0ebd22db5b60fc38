"""Reduce-scatter between ranks of one machine: every rank reads its slice in the other ranks' memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .peer_board import MAX_ADDRESSES, Backoff, Reached
from .reduce_scatter import CHUNK, PHASE, ReduceScatter, in_chunks, sum_into

if TYPE_CHECKING:
    from .group import Ranks, Traffic
    from .peer_board import PeerBoard
    from .reduce_scatter import Blank, Reduction


class PeerReduceScatter(ReduceScatter):
    """Reads this rank's slice of every other rank's buffer as soon as that buffer is full."""

    notifies_peers = True

    def __init__(self, ranks: Ranks, board: PeerBoard, traffic: Traffic):
        self._rank, self._board, self._traffic = ranks.rank, board, traffic
        self._members, at = board.members, board.members.index(ranks.rank)
        self._others = [*self._members[at + 1 :], *self._members[:at]]
        self._reductions: deque[Reduction] = deque()  # the oldest first, whose buffer may still be read
        self._first = 0  # position of the oldest one
        self._summed = self._published = (
            0  # of this round: reductions that this rank has summed; that the others may read
        )
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def start_round(self, round_number: int, closure: int = 0) -> None:
        self._reductions.clear()
        self._first = self._summed = self._published = 0
        self._board.start_round(round_number)
        self._board.closure = closure

    def start(self, reduction: Reduction) -> None:
        self._reductions.append(reduction)
        self._publish()

    def _publish(self) -> None:
        """Lets the other ranks read as many buffers as the board has room for."""
        while self._published < self._first + len(self._reductions) and self._published < self._first + MAX_ADDRESSES:
            self._board.mark_filled(self._published, self._reductions[self._published - self._first].buffer.data_ptr())
            self._published += 1

    @property
    def num_under_way(self) -> int:
        """How many reductions have not ended."""
        return len(self._reductions)

    def progress(self) -> list[Reduction]:
        return self._advance(0)

    def end_first(self) -> list[Reduction]:
        """Waits for the first reduction that is under way, and returns it with those that have ended as well."""
        return self._advance(1)

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        ended, backoff = self.progress(), Backoff(patience)
        while len(self._reductions) > limit and backoff.again():
            ended += self.progress()
        return ended

    def finish(self) -> list[Reduction]:
        ended = self._advance(len(self._reductions))
        self._barrier()
        return ended

    def _barrier(self) -> None:
        """Waits until every rank is here: what follows goes by messages, which cannot be taken back."""
        self._board.mark_consumed(self._first)  # counts as one more reduction
        for rank in self._others:
            self._board.wait(rank, Reached.consumed(self._first), PHASE)
        self._first += 1
        self._summed = self._published = self._first

    def fail_closure(self, closure: int) -> None:
        self._board.fail_closure(closure)

    def abandon_round(self, round_number: int, rest: Sequence[Blank] | None) -> None:
        self._board.abandon_round(round_number)

    def catch_up(self, round_number: int) -> None:
        self._board.catch_up(round_number)

    def _advance(self, must: int) -> list[Reduction]:
        """Sums reductions and ends them, in order; waits for the first ``must``, reads the boards once for the rest.

        A rank whose board is full frees its oldest buffer before it waits for a sum that comes after the
        board's last one.
        Else two ranks with full boards would wait for each other: neither publishes that buffer while it waits. Test:
        test_many_buckets_and_a_late_rank in test_stages.py.
        """
        ended: list[Reduction] = []
        end, ready = self._first + must, True
        while self._reductions:
            while ready and self._summed < self._first + min(len(self._reductions), MAX_ADDRESSES):
                ready = self._sum(self._summed, self._board.wait if self._summed < end else self._board.ready)
            position, read = self._first, self._board.wait if self._first < end else self._board.ready
            # A reduction has ended once every rank has read its slice of the buffer.
            if self._summed <= position or not all(
                read(rank, Reached.consumed(position), PHASE) for rank in self._others
            ):
                break
            ended.append(self._reductions.popleft())
            self._first += 1
            self._publish()
        return ended

    def _sum(self, position: int, read: Callable[..., Any]) -> bool:
        """Sums a reduction; returns False if ``read``, a method of the board, finds that a buffer is not filled yet."""
        addresses = {}
        for rank in self._others:
            notice = read(rank, Reached.filled(position), PHASE)
            if notice is None:
                return False
            addresses[rank] = notice.addresses[position % MAX_ADDRESSES]
        reduction = self._reductions[position - self._first]
        for start, target in reduction.runs(self._rank):
            self._sum_run(reduction, start, target, addresses)
        itemsize = reduction.buffer.element_size()
        self._traffic.gradients += len(self._others) * reduction.target.numel() * itemsize
        self._summed += 1
        self._board.mark_consumed(position)
        return True

    def _sum_run(self, reduction: Reduction, start: int, target: torch.Tensor, addresses: dict[int, int]) -> None:
        """Sums elements of all members' buffers, from ``start`` on, into the target."""
        itemsize, own = reduction.buffer.element_size(), reduction.buffer[start : start + target.numel()]
        scratch = self._scratch_of(reduction.buffer.dtype)
        # The first elements that are read go where the sum is made: one pass over the chunk less.
        is_in_place = not reduction.add and target.dtype is own.dtype is torch.float32
        for into, mine in in_chunks(target, own):
            theirs = scratch if into.numel() == CHUNK else scratch[: into.numel()]

            def terms(
                start: int = start, into: torch.Tensor = into, mine: torch.Tensor = mine, theirs: torch.Tensor = theirs
            ) -> Iterator[torch.Tensor]:
                place = into if is_in_place else theirs
                for rank in self._members:
                    if rank == self._rank:
                        yield mine
                    else:
                        self._board.read(rank, addresses[rank] + start * itemsize, place, PHASE)
                        yield place
                        place = theirs

            sum_into(into, terms(), reduction.add)
            start += into.numel()

    def _scratch_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype]
