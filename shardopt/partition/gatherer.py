"""Params that are gathered while they are needed: stage 3.

Between uses a rank holds its own slice of each bucket and no memory for the rest. A bucket is gathered when the first
module that owns one of its params runs, forward or backward, and stays for as long as one is running; after that it
may be dropped, at the latest when another one needs the room::

    live    .  A  AB  BC  CD    D  DC  CB  BA  .
    need       A  B   C   D     D  C   B   A            (D is still there when backward comes back to it)
               forward ----->   backward ----->

On wires that carry shards while this rank computes, the bucket that came next in the last pass is asked for early.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..errors import CommunicationError
from .bucket import Bucket
from .comm.all_gather import AllGather, Window
from .comm.transport import Transport, meet


class Slice(Protocol):
    """This rank's slice of a bucket, wherever it rests."""

    memory: torch.Tensor | None  # 1D [shard_numel]: where it lies, if it lies in memory

    def read(self, into: torch.Tensor) -> None: ...

    def write(self, values: torch.Tensor) -> None:
        """All of it."""


class MemorySlice:
    """In memory of its own."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory
        self.memory: torch.Tensor | None = memory

    def read(self, into: torch.Tensor) -> None:
        into.copy_(self._memory)

    def write(self, values: torch.Tensor) -> None:
        self._memory.copy_(values)


@dataclass(eq=False)
class GatheredBucket:
    """A bucket, this rank's slice of it, and what keeps it here."""

    bucket: Bucket
    slice: Slice
    window: Window  # on the bucket's buffer; the ranks' slices lie apart from it
    rank: int
    users: int = 0  # that run now
    arriving: AllGather | None = None  # asked for, not awaited
    is_here: bool = False


@dataclass
class Trace:
    """The order in which buckets were needed in this pass, and in the last one before a step: the same on all ranks."""

    last: list[GatheredBucket] = field(default_factory=list)
    now: list[GatheredBucket] = field(default_factory=list)

    def next(self) -> GatheredBucket | None:
        """What followed at this point of the last pass, if this one went the same way so far."""
        at = len(self.now)
        return self.last[at] if at < len(self.last) and (at == 0 or self.last[at - 1] is self.now[-1]) else None


class Gatherer:
    """Gathers and drops buckets."""

    def __init__(self, transport: Transport, live_bytes: int):
        """``transport``: one by which no rank reads another's memory, if any slice does not lie in memory."""
        self._transport, self._live_bytes = transport, live_bytes
        self._here: dict[GatheredBucket, None] = {}  # from the least recently used
        self._held = 0  # bytes of these
        self._trace = Trace()
        self._was_written = False  # slices, since ranks last met

    def window(self, bucket: Bucket, own: Slice) -> Window:
        """Collective: on a bucket of which ``own`` holds this rank's slice."""
        if own.memory is None:
            return self._transport.open(bucket.flat, bucket.layout.shard_numel)
        return self._transport.open_apart(bucket.flat, own.memory)

    def add(self, bucket: Bucket, own: Slice, window: Window) -> GatheredBucket:
        """Takes a whole bucket over and drops it; ``own`` holds this rank's slice."""
        bucket.drop()
        return GatheredBucket(bucket, own, window, self._transport.ranks.rank)

    @property
    def waits_for_others(self) -> bool:
        """Whether a rank that needs a bucket waits until the others need it."""
        return self._transport.overlaps

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [each.bucket.flat for each in self._here]

    # -- use -------------------------------------------------------------------------------------------------------

    def need(self, each: GatheredBucket) -> None:
        """The bucket's params may be read until as many ``done`` calls have followed. After an error, none needs to."""
        self.settle()
        if each.is_here:
            self._here[each] = self._here.pop(each)  # most recently used
        else:
            self._make_room(each)
            self._arrive(each)
        if self._transport.overlaps:
            self._ask_for_next(each)
        if not each.users:
            each.bucket.show()
        each.users += 1  # last: after an error nobody has it, and nobody calls done

    def need_all(self, several: Sequence[GatheredBucket]) -> None:
        """``need`` for all of them, or after an error for none."""
        needed = []
        try:
            for each in several:
                self.need(each)
                needed.append(each)
        except BaseException:
            for each in needed:
                self.done(each)
            raise

    def leave(self, each: GatheredBucket) -> None:
        """As ``done``, its memory being left to others that keep views of it."""
        if each.users == 1:
            each.bucket.move_params_out()
            each.window = replace(each.window, flat=each.bucket.flat)
        self.done(each, drop=True)

    def done(self, each: GatheredBucket, drop: bool = False) -> None:
        """A user has come to its end. ``drop``: no other one is to be expected soon."""
        each.users -= 1
        assert each.users >= 0
        if not each.users:
            if drop or self._held > self._live_bytes:
                self._drop(each)
            else:
                each.bucket.hide()  # nobody else may read, and above all not write, what may go at any time

    def begin_pass(self) -> None:
        """A new forward begins: what follows will be as in the last pass before a step."""
        self._trace.now.clear()

    def _make_room(self, each: GatheredBucket) -> None:
        if each.arriving is not None:
            return
        for other in list(self._here):
            if self._held + each.bucket.nbytes <= self._live_bytes:
                break
            if not other.users:
                self._drop(other)
        each.arriving = self._ask(each)

    def _ask(self, each: GatheredBucket) -> AllGather:
        each.bucket.allocate()
        try:
            each.slice.read(each.bucket.shard(each.rank))
        except BaseException:  # from a disk
            each.bucket.drop()
            raise
        wire = self._transport.wire("gathering params")
        wire.start(each.window)
        self._transport.traffic.params += each.window.nbytes_received
        self._here[each] = None
        self._held += each.bucket.nbytes
        return wire

    def _arrive(self, each: GatheredBucket) -> None:
        assert each.arriving is not None
        each.arriving.finish()
        each.arriving, each.is_here = None, True
        self._here[each] = self._here.pop(each)

    def _ask_for_next(self, each: GatheredBucket) -> None:
        self._trace.now.append(each)
        following = self._trace.next()
        if following is None or following in self._here:
            return
        if self._held + following.bucket.nbytes <= self._live_bytes:
            following.arriving = self._ask(following)

    def _drop(self, each: GatheredBucket) -> None:
        if each.arriving is not None:  # its memory may be written to until then
            each.arriving.finish()
            each.arriving = None
        self._here.pop(each)
        self._held -= each.bucket.nbytes
        each.is_here = False
        each.bucket.drop()

    def drop_all(self) -> None:
        """Nothing stays: the slices are about to change, or the pass was given up."""
        for each in list(self._here):
            each.users = 0
            self._drop(each)
        if self._transport.overlaps:
            self._trace = Trace(last=self._trace.now or self._trace.last)

    @property
    def is_alone(self) -> bool:
        """Whether this rank's slices are all there is, so that it may write them at any time."""
        return self._transport.ranks.size == 1

    def write_back(self, each: GatheredBucket) -> None:
        """This rank's slice follows a whole bucket whose params were written, on every rank."""
        self._before_write()
        each.slice.write(each.bucket.shard(each.rank))

    def write_slice(self, write: Callable[[], None]) -> None:
        """Writes to slices outside of a step; every rank does so with the same whole."""
        self._before_write()
        self.drop_all()  # what is here no longer holds
        write()

    def _before_write(self) -> None:
        """Collective at the first of several writes: nobody may still be reading what was there before."""
        if not self._was_written:
            self._transport.settle("waiting for ranks that still gather params")
            self._was_written = True

    def settle(self) -> None:
        """Collective if slices were written: until they are on every rank."""
        if self._was_written:
            self._was_written = False
            self._transport.settle("waiting for params that were written")

    def written(self, problem: Exception | None) -> None:
        """Collective: whether every rank could write its slices.

        Raises:
            Exception: this rank's problem.
            CommunicationError: another one's.
        """
        try:
            meet(self._transport.ranks, problem is not None, "writing params to where they rest")
        except CommunicationError:
            raise problem or CommunicationError(
                "another rank could not write its slices of the params, and says why: those of the ranks may now be of "
                "different times. Load a checkpoint."
            ) from None

    def meet(self) -> None:
        """Collective: until no rank gathers any more."""
        self._transport.settle("giving params back")
