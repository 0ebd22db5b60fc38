"""Unshards params while they are needed: stage 3.

Between uses a rank holds its own slice of each bucket and no memory for the rest. A bucket is gathered when the first
module that owns one of its params runs, forward or backward, and stays while such a module runs. After that the bucket
may be resharded, which frees its memory, at the latest when another bucket needs the room::

    live    .  A  AB  BC  CD    D  DC  CB  BA  .
    need       A  B   C   D     D  C   B   A            (D is still live when backward comes back to it)
               forward ----->   backward ----->

Where shards travel while this rank computes, the bucket that came next in the last pass is prefetched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..errors import CommunicationError
from .bucket import Bucket
from .comm.all_gather import AllGather, Window
from .comm.transport import Transport, barrier


class Slice(Protocol):
    """This rank's slice of a bucket, in memory or offloaded."""

    memory: torch.Tensor | None  # 1D [shard_numel]; None if the slice is offloaded

    def read(self, into: torch.Tensor) -> None: ...

    def write(self, values: torch.Tensor) -> None:
        """Writes the whole slice."""


class MemorySlice:
    """A slice with memory of its own."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory
        self.memory: torch.Tensor | None = memory

    def read(self, into: torch.Tensor) -> None:
        into.copy_(self._memory)

    def write(self, values: torch.Tensor) -> None:
        self._memory.copy_(values)


@dataclass(eq=False)
class GatheredBucket:
    """A bucket, this rank's slice of it, and who needs it."""

    bucket: Bucket
    slice: Slice
    window: Window  # on the bucket's buffer; the ranks' own slices lie elsewhere
    rank: int
    users: int = 0  # modules that run now and need it
    gathering: AllGather | None = None  # the all-gather that was started and not waited for
    is_here: bool = False


@dataclass
class Trace:
    """The order in which buckets were needed in this pass and in the last one before a step; the same on all ranks."""

    last: list[GatheredBucket] = field(default_factory=list)
    now: list[GatheredBucket] = field(default_factory=list)

    def next(self) -> GatheredBucket | None:
        """Returns the bucket that came next in the last pass, if this pass took the same way so far."""
        at = len(self.now)
        return self.last[at] if at < len(self.last) and (at == 0 or self.last[at - 1] is self.now[-1]) else None


class Gatherer:
    """Gathers buckets and reshards them."""

    def __init__(self, transport: Transport, live_bytes: int):
        """
        Args:
            transport: if any slice is offloaded, a transport by which no rank reads another's memory.
            live_bytes: of gathered buckets that may stay allocated while no module needs them.
        """
        self._transport, self._live_bytes = transport, live_bytes
        self._gathered: dict[GatheredBucket, None] = {}  # gathered buckets, the least recently used first
        self._gathered_bytes = 0  # their bytes
        self._trace = Trace()
        self._was_written = False  # True if slices were written since the last barrier

    def window(self, bucket: Bucket, own: Slice) -> Window:
        """Collective: opens a window on a bucket; ``own`` holds this rank's slice."""
        if own.memory is None:
            return self._transport.open(bucket.flat, bucket.layout.shard_numel)
        return self._transport.open_detached(bucket.flat, own.memory)

    def add(self, bucket: Bucket, own: Slice, window: Window) -> GatheredBucket:
        """Takes over a whole bucket and frees its memory; ``own`` holds this rank's slice."""
        bucket.drop()
        return GatheredBucket(bucket, own, window, self._transport.ranks.rank)

    @property
    def waits_for_others(self) -> bool:
        """True if a rank that needs a bucket waits until the others need it."""
        return self._transport.overlaps

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [each.bucket.flat for each in self._gathered]

    # -- use -------------------------------------------------------------------------------------------------------

    def need(self, each: GatheredBucket) -> None:
        """Gathers the bucket. Its params may be read until ``done`` was called as often as ``need``.

        After an error in ``need``, ``done`` must not be called.
        """
        self.wait_for_writes()
        if each.is_here:
            self._gathered[each] = self._gathered.pop(each)  # now the most recently used
        else:
            self._make_room(each)
            self._wait(each)
        if self._transport.overlaps:
            self._prefetch_next(each)
        if not each.users:
            each.bucket.show()
        each.users += 1  # last: after an error the bucket has no user

    def need_all(self, several: Sequence[GatheredBucket]) -> None:
        """Calls ``need`` for all of them; after an error for none."""
        needed = []
        try:
            for each in several:
                self.need(each)
                needed.append(each)
        except BaseException:
            for each in needed:
                self.done(each)
            raise

    def done_but_viewed(self, each: GatheredBucket) -> None:
        """Like ``done``, but leaves the buffer to tensors that still view it; the next gather allocates a new one."""
        if each.users == 1:
            each.bucket.move_params_out()
            each.window = replace(each.window, flat=each.bucket.flat)
        self.done(each, drop=True)

    def done(self, each: GatheredBucket, drop: bool = False) -> None:
        """Ends a use of the bucket.

        Args:
            drop: reshards the bucket now if it has no other user: no use is expected soon.
        """
        each.users -= 1
        assert each.users >= 0
        if not each.users:
            if drop or self._gathered_bytes > self._live_bytes:
                self._drop(each)
            else:
                # The bucket may be freed at any time: nobody may read its params, and above all nobody may write them.
                each.bucket.hide()

    def begin_pass(self) -> None:
        """Begins a forward: buckets are expected in the order of the last pass before a step."""
        self._trace.now.clear()

    def _make_room(self, each: GatheredBucket) -> None:
        if each.gathering is not None:
            return
        for other in list(self._gathered):
            if self._gathered_bytes + each.bucket.nbytes <= self._live_bytes:
                break
            if not other.users:
                self._drop(other)
        each.gathering = self._start(each)

    def _start(self, each: GatheredBucket) -> AllGather:
        each.bucket.allocate()
        try:
            each.slice.read(each.bucket.shard(each.rank))
        except BaseException:  # the slice is read from a disk
            each.bucket.drop()
            raise
        gather = self._transport.all_gather("gathering params")
        gather.start(each.window)
        self._transport.traffic.params += each.window.nbytes_received
        self._gathered[each] = None
        self._gathered_bytes += each.bucket.nbytes
        return gather

    def _wait(self, each: GatheredBucket) -> None:
        assert each.gathering is not None
        each.gathering.finish()
        each.gathering, each.is_here = None, True
        self._gathered[each] = self._gathered.pop(each)

    def _prefetch_next(self, each: GatheredBucket) -> None:
        self._trace.now.append(each)
        following = self._trace.next()
        if following is None or following in self._gathered:
            return
        if self._gathered_bytes + following.bucket.nbytes <= self._live_bytes:
            following.gathering = self._start(following)

    def _drop(self, each: GatheredBucket) -> None:
        if each.gathering is not None:  # other ranks, or the backend, may write to the memory until then
            each.gathering.finish()
            each.gathering = None
        self._gathered.pop(each)
        self._gathered_bytes -= each.bucket.nbytes
        each.is_here = False
        each.bucket.drop()

    def drop_all(self) -> None:
        """Reshards all buckets: their slices are about to change, or the pass was given up."""
        for each in list(self._gathered):
            each.users = 0
            self._drop(each)
        if self._transport.overlaps:
            self._trace = Trace(last=self._trace.now or self._trace.last)

    @property
    def is_alone(self) -> bool:
        """True if no other rank reads this rank's slices, so that it may write them at any time."""
        return self._transport.ranks.size == 1

    def write_back(self, each: GatheredBucket) -> None:
        """Collective: writes this rank's slice of a bucket whose whole params were written on every rank."""
        self._before_write()
        each.slice.write(each.bucket.shard(each.rank))

    def write_slice(self, write: Callable[[], None]) -> None:
        """Collective: calls ``write``, which writes slices outside of a step; every rank must write the same param."""
        self._before_write()
        self.drop_all()  # the gathered values are out of date
        write()

    def _before_write(self) -> None:
        """Collective at the first of several writes: waits until no rank reads the old values."""
        if not self._was_written:
            self._transport.barrier("waiting for ranks that still gather params")
            self._was_written = True

    def wait_for_writes(self) -> None:
        """Collective if slices were written: waits until every rank has written its own."""
        if self._was_written:
            self._was_written = False
            self._transport.barrier("waiting for params that were written")

    def confirm_writes(self, problem: Exception | None) -> None:
        """Collective: tells all ranks if one could not write its slices.

        Raises:
            Exception: this rank's problem.
            CommunicationError: the problem is another rank's.
        """
        try:
            barrier(self._transport.ranks, problem is not None, "writing offloaded params")
        except CommunicationError:
            raise problem or CommunicationError(
                "load a checkpoint: another rank could not write its slices of the params, and its output says why. "
                "The slices of the ranks may now belong to different steps."
            ) from None

    def barrier(self) -> None:
        """Collective: waits until no rank gathers any more."""
        self._transport.barrier("giving params back")
