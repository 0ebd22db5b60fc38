"""Reduces gradients over ranks while backward goes on: buckets in a fixed order, filled as gradients arrive.

Every rank reduces every bucket once a round (one synchronised backward), in the same order, whatever its own graph
holds: a gradient that did not arrive counts as zero. So no rank waits for a bucket that another rank will never send,
and no rank takes one bucket for another. A full buffer lives only while it is filled and reduced::

    bucket 0   fill fill  reduce .......                          time ->
    bucket 1             fill fill fill  reduce .......
    bucket 2                            fill fill  reduce .......
    buffers    A         B              A (free again)

The order is that in which buckets were full in their first round, on rank 0; in that round it is backward order. A
bucket is reduced once every gradient that this rank has ever produced for it has arrived. A bucket whose sum cannot be
added to waits for all of its params.

Of several pipeline stages on a rank, a backward runs through one. Its round reduces that stage's buckets, in an order
of their own, and leaves the others' sums as they are. A gradient that comes for another bucket is late.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..profiler import labelled
from ..tensors.strides import flattened
from .comm.left import RankLeft
from .comm.reduce_scatter import PHASE
from .gradient_buckets import DeviceSum
from .memory import return_free_pages, zeros
from .reduction_buffer import ReductionBuffer
from .streams import StreamUses, last_used

if TYPE_CHECKING:
    from .comm.all_gather import Window
    from .comm.reduce_scatter import ReduceScatter, Reduction
    from .comm.transport import Transport
    from .gradient_buckets import GradientBucket
    from .mesh import Mesh

# Reductions that may be under way at once. Without a limit a rank that is ahead would allocate a buffer for every
# bucket, or messages of its codes. The limit lets ranks drift apart by some buckets, and is small compared with a
# model. Two buckets in any case: one is reduced while the next is filled. Test: test_many_buckets_and_a_late_rank in
# tests/step/test_stages.py.
BYTES_UNDER_WAY = 8 << 20
BUCKETS_UNDER_WAY = 2
# Up to so many bytes and buffers a rank takes one more rather than wait for the others to read one: the wait, and the
# reads of their boards in it, cost more than so little memory.
BYTES_WITHOUT_WAITS = 1 << 20
BUFFERS_WITHOUT_WAITS = 16
# Seconds that a rank waits in mid-backward for memory that other ranks read. They have read it sooner, unless one of
# them waits for this rank meanwhile, in a collective of the model's own. Then this rank allocates more memory than
# planned, which is better than a deadlock.
PATIENCE = 2.0

# Of all optimizers in this process, for :attr:`Reducer._may_wait`. Weak: an optimizer that was dropped has no round.
_REDUCERS: weakref.WeakSet[Reducer] = weakref.WeakSet()


@dataclass
class _Filling:
    """The state of a bucket in this round."""

    held: AbstractSet[int]  # params whose sum of earlier rounds this round adds to
    awaited: AbstractSet[int]  # params whose gradients the bucket waits for
    buffer: ReductionBuffer | None = None
    arrived: set[int] = field(default_factory=set)
    passed_over: set[int] = field(default_factory=set)  # awaited in other rounds, and not in this one
    started: bool = False
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    strides: Sequence[tuple[int, ...]] = ()  # of all params, once there is a late gradient


class _UnderWay(NamedTuple):
    """A reduction under way."""

    number: int  # of the bucket
    nbytes: int  # that it holds
    buffer: ReductionBuffer | None  # None: only its messages are there


class Reducer:
    """Reduces the gradients of all buckets, round by round.

    A round: ``start_round``; ``deliver`` each gradient; ``finish``. If any rank then has gradients that arrived after
    their bucket was reduced: ``finish_late`` on all ranks. ``end_round`` closes it. After an error in between:
    ``abandon_round``.

    Attributes:
        is_reduced: True once every rank has what its sums need from this rank, so that all go on to what follows.
        on_sum: takes each sum that does not stay on the device, once it is complete: the number of its bucket, the sum
            (1D, at least as long as this rank's slice), and the params of which this rank had a gradient in it. Set
            before the first round.
        shows_sums: ``on_sum`` takes the sums that stay, too.
    """

    on_sum: Callable[[int, torch.Tensor, AbstractSet[int]], None]
    shows_sums = False

    def __init__(self, mesh: Mesh, shards: Transport, replicas: Transport, is_coded: bool = False):
        """Collective.

        Args:
            shards, replicas: the transports of the two directions of the mesh.
            is_coded: True if gradients are encoded on the wire.
        """
        self._mesh, self._replicas = mesh, replicas
        first = shards if mesh.shard.size > 1 else replicas
        self._reduce_scatter: ReduceScatter = first.reduce_scatter(is_coded)
        self._across: ReduceScatter | None = replicas.reduce_scatter() if mesh.is_hybrid else None
        self._mechanisms = [each for each in (self._reduce_scatter, self._across) if each is not None]
        self.buckets: list[GradientBucket] = []
        self._shares: list[float] = []  # of each bucket, see :meth:`ReduceScatter.share`
        self.is_open = self.is_reduced = False
        self._pipeline_stages: list[int] = []  # of each bucket
        self._order: list[int] = []
        self._round_order: list[int] = []  # the buckets of this round, in their order
        self._pipeline_stage: int | None = None  # whose buckets these are; None: all
        self._ordered: set[int | None] = set()  # the stages of which the ranks have agreed on the order
        self.rounds = 0  # rounds that all ranks finished
        self._windows: list[Window | None] = []  # on the sums, for the ranks that replicate them
        self._spreads = False  # sums go to such ranks
        # Params that each bucket waits for: all, or those of which this rank ever had a gradient.
        self._seen: list[set[int]] = []
        self._filling: list[_Filling] = []
        self._adds = False  # this round adds to sums of earlier rounds
        self._left: RankLeft | None = None  # another rank left this round, which ends with this error
        self._sums = StreamUses(torch.device("cpu"))  # by the stream that opened the round
        self._started = self._started_across = 0
        self._completed: dict[int, None] = {}  # buckets that await nothing, as they came to it
        self._pool = defaultdict[torch.dtype, list[ReductionBuffer]](list)
        self._reducing: dict[Reduction, _UnderWay] = {}
        self._most_patience = min(PATIENCE, mesh.world.seconds / 2)  # a rank that never comes is given up in the end
        self._patience, self._was_patient = self._most_patience, True
        _REDUCERS.add(self)

    def window(self, bucket: GradientBucket) -> Window | None:
        """Collective: opens a window on the sum of a bucket that ``add`` takes next. None: no other rank reads it."""
        return bucket.sink.window(self._replicas.open)

    def add(self, bucket: GradientBucket, window: Window | None, pipeline_stage: int = 0) -> int:
        """Adds a bucket, between rounds, of this pipeline stage. Returns its number."""
        self._windows.append(window)
        self._spreads = self._spreads or (window is not None and self._mesh.replicate.size > 1)
        self.buckets.append(bucket)
        self._shares.append(self._reduce_scatter.share(bucket.dtype))
        self._order.append(len(self.buckets) - 1)
        self._pipeline_stages.append(pipeline_stage)
        self._seen.append(set(range(bucket.num_params)))
        self._ordered.clear()
        self._pool.clear()  # its buffers may be too small
        return self._order[-1]

    @property
    def notifies_peers(self) -> bool:
        """True if ranks that wait for a rank that abandons its round notice it at once."""
        return all(each.notifies_peers for each in self._mechanisms)

    @property
    def on_stream(self) -> bool:
        """True if the current stream waits for the sums, and the host does not."""
        return any(each.on_stream for each in self._mechanisms)

    @property
    def waits_for_messages(self) -> bool:
        """True if the host waits for messages of the last buckets, while the sums of others are whole."""
        return self._reduce_scatter.by_messages and not self._spreads

    def has_summed(self, number: int) -> bool:
        """True if the sum of bucket ``number`` is whole, and this round adds nothing more to it but what comes late."""
        return self._filling[number].started and all(each.number != number for each in self._reducing.values())

    @property
    def has_started(self) -> bool:
        """True if a reduction of this round, or of the last one, was started on this rank.

        No sum has changed if this is False.
        """
        return self._started > 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that stay allocated between rounds."""
        return [buffer.memory for buffers in self._pool.values() for buffer in buffers]

    # -- a round ---------------------------------------------------------------------------------------------------

    def reduces(self, number: int, pipeline_stage: int | None) -> bool:
        """True if a round of this stage (None: of all) reduces bucket ``number``."""
        return pipeline_stage is None or self._pipeline_stages[number] == pipeline_stage

    def start_round(
        self,
        held: Sequence[AbstractSet[int]],
        absent: Sequence[AbstractSet[int]],
        pipeline_stage: int | None = None,
        closure: int = 0,
    ) -> list[int]:
        """Starts a round, and forgets an unfinished one. Returns how many gradients each bucket waits for.

        Args:
            held: by bucket, the params whose sum of earlier rounds this round adds to.
            absent: by bucket, params that get no gradient any more: they were frozen.
            pipeline_stage: whose buckets are reduced; None: all. The same on all ranks.
            closure: of a step, in which the round is, counted from 1 on all ranks; 0: in none.
        """
        self._pipeline_stage, self._adds = pipeline_stage, any(held)
        self._round_order = list(self._order)
        self._filling = [
            _Filling(sums, seen - frozen) for sums, seen, frozen in zip(held, self._seen, absent, strict=True)
        ]
        if pipeline_stage is not None:
            self._round_order = [number for number in self._order if self.reduces(number, pipeline_stage)]
            for number, filling in enumerate(self._filling):
                if not self.reduces(number, pipeline_stage):
                    filling.awaited, filling.started = set(), True
        # Halved after every round that used it up: ranks of a program that wait for each other do so in every round.
        self._patience = self._most_patience if self._was_patient else self._patience / 2
        self._was_patient = True
        self._started, self._started_across, self._completed, self.is_open = 0, 0, {}, True
        self.is_reduced, self._left = False, None
        self._reducing.clear()
        for mechanism in self._mechanisms:
            mechanism.start_round(self.rounds, closure)
        if self.buckets:
            self._sums = StreamUses(self.buckets[0].device)
            self._sums.mark()  # this stream may have scaled them, and waited for an abandoned round
        if self._adds:
            self._prefetch_next()
        return [0 if each.started else len(each.awaited) for each in self._filling]

    def deliver(self, number: int, grads: Mapping[int, torch.Tensor], strides: Sequence[tuple[int, ...]]) -> int:
        """Copies local gradients of params into bucket ``number``. Returns how many it still waits for in this round.

        Args:
            grads: by index in the bucket; of the params' shapes, any float dtype.
            strides: of each of the bucket's params; the buffer has their storage order.
        """
        if torch.is_grad_enabled():  # hardly ever in a backward
            with torch.no_grad():
                return self.deliver(number, grads, strides)
        filling = self._filling[number]
        if self._left is not None:
            return self.num_awaited(number)
        if filling.started or not filling.arrived.isdisjoint(grads):
            # A backward inside another one (reentrant checkpointing) has delivered a gradient of this param before.
            for index, grad in grads.items():
                sooner = filling.late.get(index)
                filling.late[index] = grad.detach() if sooner is None else sooner + grad
            filling.strides = strides
            return self.num_awaited(number)
        try:
            bucket, share = self.buckets[number], self._shares[number]
            if bucket.num_params == 1 and share == 1.0 and bucket.is_filled_by(grads[0], strides[0]):
                filling.buffer = ReductionBuffer(flattened(grads[0].detach()), is_pooled=False)
                filling.buffer.mark()
            else:
                if filling.buffer is None:
                    filling.buffer = self._acquire_buffer(bucket)
                filling.buffer.fill(bucket, grads, strides, share)
            filling.arrived |= grads.keys()
            if not filling.arrived >= filling.awaited:
                return self.num_awaited(number)
            # A completed bucket may wait for earlier ones, and meanwhile get gradients that it never got before.
            self._completed[number] = None
            self._start_completed()
        except RankLeft as error:
            self._note_left(error)
        return 0

    def num_awaited(self, number: int) -> int:
        """How many gradients bucket ``number`` waits for in this round."""
        filling = self._filling[number]
        return 0 if filling.started else len(filling.awaited - filling.arrived)

    def _note_left(self, error: RankLeft) -> None:
        """Keeps the error of a rank that left in mid-backward, which ``finish`` raises.

        A wait that failed is raised at once: the next one would only say that the group is not to be used. Test:
        test_another_order_is_an_error_on_all_ranks in tests/partition/test_ranks_apart.py. The news that a rank left
        would take the place of the error by which this rank may be about to leave itself, and a script that skips a
        batch after its own error would lose the rank. Test: test_own_errors_win in tests/partition/test_own_errors.py.
        """
        self._left = self._left or error

    def pass_over(self, number: int, index: int) -> bool:
        """Awaits no gradient of param ``index`` in this round: this rank's backward is past its module.

        Else ranks could wait for each other: one for the sum of a bucket, one for the gather of a later unit. Returns
        whether the gradient was awaited.
        """
        filling = self._filling[number]
        if index in filling.arrived or index not in filling.awaited:
            return False
        filling.passed_over.add(index)
        filling.awaited = filling.awaited - {index}
        if filling.arrived >= filling.awaited:
            self._completed[number] = None
        return True

    def _acquire_buffer(self, bucket: GradientBucket) -> ReductionBuffer:
        pool = self._pool[bucket.dtype]
        for may_drain in (True, False):
            found: ReductionBuffer | None = None
            for each in pool:
                if each.numel >= bucket.buffer_numel and (found is None or bucket in each.buckets):
                    found = each
            if found is not None:
                pool.remove(found)
                return found
            held = [each.nbytes for each in self._reducing.values() if each.buffer is not None]
            is_much = sum(held) > BYTES_WITHOUT_WAITS or len(held) >= BUFFERS_WITHOUT_WAITS
            if may_drain and held and (self.on_stream or is_much):
                self._drain(BUCKETS_UNDER_WAY - 1)
            elif may_drain:
                self._recycle(self._reduce_scatter.progress())
        # A bucket of one param seldom needs a buffer: its gradient is the buffer.
        sizes = [each.buffer_numel for each in self.buckets if each.dtype is bucket.dtype and each.num_params > 1]
        largest = max([bucket.buffer_numel, *sizes])
        # Padding is never read, so it may hold anything.
        return ReductionBuffer(zeros(largest, bucket.dtype, bucket.device), is_pooled=True)

    def _start_reduction(self, number: int, buffer: ReductionBuffer, add: bool, arrived: AbstractSet[int]) -> None:
        """Starts a reduction. The current stream has joined the buffer."""
        bucket = self.buckets[number]
        reduction = bucket.reduction(buffer.memory, add, arrived)
        held = self._reducing[reduction] = _UnderWay(number, buffer.memory.nbytes, buffer)
        labelled("reduce bucket", number, self._reduce_scatter.start, reduction)
        if reduction.nbytes_encoded:
            self._give_back(buffer)
            # A sum that does not stay takes memory of its own, of the order of the buffer's.
            nbytes = reduction.nbytes_encoded if bucket.sink.stays else held.nbytes
            self._reducing[reduction] = held._replace(nbytes=nbytes, buffer=None)
        while len(self._reducing) > BUCKETS_UNDER_WAY and self._may_wait and self._bytes_under_way > BYTES_UNDER_WAY:
            self._drain(len(self._reducing) - 1)

    def _drain(self, limit: int) -> None:
        """Waits, in mid-backward, until at most ``limit`` reductions are under way, or patience ends."""
        if self._may_wait:
            self._recycle(self._reduce_scatter.drain(limit, self._patience))
            self._was_patient = len(self._reducing) <= limit
        else:
            self._recycle(self._reduce_scatter.progress())

    @property
    def _may_wait(self) -> bool:
        # Not while another optimizer's round is open: other ranks may be at the end of that round, and wait there for
        # this rank.
        return self._was_patient and not any(other.is_open for other in _REDUCERS if other is not self)

    @property
    def _bytes_under_way(self) -> int:
        return sum(each.nbytes for each in self._reducing.values())

    def _recycle(self, ended: Sequence[Reduction]) -> None:
        for reduction in ended:
            number, _, buffer = self._reducing.pop(reduction)
            sink = self.buckets[number].sink
            if self.shows_sums or not sink.stays:
                self.on_sum(number, reduction.target, self._filling[number].arrived)
            sink.use(reduction)
            if buffer is not None:
                self._give_back(buffer)

    def _give_back(self, buffer: ReductionBuffer) -> None:
        if buffer.has_streams:
            buffer.mark()  # the current stream waited for the reduction, or encoded the buffer
        if buffer.is_pooled:
            self._pool[buffer.memory.dtype].append(buffer)
        else:
            last_used(buffer.memory)

    def start_completed(self) -> None:
        """Starts the reductions of the buckets that await nothing, in their order."""
        try:
            self._start_completed()
        except RankLeft as error:
            self._note_left(error)

    def _start_completed(self) -> None:
        if self._left is not None:
            return
        order, end = self._round_order, len(self._round_order)
        while self._started < end:
            filling = self._filling[order[self._started]]
            if not filling.arrived >= filling.awaited:
                break
            self._start(order[self._started])
        self._recycle(self._reduce_scatter.progress())

    def _start(self, number: int) -> None:
        """Starts the reduction of a bucket; gradients that did not arrive are zero."""
        bucket, filling = self.buckets[number], self._filling[number]
        buffer = filling.buffer if filling.buffer is not None else self._acquire_buffer(bucket)
        if buffer.has_streams:
            buffer.join()  # several streams may have filled it; see [Note: Streams of a reduction]
        # The sums that this round adds to may just have been multiplied back from a mean that the user scaled, on the
        # stream of the round's first gradient. Test: test_a_sum_is_added_to_once_it_is_restored in test_rounds.py.
        if self._sums.has_streams:
            self._sums.join()
        if len(filling.arrived) < bucket.num_params:
            for index in set(range(bucket.num_params)) - filling.arrived:
                buffer.memory[bucket.offsets[index] : bucket.offsets[index + 1]].zero_()
        for index in set(range(bucket.num_params)) - filling.held if filling.held else ():
            bucket.zero(index)
        self._start_reduction(number, buffer, bool(filling.held), filling.arrived)
        filling.buffer, filling.started = None, True
        self._started += 1
        if self._adds:
            self._prefetch_next()

    def _prefetch_next(self) -> None:
        """Begins to load the sum that the next bucket adds to, while that bucket is filled."""
        for number in self._round_order[self._started : self._started + 1]:
            if self._filling[number].held:
                self.buckets[number].sink.prefetch()

    def _wait_for_copies(self) -> None:
        world, device = self._mesh.world, self.buckets[0].device if self.buckets else None
        if device is not None and device.type != "cpu" and any(each.sink.is_on_host for each in self.buckets):
            # Sums are copied after the collectives that make them. The wait for the collectives has a deadline, the
            # wait for the copies has none: without the first wait a dead rank would hang this one for ever.
            world.wait_for_stream(device, PHASE)
        for bucket in self.buckets:
            if bucket.sink.is_on_host:
                bucket.sink.wait_for_copies()

    def start_rest(self) -> None:
        """Starts the reductions of all remaining buckets.

        Raises:
            CommunicationError: a rank abandoned the round.
        """
        if self._left is not None:
            raise self._left
        while self._started < len(self._round_order):
            self._start(self._round_order[self._started])

    def finish(self) -> None:
        """Reduces all remaining buckets and waits until every rank's sums are whole.

        Raises:
            CommunicationError: a rank died, is late, or abandoned the round.
        """
        self.start_rest()
        ended = self._reduce_scatter.finish()
        self.is_reduced = not self._spreads  # else the other ranks wait for that first
        self._recycle(ended)
        if self._spreads:
            numbers = sorted(self._round_order)
            self._sum_across(numbers, [bool(self._filling[number].held) for number in numbers])
        self._wait_for_copies()
        for number in self._round_order:
            filling, seen = self._filling[number], self._seen[number]
            if not self.buckets[number].sink.accumulates:
                continue
            if self._pipeline_stage not in self._ordered:
                seen.clear()
            seen |= filling.arrived | filling.passed_over | set(filling.late)

    @property
    def arrived(self) -> list[tuple[AbstractSet[int], AbstractSet[int]]]:
        """By bucket: the params of which this rank had a gradient in this round, and those whose gradient was late."""
        return [(each.arrived.union(each.late) if each.late else each.arrived, {*each.late}) for each in self._filling]

    def finish_late(self, numbers: Sequence[int]) -> None:
        """Reduces these buckets once more, for gradients that arrived late on any rank.

        Buckets of another stage are reduced for the first time: to what they hold of earlier rounds.
        """
        adds = [self.reduces(number, self._pipeline_stage) or bool(self._filling[number].held) for number in numbers]
        for number, add in zip(numbers, adds, strict=True):
            bucket, filling = self.buckets[number], self._filling[number]
            for index in range(bucket.num_params) if not self.reduces(number, self._pipeline_stage) and add else ():
                if index not in filling.held:
                    bucket.zero(index)
            buffer = self._acquire_buffer(bucket)
            buffer.join()
            buffer.memory.zero_()
            buffer.fill(bucket, filling.late, filling.strides, self._shares[number])
            late, filling.late = filling.late.keys(), {}
            self._start_reduction(number, buffer, add, late)
        self._recycle(self._reduce_scatter.finish())
        if self._spreads:
            self._sum_across(numbers, adds)
        self._wait_for_copies()

    def _sum_across(self, numbers: Sequence[int], add: Sequence[bool]) -> None:
        windows = [window for number in numbers if (window := self._windows[number]) is not None]
        if self._across is not None:
            for number, each in zip(numbers, add, strict=True):
                sink = self.buckets[number].sink
                assert isinstance(sink, DeviceSum)
                self._across.start(sink.reduction_across(each))
                self._started_across += 1
                self._across.drain(BUCKETS_UNDER_WAY, PATIENCE)
            self._across.finish()
        gather = self._replicas.gather("spreading sums of gradients")
        for window in windows:
            gather.start(window)
        gather.finish()
        self._replicas.traffic.gradients += gather.received

    def end_round(self) -> None:
        """Closes the round, which all ranks finished."""
        if self._pipeline_stage not in self._ordered:
            mine = [
                *self._completed,
                *(number for number in sorted(self._round_order) if number not in self._completed),
            ]
            first = self._mesh.world.exchange(mine, "agreeing on the order of buckets")[0]
            self._order = [*(number for number in self._order if number not in first), *first]
            self._ordered.add(self._pipeline_stage)
            # Without the order, buckets may have waited for each other and taken more buffers.
            for buffers in self._pool.values():
                del buffers[BUCKETS_UNDER_WAY:]
            # Once is enough: params have moved, DDP's buckets are gone, and no later round holds as many gradients.
            return_free_pages()
        self.rounds += 1
        self.is_open, self._filling = False, []

    def abandon_round(self, owes_more: bool = False) -> None:
        """Abandons an open round after an error on this rank, or one that this rank should have opened.

        Args:
            owes_more: the other ranks wait for collectives of this rank that are no reductions.
        """
        if not self.is_open:
            self._started, self._started_across, self._round_order = 0, 0, self._order
        first, across = [self.buckets[number].blank for number in self._round_order[self._started :]], []
        for number in sorted(self._round_order)[self._started_across :] if self._across is not None else ():
            sink = self.buckets[number].sink
            assert isinstance(sink, DeviceSum)
            across.append(sink.blank_across)
        for mechanism, rest in zip(self._mechanisms, (first, across), strict=False):
            if not self.is_open and mechanism.on_stream:
                mechanism.start_round(self.rounds)
            mechanism.abandon_round(self.rounds, None if owes_more else rest)
        for bucket in self.buckets:
            bucket.sink.abandon()
        for filling in self._filling:
            if filling.buffer is not None:  # several streams may have filled it
                filling.buffer.join()
                last_used(filling.buffer.memory)
        self._filling, self._left = [], None  # its traceback refers to this object
        self._reducing.clear()
        self.is_open = False

    def fail_closure(self, closure: int) -> None:
        """See :meth:`ReduceScatter.fail_closure`."""
        for mechanism in self._mechanisms:
            mechanism.fail_closure(closure)

    def catch_up(self) -> None:
        """Joins the attempt of the other ranks, after an error that this rank may not have seen."""
        for mechanism in self._mechanisms:
            mechanism.catch_up(self.rounds)
