"""A stream of whole weights, a bucket at a time, which all ranks read together: for an inference engine, or for files.

Ranks meet before each bucket is gathered, and once at the end. So all of them know of a rank that has left its loop,
and none can begin a step while another one still reads::

    rank 0   meet  gather 0   meet  gather 1   weights of 0   meet  gather 2   weights of 1 ...   meet
    rank 1   meet  gather 0   meet  gather 1   weights of 0   left  break

The next bucket is on its way while the weights of one are used. When it starts follows from the buckets alone, so that
ranks whose loops talk to each other as well make all their calls in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ..domain.dtensors import is_dtensor
from ..errors import CommunicationError, StateError
from ..partition.comm.together import Relay
from ..partition.layout import round_up, split_into_buckets
from ..tensors.inner_tensors import with_inside

if TYPE_CHECKING:
    from ..domain.shard import Shard
    from ..domain.turn import Turn
    from ..partition.comm.group import Ranks
    from ..partition.comm.transport import Transport
    from .weights import Weight

_PHASE = "gathering weights"


class Way(IntEnum):
    """How a rank comes to a meeting."""

    READS_ON = 0
    LEFT = 1
    CALLED = 2
    FAILED = 3


_IN_WORDS = {
    Way.LEFT: "left its loop over weights() (by break, an exception, or as the stream was dropped)",
    Way.CALLED: "made another call of the optimizer in the middle of weights()",
    Way.FAILED: "could not go on, and says why",
}


@dataclass(eq=False)
class _Run:
    """Params that follow each other in a bucket of shards: they are gathered into one piece of memory.

    Attributes:
        start, stop: elements of that bucket.
        memory: 1D [stop - start], while it is used.
    """

    shard: Shard
    transport: Transport
    dtype: torch.dtype
    start: int
    stop: int
    memory: torch.Tensor | None = None

    def fill(self) -> None:
        """Allocates the memory, and writes this rank's slice there."""
        self.memory = torch.empty(self.stop - self.start, dtype=self.dtype, device=self.shard.device)
        rank = self.transport.ranks.rank
        first, last = self._slice_of(rank)
        if first < last:
            before = rank * self.shard.numel
            own = self.shard.read_chunk(self.shard.exact, first - before, last - before)
            self.memory[first - self.start : last - self.start].copy_(own)

    def begin(self) -> Iterator[Callable[[], None]]:
        """Collective: starts to send each rank's slice to all of them. Yields the calls that wait for that."""
        ranks = self.transport.ranks
        assert self.memory is not None
        for rank in range(ranks.size):
            first, last = self._slice_of(rank)
            if first < last:
                theirs = self.memory[first - self.start : last - self.start]
                yield ranks.begin_broadcast(theirs, _PHASE, rank)
                self.transport.traffic.params += 0 if rank == ranks.rank else theirs.nbytes

    def local(self, index: int) -> torch.Tensor:
        """Returns a view of the bucket's param ``index``."""
        layout, param = self.shard.bucket.layout, self.shard.bucket.params[index]
        assert self.memory is not None
        return self.memory.as_strided(param.size(), self.shard.strides(index), layout.offsets[index] - self.start)

    def _slice_of(self, rank: int) -> tuple[int, int]:
        own = self.shard.bucket.layout.shard_slice(rank)
        return max(self.start, own.start), min(self.stop, own.stop)


class _Bucket:
    """Weights that are gathered together."""

    def __init__(self, weights: Sequence[Weight]):
        self.weights = weights
        self._run_of: dict[Weight, _Run] = {}
        self._waits: list[Callable[[], None]] = []
        self._wholes: dict[Weight, torch.Tensor] = {}  # of DTensors
        self._runs = list(self._find_runs())

    def _find_runs(self) -> Iterator[_Run]:
        by_shard: dict[Shard, list[tuple[int, Weight]]] = {}
        for weight in (part for each in self.weights for part in each.parts):
            if weight.place is not None:
                by_shard.setdefault(weight.place.shard, []).append((weight.place.index, weight))
        for shard, found in by_shard.items():
            run, layout = None, shard.bucket.layout
            for index, weight in sorted(found, key=lambda each: each[0]):
                assert weight.place is not None
                start = layout.offsets[index]
                if run is None or round_up(run.stop) != start or run.dtype != weight.dtype:
                    run = _Run(shard, weight.place.transport, weight.dtype, start, start)
                    yield run
                run.stop = start + layout.numels[index]
                self._run_of[weight] = run

    def fill(self) -> None:
        """Allocates memory, and copies this rank's slices. Nothing else of it fails on one rank alone."""
        for each in self._runs:
            each.fill()

    def begin(self) -> None:
        """Collective: starts to gather. DTensors are made whole at once, while all their ranks are here."""
        for each in self._runs:
            self._waits.extend(each.begin())
        wholes = [each for each in self.weights if is_dtensor(each.tensor)]
        if wholes:
            self.wait()
            self._wholes = {each: self._whole(each) for each in wholes}

    def wait(self) -> None:
        """Waits until all values are here."""
        for wait in self._waits:
            wait()
        self._waits.clear()

    def whole(self, weight: Weight) -> torch.Tensor:
        """Returns a weight, for the caller to keep."""
        return self._wholes.pop(weight) if weight in self._wholes else self._whole(weight)

    def _whole(self, weight: Weight) -> torch.Tensor:
        if weight.inside:
            return with_inside(weight.tensor, lambda inner: self._whole(weight.inside[inner]))
        place = weight.place
        return weight.whole(None if place is None else self._run_of[weight].local(place.index))


class WeightStream(Iterator[tuple[str, torch.Tensor]]):
    """The pairs of a name and a whole weight that ``optimizer.weights()`` returns. Every rank takes all of them.

    A weight is the caller's. If several came out of one bucket, each holds the memory of all of them while it lives.
    """

    _is_over = True  # until it is constructed

    def __init__(self, weights: Sequence[Weight], bucket_bytes: int, ranks: Sequence[Ranks], turn: Turn):
        """
        Args:
            ranks: those that read together, each set of them.
        """
        sizes = [each.nbytes for each in weights]
        self._buckets = [_Bucket([weights[at] for at in each]) for each in split_into_buckets(sizes, bucket_bytes)]
        self._sizes = [sum(each.nbytes for each in bucket.weights) for bucket in self._buckets]
        self._most = 2 * bucket_bytes + max(sizes, default=0)
        self._ranks, self._turn = ranks, turn
        self._end: StateError | None = None  # why it ended before its end
        self._here: _Bucket | None = None  # whose weights are given out
        self._under_way: _Bucket | None = None  # the next one
        self._number, self._at = -1, 0  # of the bucket, and of its next weight
        self._is_over = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Returns the next pair. Collective.

        Raises:
            StateError: another rank has left its loop, or made another call.
            CommunicationError: a rank died or is late.
        """
        if self._end is not None:
            raise self._end
        with self._turn.take_together("weights()"), torch.no_grad():
            try:
                return self._read()
            except StopIteration:
                raise
            except BaseException:
                self._leave(Way.FAILED)
                raise

    def _read(self) -> tuple[str, torch.Tensor]:
        if self._here is None or self._at == len(self._here.weights):
            self._here, self._number, self._at = None, self._number + 1, 0  # the memory of one bucket goes
            if self._under_way is None:
                self._begin(self._number)
            self._here, self._under_way = self._under_way, None
            assert self._here is not None
            self._here.wait()
            if self._number == len(self._buckets):
                self._is_over = True
                raise StopIteration
            self._buckets[self._number] = _Bucket(())
        if self._at == self._starts_next(self._number):
            self._begin(self._number + 1)
        weight = self._here.weights[self._at]
        self._at += 1
        return weight.name, self._here.whole(weight)

    def _starts_next(self, number: int) -> int | None:
        """Returns at which weight of a bucket the next one starts; None: behind its last one.

        At the second weight, the caller's variable holds nothing of the bucket before any more.
        """
        if number + 1 == len(self._buckets):
            return None
        if self._here is not None and len(self._here.weights) > 1:
            return 1
        return 0 if sum(self._sizes[max(number - 1, 0) : number + 2]) <= self._most else None

    def _begin(self, number: int) -> None:
        """Collective: the ranks meet, and start to gather a bucket if there is one."""
        bucket = self._buckets[number] if number < len(self._buckets) else _Bucket(())
        relay = Relay()
        relay.attempt(bucket.fill)
        self._meet(Way.READS_ON if relay.problem is None else Way.FAILED)
        relay.check()
        self._under_way = bucket
        bucket.begin()

    def _meet(self, way: Way) -> list[int]:
        """Collective: returns how the other ranks come to this meeting.

        Raises:
            StateError: this rank reads on, and others do not.
        """
        found: list[int] = []
        for ranks in self._ranks:
            others = [each for (each,) in ranks.exchange([max(way, *found, 0)], "meeting before a bucket of weights()")]
            found += others
            first = next((rank for rank, each in enumerate(others) if each), None)
            if first is not None and self._end is None:
                self._end_here(Way(others[first]), first)
        if way is Way.READS_ON and self._end is not None:
            raise self._end
        return found

    def _end_here(self, way: Way, rank: int) -> None:
        self._is_over = True
        self._end = StateError(
            "let every rank take all of weights(), or leave the loop at the same weight, and call step() and loads "
            f"behind it: rank {rank} {_IN_WORDS[way]}, and gathers need all ranks. The stream has ended on all of them."
        )

    # -- the end before the end ----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True until its end, on this rank."""
        return not self._is_over

    def close(self) -> None:
        """Ends the stream on all ranks: the others raise a StateError at their next bucket. Does not wait for them."""
        self._leave(Way.LEFT)

    __del__ = close

    def interrupt(self, call: str) -> StateError:
        """Ends the stream like :meth:`close`, for another call of this rank. Returns the error to raise."""
        self._leave(Way.CALLED)
        return _interrupted(call)

    def interrupt_together(self, call: str) -> tuple[StateError, bool]:
        """Ends the stream for a call of all ranks, and waits for them. Returns the error to raise.

        Also True if all ranks raise it now: no rank is in that call, or waits for it.
        """
        self._let_arrive()
        ways = self._meet(Way.CALLED)
        return _interrupted(call), all(each != Way.LEFT for each in ways)

    def _leave(self, way: Way) -> None:
        """Takes part in the next meeting, and in what was started before, without waiting for the others."""
        if self._is_over:
            return
        self._is_over = True
        self._end = self._end or StateError(
            "call weights() again, on every rank: this stream was left before its end, and no rank gathers for it."
        )
        with suppress(CommunicationError, ValueError):  # raised before; or torch's, without a process group any more
            self._let_arrive()
            for ranks in self._ranks:
                ranks.begin_exchange([way], "leaving weights()")

    def _let_arrive(self) -> None:
        """Waits for a bucket that all ranks have begun to gather, and frees all memory."""
        bucket, self._here, self._under_way, self._buckets = self._under_way, None, None, []
        if bucket is not None:
            bucket.wait()


def _interrupted(call: str) -> StateError:
    return StateError(
        f"take all of weights() before {call}, or leave its loop and drop the stream (or close() it) on every rank: "
        f"{call} would change weights that other ranks still read. The stream has ended, and nothing else was done."
    )
