"""Sums gradients over ranks while backward goes on: buckets in a fixed order, filled as gradients arrive.

Every rank reduces every bucket once a round (one synchronised backward), in the same order, whatever its own graph
holds: what has not arrived counts as zero. So no rank waits for a bucket that another will never send, and none takes
one bucket for another. A full buffer lives only while it is being filled and reduced::

    bucket 0   fill fill  reduce .......                          time ->
    bucket 1             fill fill fill  reduce .......
    bucket 2                            fill fill  reduce .......
    buffers    A         B              A (free again)

The order is that in which buckets were full in their first round, on rank 0; in that round it is backward order. A
bucket leaves when all has arrived that ever did on this rank; if nothing can be added to its sum, when all has.
"""

import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..tensors.strides import flattened
from .comm.all_gather import Window
from .comm.reduce_scatter import ReduceScatter, Reduction
from .comm.transport import Transport
from .memory import return_free_pages, zeros
from .mesh import Mesh
from .reduce_buckets import DeviceSum, GradientBucket
from .streams import Buffer, last_used

# What may be under way at once: enough that a rank need not wait for another one's every bucket, little beside a model.
# Two buckets in any case: one is reduced while the next is filled.
BYTES_UNDER_WAY = 8 << 20
BUCKETS_UNDER_WAY = 2
# Seconds that a rank waits in mid-backward for memory that other ranks read. They come sooner, unless one of them waits
# for this one meanwhile, in a collective of the model's own. Then more memory is taken than was meant to, which is
# better than to wait for each other.
PATIENCE = 2.0

_REDUCERS: "weakref.WeakSet[Reducer]" = weakref.WeakSet()


class _Lent(NamedTuple):
    """A buffer that is being reduced."""

    buffer: Buffer
    number: int  # of its bucket
    job: Reduction


@dataclass
class _Filling:
    """A bucket in this round."""

    held: AbstractSet[int]  # params to whose sum of earlier rounds this one is added
    awaited: AbstractSet[int]  # params whose gradients the bucket waits for
    buffer: Buffer | None = None
    arrived: set[int] = field(default_factory=set)
    started: bool = False
    late: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = field(default_factory=dict)  # gradient, strides


class Reducer:
    """Reduces the gradients of all buckets, round by round.

    A round: ``begin``; ``deliver`` each gradient; ``finish``. If any rank has then gradients that arrived after their
    bucket had left: ``finish_late`` on all. ``end`` closes it. An error in between calls for ``leave``.
    """

    def __init__(self, mesh: Mesh, shards: Transport, replicas: Transport):
        """Collective. The transports span the two directions of the mesh."""
        self._mesh, self._replicas = mesh, replicas
        self._scatter: ReduceScatter = (shards if mesh.shard.size > 1 else replicas).scatter()
        self._across: ReduceScatter | None = replicas.scatter() if mesh.is_hybrid else None
        self._scatters = [each for each in (self._scatter, self._across) if each is not None]
        self.buckets: list[GradientBucket] = []
        self.is_open = False
        self._order: list[int] = []
        self._is_ordered = True
        self._rounds = 0  # that all ranks finished
        self._windows: list[Window | None] = []  # on the padded sums, for the other holders of the same slice
        self._seen: list[set[int]] = []  # params that each bucket waits for: all, or those that this rank ever had
        self._filling: list[_Filling] = []
        self._started = 0
        self._completed: list[int] = []
        self._pool: dict[torch.dtype, list[Buffer]] = {}
        self._lent: dict[int, _Lent] = {}  # by id of the memory, while it is reduced (an empty one has no address)
        self._most_patience = min(PATIENCE, mesh.world.seconds / 2)  # whoever is not coming is waited for in the end
        self._patience, self._was_patient = self._most_patience, True
        _REDUCERS.add(self)

    def window(self, bucket: GradientBucket) -> Window | None:
        """Collective: on the sum of a bucket that is about to be added; None: nobody else looks at it."""
        return bucket.sink.window(self._replicas)

    def add(self, bucket: GradientBucket, window: Window | None) -> int:
        """One more bucket, between rounds. Returns its number."""
        self._windows.append(window)
        self.buckets.append(bucket)
        self._order.append(len(self.buckets) - 1)
        self._seen.append(set(range(bucket.num_params)))
        self._is_ordered = False
        self._pool.clear()  # its buffers may be too small
        return self._order[-1]

    @property
    def rounds(self) -> int:
        """How many all ranks finished."""
        return self._rounds

    @property
    def tells(self) -> bool:
        """Whether ranks that wait for one that left its round notice at once."""
        return all(each.tells for each in self._scatters)

    @property
    def can_meet(self) -> bool:
        """Whether ranks can meet ahead of a round without letting a host wait for its device."""
        return not any(each.on_stream for each in self._scatters)

    @property
    def has_started(self) -> bool:
        """Whether a bucket of this round, or of the last one, has left this rank. None is summed that has not."""
        return self._started > 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What is allocated between rounds."""
        return [buffer.memory for buffers in self._pool.values() for buffer in buffers]

    # -- a round ---------------------------------------------------------------------------------------------------

    def begin(self, held: Sequence[AbstractSet[int]], absent: Sequence[AbstractSet[int]]) -> None:
        """Starts a round, and forgets what an unfinished one left.

        Args:
            held: by bucket, the params to whose sum of earlier rounds this one is to be added.
            absent: by bucket, params that get no gradient any more: they were frozen.
        """
        self._filling = [
            _Filling(sums, seen - frozen) for sums, seen, frozen in zip(held, self._seen, absent, strict=True)
        ]
        # Halved with every round that ran out of it: a program in which ranks wait for each other does so every time.
        self._patience = self._most_patience if self._was_patient else self._patience / 2
        self._was_patient = True
        self._started, self._completed, self.is_open = 0, [], True
        self._lent.clear()
        for scatter in self._scatters:
            scatter.begin(self._rounds)
        self._expect_next()

    def deliver(self, number: int, index: int, grad: torch.Tensor, strides: tuple[int, ...]) -> None:
        """Takes a copy of the local gradient of param ``index`` of bucket ``number``.

        Args:
            grad: of the param's shape, any float dtype.
            strides: of the param, in whose storage order the buffer lies.
        """
        filling, bucket = self._filling[number], self.buckets[number]
        if filling.started or index in filling.arrived:
            # A graph inside of another one's backward (reentrant checkpointing): the param had its turn.
            sooner = filling.late.get(index)
            filling.late[index] = (grad if sooner is None else sooner[0] + grad, strides)
            return
        if bucket.is_filled_by(grad, strides):
            filling.buffer = Buffer(flattened(grad), is_pooled=False)
            filling.buffer.order.mark()
        else:
            if filling.buffer is None:
                filling.buffer = self._take_buffer(bucket)
            _fill(filling.buffer, bucket.offsets[index], grad, strides)
        filling.arrived.add(index)
        if filling.arrived >= filling.awaited:
            if number not in self._completed:  # it may wait for its turn while params come that had never come before
                self._completed.append(number)
            self._start_completed()

    def _take_buffer(self, bucket: GradientBucket) -> Buffer:
        pool = self._pool.setdefault(bucket.dtype, [])
        if not any(buffer.memory.numel() >= bucket.buffer_numel for buffer in pool):
            self._settle(BUCKETS_UNDER_WAY - 1)
        for index, buffer in enumerate(pool):
            if buffer.memory.numel() >= bucket.buffer_numel:
                return pool.pop(index)
        # Buckets of one param seldom need a buffer: their gradient is one.
        sizes = [each.buffer_numel for each in self.buckets if each.dtype is bucket.dtype and each.num_params > 1]
        largest = max([bucket.buffer_numel, *sizes])
        # What pads its params is never read, so it may hold anything.
        return Buffer(zeros(largest, bucket.dtype, bucket.device), is_pooled=True)

    def _send(self, number: int, buffer: Buffer, add: bool) -> None:
        bucket = self.buckets[number]
        buffer.order.join()  # params may have been filled in on several streams
        memory = buffer.memory[: bucket.buffer_numel]
        job = bucket.sink.reduction(memory, add)
        self._lent[id(memory)] = _Lent(buffer, number, job)
        self._scatter.start(job)
        while self._may_wait and self._is_much_under_way():
            self._settle(len(self._lent) - 1)

    def _settle(self, limit: int) -> None:
        """In mid-backward: until at most ``limit`` reductions are under way, or patience ends."""
        if self._may_wait:
            self._recycle(self._scatter.settle(limit, self._patience))
            self._was_patient = len(self._lent) <= limit
        else:
            self._recycle(self._scatter.progress())

    @property
    def _may_wait(self) -> bool:
        # Not beside another optimizer's open round: others may have come to its end, and wait there for this rank.
        return self._was_patient and not any(other.is_open for other in _REDUCERS if other is not self)

    def _is_much_under_way(self) -> bool:
        nbytes = sum(each.buffer.memory.nbytes for each in self._lent.values())
        return len(self._lent) > BUCKETS_UNDER_WAY and nbytes > BYTES_UNDER_WAY

    def _recycle(self, buffers: Sequence[torch.Tensor]) -> None:
        for memory in buffers:
            buffer, number, job = self._lent.pop(id(memory))
            self.buckets[number].sink.use(job, self._filling[number].arrived)
            buffer.order.mark()  # the reduction is behind the current stream now
            if buffer.is_pooled:
                self._pool.setdefault(memory.dtype, []).append(buffer)
            else:
                last_used(buffer.memory)

    def _start_completed(self) -> None:
        while self._started < len(self._order):
            number = self._order[self._started]
            if not self._filling[number].arrived >= self._filling[number].awaited:
                break
            self._start(number)
        self._recycle(self._scatter.progress())

    def _start(self, number: int) -> None:
        """Hands a bucket over; what has not arrived is zero."""
        bucket, filling = self.buckets[number], self._filling[number]
        buffer = filling.buffer if filling.buffer is not None else self._take_buffer(bucket)
        buffer.order.join()
        for index in range(bucket.num_params):
            if index not in filling.arrived:
                buffer.memory[bucket.offsets[index] : bucket.offsets[index + 1]].zero_()
            if filling.held and index not in filling.held:
                bucket.zero(index)
        self._send(number, buffer, add=bool(filling.held))
        filling.buffer, filling.started = None, True
        self._started += 1
        self._expect_next()

    def _expect_next(self) -> None:
        """Lets the sum that the next bucket will be added to come while that one is filled."""
        if self._started < len(self._order):
            number = self._order[self._started]
            if self._filling[number].held:
                self.buckets[number].sink.expect()

    def _settle_sums(self) -> None:
        for bucket in self.buckets:
            bucket.sink.wait_for_copies()

    def finish(self) -> None:
        """Reduces what is left, until every rank's sums are whole.

        Raises:
            CommunicationError: a rank died, is late, or left the round.
        """
        while self._started < len(self._order):
            self._start(self._order[self._started])
        self._recycle(self._scatter.finish())
        self._sum_across(range(len(self.buckets)), [bool(filling.held) for filling in self._filling])
        self._settle_sums()
        for bucket, filling, seen in zip(self.buckets, self._filling, self._seen, strict=True):
            if not bucket.sink.accumulates:
                continue
            if not self._is_ordered:
                seen.clear()
            seen |= filling.arrived | filling.late.keys()

    def has_arrived(self, number: int, index: int) -> bool:
        """Whether this rank had a gradient of the param in this round."""
        return index in self._filling[number].arrived or self.is_late(number, index)

    def is_late(self, number: int, index: int) -> bool:
        """Whether this rank has one that arrived after its bucket had left."""
        return index in self._filling[number].late

    def finish_late(self, numbers: Sequence[int]) -> None:
        """Reduces these buckets once more, for what arrived late on any rank."""
        for number in numbers:
            bucket, filling = self.buckets[number], self._filling[number]
            buffer = self._take_buffer(bucket)
            buffer.order.join()
            buffer.memory.zero_()
            for index, (grad, strides) in filling.late.items():
                _fill(buffer, bucket.offsets[index], grad, strides)
            filling.late = {}
            self._send(number, buffer, add=True)
        self._recycle(self._scatter.finish())
        self._sum_across(numbers, [True] * len(numbers))
        self._settle_sums()

    def _sum_across(self, numbers: Sequence[int], add: Sequence[bool]) -> None:
        windows = [window for number in numbers if (window := self._windows[number]) is not None]
        if self._mesh.replicate.size == 1 or not windows:
            return
        if self._across is not None:
            for number, each in zip(numbers, add, strict=True):
                sink = self.buckets[number].sink
                assert isinstance(sink, DeviceSum)
                self._across.start(sink.reduction_across(each))
                self._across.settle(BUCKETS_UNDER_WAY, PATIENCE)
            self._across.finish()
        gather = self._replicas.gather("spreading sums of gradients")
        for window in windows:
            gather.start(window)
        gather.finish()
        self._replicas.traffic.gradients += gather.received

    def end(self) -> None:
        """Closes the round, which all ranks finished."""
        if not self._is_ordered:
            mine = [*self._completed, *(n for n in range(len(self.buckets)) if n not in self._completed)]
            first = self._mesh.world.exchange(mine, self.buckets[0].device, "agreeing on the order of buckets")[0]
            self._order, self._is_ordered = first, True
            for buffers in self._pool.values():  # until the order was known, buckets may have waited for each other
                del buffers[BUCKETS_UNDER_WAY:]
            # Once: params have moved, DDP's buckets are gone, and no later round holds as many gradients as the first.
            return_free_pages()
        self._rounds += 1
        self.is_open, self._filling = False, []

    def leave(self) -> None:
        """Gives up an open round after an error on this rank."""
        for scatter in self._scatters:
            scatter.leave(self._rounds)
        for bucket in self.buckets:
            bucket.sink.abandon()
        self._filling = []
        self._lent.clear()
        self.is_open = False

    def watch(self, closure: int) -> None:
        """See :meth:`ReduceScatter.watch`."""
        for scatter in self._scatters:
            scatter.watch(closure)

    def fail(self, closure: int) -> None:
        """See :meth:`ReduceScatter.fail`."""
        for scatter in self._scatters:
            scatter.fail(closure)

    def catch_up(self) -> None:
        """Before all ranks begin again, after an error that this rank may not have met."""
        for scatter in self._scatters:
            scatter.catch_up(self._rounds)


def _fill(buffer: Buffer, offset: int, grad: torch.Tensor, strides: tuple[int, ...]) -> None:
    buffer.order.join()  # an earlier bucket's reduction may have been waited for on another stream
    buffer.memory.as_strided(grad.size(), strides, offset).copy_(grad)
    buffer.order.mark()
