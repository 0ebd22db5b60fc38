"""Backward of a module that was taken over: the reducer sums gradients over ranks, and ``param.grad`` becomes a part.

A round is one backward that reduces gradients; with gradient accumulation, the last backward before the step. The
gradient of the module's output, or else the first gradient of a param, opens the round. Autograd accumulates gradients,
and those of a bucket go to the reducer together (:mod:`shardopt.module.arrivals`). When autograd is done, the reducer
sends the remaining buckets, and ``param.grad`` becomes a part (:mod:`shardopt.module.round_gradients`). A gradient may
arrive after its bucket was sent (reentrant activation checkpointing): that bucket is reduced once more, and a second
all-reduce reports the norms of the new sums.

Experts have backwards of their own, whose rounds open, end and are lost with those of the main domain::

    main      open  gradients ...................  reduce, report          time ->
    experts    open  gradients ..  reduce, report

A gradient of any domain opens the rounds of all: a rank whose experts got no token takes part with zeros. All ranks end
the rounds in one order, the main domain's last, so that groups of ranks that overlap do not wait for each other. The
main domain has all ranks: its report shows them what failed on the ranks of one expert.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import agree_on
from ..domain.alone import check_not_alone
from ..domain.remote_gradients import GradientFetch
from ..domain.turn import holding
from ..errors import CommunicationError, ShardoptError
from ..tensors.gradient_slice import GradientSlice
from ..tensors.norm_table import NormTable
from ..tensors.part import Part
from ..tensors.pipelining import ZERO_BUBBLE
from .arrivals import Arrivals
from .closure import ClosureState
from .gradient_totals import GradientTotals
from .gradient_weights import GradientWeights
from .hooks import call_while_alive, remove_all
from .round_gradients import RoundGradients, shown_slice

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from .gradient_report import Report


class RoundState(Enum):
    """State of the round of a module that was taken over.

    A gradient under ``no_sync()``, or before any forward, changes no state. An error of the user's own in backward (in
    a hook, say) ends autograd without a call to shardopt: the round stays open until the next call notices.

    ======  =======================================  ======
    from    event                                    to
    ======  =======================================  ======
    CLOSED  first gradient of a round                OPEN
    OPEN    autograd is done                         CLOSED
    OPEN    shardopt raises in backward              LOST
    OPEN    an error of the user's own in backward   OPEN
    OPEN    zero_grad()                              CLOSED
    OPEN    forward                                  LOST
    OPEN    step()                                   LOST
    LOST    step()                                   LOST
    LOST    forward                                  LOST
    LOST    zero_grad()                              CLOSED
    LOST    first gradient of a round                OPEN
    CLOSED  zero_grad()                              CLOSED
    CLOSED  step()                                   CLOSED
    CLOSED  forward                                  CLOSED
    ======  =======================================  ======
    """

    CLOSED = "closed"
    """No round is open. Every ``param.grad`` that shows a sum shows a complete one."""

    OPEN = "open"
    """Gradients arrive and buckets are reduced. Sums are not readable yet; all ranks must end the round together."""

    LOST = "lost"
    """A round was abandoned. Its sums lack gradients: no ``param.grad`` shows them, and ``step()`` raises."""


class Backward(RoundGradients):
    """Takes the gradients of a domain's params.

    Attributes:
        is_syncing: True if the backward that runs is a round. Each graph says so when its backward begins
            (:meth:`begin_graph`): the forwards of several micro-batches may come before the backward of the first. A
            backward that comes through no output of a forward is one if the last forward said so; if that had a
            backward since, or if there was none, as :attr:`syncs_now` says.
        syncs_now: returns False while ``no_sync()`` is open.
        on_end: is called when a round ends (True) or is lost (False).
        on_reduced: is called on all ranks together when all gradients of a round are reduced.
        is_in_forward: True from the beginning of a forward that a backward can follow to its end; one that raises has
            no end.
        units: by the name of each unit of stage 3, its params.
        before_round: is called before each round while a ``join()`` is open, with the numbers of the params that hold a
            gradient. It returns the divisor of the round's sums, or None for the number of all ranks.
        closure: the closure of a step, if one runs.
        turn: of the optimizer, which each hook holds.
        followers: of the main domain: the backwards of experts, in the same order on all ranks.
    """

    def __init__(self, domain: Domain, num_batches: int | None = None):
        super().__init__(domain, num_batches)
        self.turn, self.followers = domain.turn, list[Backward]()
        self._lead: weakref.ref[Backward] | None = None  # weak: a cycle would outlive the optimizer
        self._hooks: list[Any] = []
        self.is_syncing = self.is_in_forward = False
        self.syncs_now: Callable[[], bool] = lambda: True
        self._is_said = False  # by a forward, of a backward that has not begun
        self._task = -1  # of autograd: the last one of which it is known whether it is a round
        self._lost: str | None = None  # why the gradients are lost; None unless the round is LOST
        self._weighted: Report | None = None  # of a follower, while the tokens of all ranks are not known
        self._is_fresh = False  # what gradients there are have been zeroed, and none was added
        self.on_end: Callable[[bool], None] = lambda _: None
        self.on_reduced: Callable[[], None] = lambda: None
        self.before_round: Callable[[list[int]], int | None] | None = None
        self.units: Mapping[str, Sequence[torch.nn.Parameter]] = {}
        self.closure = ClosureState()

    # -- params ----------------------------------------------------------------------------------------------------

    def attach(self, entries: Sequence[ParamRecord]) -> None:
        """Takes the gradients of params that were just bound, from now on."""
        self._attach_slices(entries)
        by_shard: dict[Shard, list[ParamRecord]] = {}
        for entry in entries:
            if entry.gradient_slice is not None:
                entry.gradient_slice.number = len(self.entries)
            self.entries.append(entry)
            _note_unreduced(entry, is_early=True)
            by_shard.setdefault(entry.shard, []).append(entry)
        for shard, some in by_shard.items():
            self._arrivals[shard] = Arrivals(self, shard, some)
            self._hooks += self._arrivals[shard].attach()
        self._number(by_shard)
        if self.weights is not None:
            self.weights.attach(entries)

    def _attach_slices(self, entries: Sequence[ParamRecord]) -> None:
        alike: dict[torch.dtype, list[ParamRecord]] = {}
        for entry in entries:
            alike.setdefault(entry.shard.gradient_sum.total.dtype, []).append(entry)
        for dtype, some in alike.items():
            numels = [entry.shard.bucket.layout.numels[entry.index] for entry in some]
            table = NormTable(dtype, numels, self._domain.edits)
            for row, entry in enumerate(some):
                self._attach_slice(entry, (table, row))

    def _attach_slice(self, entry: ParamRecord, place: tuple[NormTable, int]) -> None:
        domain, shard = self._domain, entry.shard
        where, index, receive = (
            shard.slice_of(entry.index),
            entry.index,
            call_while_alive(Backward._receive, self, entry),
        )

        def gather(own: torch.Tensor) -> torch.Tensor:
            flat = shard.gradient_sum.total
            if own is not total:  # of a result
                flat = torch.zeros(shard.numel, dtype=own.dtype, device=shard.device)
                flat[where.local] = own.to(flat.device)
            return shard.as_param(domain.gather_slices(shard, flat, "gradients"), index).clone()

        others = (gather, GradientFetch(domain, shard, index)) if domain.mesh.shard.size > 1 else (None, None)
        total = shard.gradient_sum.total[where.local]
        entry.gradient_slice = GradientSlice(total, where.start, place, receive, *others)
        entry.gradient_slice.group = domain.mesh.world.group
        # A gradient that a script keeps must not keep the optimizer (test_no_page_of_sums_stays_registered).
        entry.gradient_slice.draws = call_while_alive(lambda domain, entry: domain.draw(entry), domain, entry)

    def detach(self) -> None:
        """Removes all hooks: gradients are autograd's own again."""
        for each in self.followers:
            each.detach()
        remove_all(self._hooks)
        for entry in self.entries:
            if isinstance(entry.grad, Part):
                entry.outer.grad = None
            entry.gradient_slice = None  # its closures hold the domain: a cycle would outlive the optimizer
        if self.weights is not None:
            self.weights.detach()
        self.entries, self._totals = [], GradientTotals()
        self._staged, self._arrivals, self._numbers = {}, {}, {}
        self.is_syncing = False  # the user may still run backward through an older graph

    # -- a round ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> RoundState:
        """The state of the round. The reducer knows if one is open; ``abandon()`` stores why one is lost."""
        if self.is_open:
            return RoundState.OPEN
        return RoundState.CLOSED if self._lost is None else RoundState.LOST

    @property
    def is_open(self) -> bool:
        """True if a round is open."""
        reducer = self._domain.reducer
        return reducer is not None and reducer.is_open

    @property
    def is_bound(self) -> bool:
        """True once the domain holds params."""
        return self._domain.reducer is not None

    @property
    def has_lost_gradients(self) -> bool:
        """True if a round was begun and not ended, in this domain or one of experts."""
        return any(each.state is not RoundState.CLOSED for each in (self, *self.followers))

    def check_reduced(self) -> None:
        """Raises ShardoptError if a round was abandoned."""
        for each in self.followers:
            each.check_reduced()
        if self.is_open:
            self.abandon("backward ended before all gradients were reduced")
        if self._lost is not None:
            raise ShardoptError(
                "call zero_grad() on every rank and go on with the next batch: the gradients are those of a part of a "
                f"backward only, and a step would train on them. {self._lost}."
            )

    def check_whole(self) -> None:
        """Raises ShardoptError if gradients were reduced in part only."""
        for each in self.followers:
            each.check_whole()
        self.check_reduced()
        if self.weights is not None:
            self.weights.check()
        slices = [entry.gradient_slice for entry in self.entries]
        pending = [n for n, each in enumerate(slices) if each is not None and each.pending is not None]
        waiting = next((self.entries[n] for n in pending if shown_slice(self.entries[n]) is not None), None)
        if waiting is not None:
            raise ShardoptError(
                "run the last backward before step() outside of no_sync(), or call reduce_gradients(): gradients of "
                f"{waiting.name} were accumulated under no_sync(), or added by a zero-bubble schedule, and were not "
                f"reduced, and a step would omit them. {ZERO_BUBBLE}"
            )

    def abandon(self, reason: str) -> None:
        """Abandons the open round, which is LOST then. The other ranks notice it if the transport can notify them."""
        for each in self._bound_followers:
            if each.is_open:
                each.abandon(reason)
        sharded = self._domain.sharded
        self._reducer.abandon_round(owes_more=sharded is not None and sharded.gatherer.owes_gathers)
        self._lost = reason
        self.on_end(False)
        for arrivals in self._arrivals.values():
            arrivals.abandon()
        for gradient_slice in self._slices:  # its sum may hold a part of the lost round
            gradient_slice.part = None

    def give_up(self, error: BaseException) -> None:
        """Abandons the round, if one is open, after an error."""
        if self.is_open:
            self.abandon(f"{type(error).__name__}: {error}")

    def forget_gradients(self) -> None:
        """Forgets all gradients: the user set them to None or zero."""
        for each in self.followers:
            each.forget_gradients()
        if self.is_open:
            self.abandon("zero_grad() was called in the middle of it")
        self._lost, self._is_fresh = None, True
        if self.weights is not None:
            self.weights.forget()
        for gradient_slice in self._slices:
            gradient_slice.pending, gradient_slice.unreduced, gradient_slice.has_mean = None, 0, False
        # Only after a forward that raised. Otherwise another rank may have abandoned the batch that this rank has yet
        # to run: this rank would run it as the attempt after, and ranks would wait for each other (zeroes_late).
        if self.is_in_forward:
            self.catch_up()
            self.is_in_forward = False

    @property
    def rounds(self) -> int:
        """Number of rounds that all ranks finished."""
        return self._reducer.rounds if self.is_bound else 0

    def fail_closure(self, error: Exception, rounds: int) -> bool:
        """Notifies ranks that wait in a round that this rank's closure raised. See :mod:`shardopt.module.closure`.

        Args:
            rounds: how many rounds were finished when the closure began.

        Returns:
            True if all ranks will raise together at the beginning of the step.
        """
        reducer = self._domain.reducer
        if reducer is None:
            return True
        if reducer.notifies_peers:
            reducer.fail_closure(self.closure.number)
            for each in self.followers:
                each.fail_closure(error, each.rounds)
            self.give_up(error)
            return True
        if reducer.on_stream:
            self.give_up(error)
        elif self.is_open:
            self._failed = True
            try:
                self.finish()
            except CommunicationError:  # raised by the other ranks; this rank raises the closure's own error
                pass
            finally:
                self._failed = False
        # In a join() all ranks exchange what they do before each forward and backward.
        raises_together = self.before_round is not None or not self._gathers_by_messages
        return raises_together or reducer.rounds > rounds

    @property
    def _gathers_by_messages(self) -> bool:
        sharded = self._domain.sharded
        return sharded is not None and sharded.gatherer.waits_for_others

    def catch_up(self) -> None:
        """Begins the next round with ranks that abandoned an attempt at it, which this rank did not begin."""
        for each in self.followers:
            each.catch_up()
        if self.is_bound:
            self._reducer.catch_up()

    @holding("backward()")
    def open_round(self) -> None:
        """Opens a round; it ends with the outermost of the graphs that autograd is running."""
        check_not_alone(self._domain, "a backward")
        self._divisor, divisor = self._num_batches, None
        if self.before_round is not None:
            divisor = self.before_round(
                [number for number, entry in enumerate(self.entries) if shown_slice(entry) is not None]
            )
            self._divisor = divisor or self._divisor
        if divisor is None and self.closure.is_on and not self._reducer.notifies_peers:
            with self.closure.raising_together():
                agree_on("round", self._domain.mesh.world)
        self._reducer.set_closure(self.closure.number if self.closure.is_on else 0)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._begin_round()
        self._open_followers()

    @property
    def lead(self) -> Backward:
        """The backward of the main domain, which may be this one."""
        lead = None if self._lead is None else self._lead()
        return self if lead is None else lead

    def follow_rounds_of(self, lead: Backward) -> None:
        """Rounds of this domain open and end with those of the main domain, from now on."""
        self._lead, self.closure, self.leads = weakref.ref(lead), lead.closure, False
        lead.followers.append(self)
        if lead.weights is not None:  # given before the first forward
            self.weights, lead.weights.weighs_outputs = lead.weights, True

    @property
    def _bound_followers(self) -> list[Backward]:
        return [each for each in self.followers if each.is_bound]

    def _open_followers(self) -> None:
        for each in self._bound_followers:
            each.join_round()

    def _finish_followers(self) -> None:
        """Collective: ends all open rounds of experts, and keeps an error that the report must still carry."""
        self._follower_error = None
        for each in self._bound_followers:
            try:
                each.finish()
            except Exception as error:  # the ranks of the next expert, and those of the main domain, wait for this one
                self._follower_error = self._follower_error or error
        self._is_spoilt_by_followers = any(each.found_nonfinite for each in self._bound_followers)

    def join_round(self) -> None:
        """Opens the round of a follower, after that of the main domain."""
        self._reducer.set_closure(self.closure.number if self.closure.is_on else 0)
        self._begin_round()

    def forward_begins(self, syncs: bool) -> None:
        """A forward begins that a backward can follow, which is a round or not."""
        self.is_in_forward = self._is_said = True
        self.is_syncing = syncs

    def decide(self) -> None:
        """Decides whether the backward that runs is a round, if it has come through no output of a forward."""
        task = torch._C._current_graph_task_id()
        if task != self._task and not self.is_open:
            self.is_syncing = self.is_syncing if self._is_said else self.syncs_now()
            self._task, self._is_said = task, False

    def begin_graph(self, syncs: bool, stage: int = 0) -> None:
        """The backward of a forward begins: the gradient of an output has arrived.

        Args:
            syncs: this backward is a round. One through several forwards is a round if that of one of them is.
            stage: the number of the called module that ran.
        """
        self._task, self._is_said = torch._C._current_graph_task_id(), False
        if syncs or not self.is_open:
            self.is_syncing = syncs
        if not self.is_open:
            # The ranks that run out in a join() follow rounds of all buckets.
            self._stage = stage if self.has_stages and self.before_round is None else None
        self.open_round_early()

    def open_round_early(self) -> None:
        """Opens a round ahead of the first gradient of a param, if the backward that runs will have one."""
        # False inside of torch.autograd.grad(), which accumulates nothing; backward(inputs=...) may, later.
        accumulates = torch.autograd.Variable._execution_engine.is_checkpoint_valid()
        if self.is_syncing and not self.is_open and accumulates:
            self.open_round()

    def reduce_now(self) -> None:
        """Collective, outside of a backward: a round of the gradients that were accumulated under ``no_sync()``."""
        self._reducer.set_closure(0)
        self._divisor, self._stage = self._num_batches, None
        self._begin_round()
        self._open_followers()
        self.finish()

    def run_round_of_zeros(self, held: Collection[int], divisor: int, is_weighted: bool) -> None:
        """Runs a round to which this rank adds zeros, as it has run out of batches.

        Args:
            held: numbers of the params that hold a gradient of an earlier round on the other ranks.
            divisor: the divisor of the round's sums.
            is_weighted: gradients of the others have weights.
        """
        if is_weighted:
            self.weights = self.weights or GradientWeights()
            self.weights.run_out()
        for number, entry in enumerate(self.entries):
            if entry.gradient_slice is not None:
                entry.gradient_slice.pending = None
            if number not in held:
                entry.outer.grad = None
        self._divisor, self._stage = divisor, None
        self._begin_round()
        self.finish()

    def weigh(self, tokens: int, is_mean: bool) -> None:
        """Gives the weight of the gradients of the next backward, see :mod:`.gradient_weights`."""
        self.weights = self.weights or GradientWeights()
        if not self.weights.is_on:
            self.weights.forget()
            self.weights.weighs_outputs = bool(self.followers)
            for each in (self, *self.followers):
                each.weights = self.weights
                self.weights.attach(each.entries)
                if any(map(_has_unreduced, each.entries)):
                    self.weights.miss()
        self.weights.give(tokens, is_mean)

    @property
    def is_weighted(self) -> bool:
        """True if this rank knows that the gradients of the next round have weights."""
        return self.weights is not None and self.weights.is_on

    def _look_at_weights(self) -> None:
        """Compares the weights with the sums that params show, ahead of a round."""
        assert self.weights is not None
        entries = [entry for each in (self, *self.followers) for entry in each.entries]
        if not any(shown_slice(entry) is not None for entry in entries):
            self.weights.total = None
        elif self.weights.total is None and not self._is_fresh:
            self.weights.miss()

    def _begin_round(self) -> None:
        if self.weights is not None and self.leads:
            self._look_at_weights()
        with torch._C.DisableTorchFunctionSubclass():  # params may be resharded: see finish()
            self._start_round()
        for store in self._domain.stores:
            store.read_ahead()
        self._lost = None
        if self._domain.sharded is not None:
            self.pass_over(self._domain.sharded.gatherer.past)

    def pass_over(self, units: Sequence[str]) -> None:
        """Awaits no more gradients from units that this backward is past: ranks may differ in the params they use."""
        entries = self._domain.entries
        if units:  # before any gradient, if a skipped unit ends the model: the first gather may wait for a reduction
            self.open_round_early()
        for each in self.followers:
            each.pass_over(units)
        if not self.is_open:
            return
        found = [entries[param] for name in units for param in self.units[name] if param in entries]
        for shard in {entry.shard: None for entry in found}:
            if self._arrivals[shard].missing:
                self._hand_over(self._arrivals[shard])
        # A list: each of them is passed over.
        if any([self._reducer.pass_over(entry.shard.number, entry.index) for entry in found]):
            self._reducer.start_completed()

    def _receive(self, entry: ParamRecord, grad: torch.Tensor) -> None:
        """Takes a gradient that autograd adds to a part."""
        gradient_slice = entry.gradient_slice
        assert gradient_slice is not None
        if gradient_slice.pending is not None:
            gradient_slice.pending.add_(grad.detach())
        else:
            # Autograd may pass the same tensor to another param. A round reads it at once. Under no_sync() it is kept
            # until a later backward: without a copy, a write to the other param's gradient would change it.
            gradient_slice.pending = grad.detach() if self.lead.is_syncing else grad.detach().clone()

    @holding("backward()")
    def reduce_gradient(self, entry: ParamRecord) -> None:
        """Takes the gradient of a param that autograd has just accumulated."""
        lead = self if self._lead is None else self.lead
        try:
            if entry.outer is not entry.param:  # a DTensor, whose local gradient is placed as the param
                entry.place_gradient()
            lead.decide()
            if not lead.is_syncing:
                _note_unreduced(entry, is_early=False)
                return
            if not self._reducer.is_open:
                lead.open_round()
            arrivals = self._arrivals[entry.shard]
            with torch._C.DisableTorchFunctionSubclass():
                if not arrivals.rests(entry):
                    self._check_here(entry)
                    self._deliver(entry)
                if arrivals.count():
                    self._hand_over(arrivals)
        except BaseException as error:
            lead.give_up(error)
            raise

    @holding("backward()")
    def take_all(self, arrivals: Arrivals) -> None:
        """Takes the gradients of a bucket, the last of which has just come to rest; a round is open."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                self._hand_over(arrivals)
        except BaseException as error:
            self.lead.give_up(error)
            raise

    @holding("backward()")
    def finish(self) -> None:
        """Collective: ends the round, and before it those of the followers."""
        if not self.is_open:  # abandoned since autograd was asked for this call
            return
        try:
            # Params may be resharded by now; without this, reading any of their attributes would run the guard's
            # checks.
            with torch.set_grad_enabled(False), torch._C.DisableTorchFunctionSubclass():
                if self._domain.sharded is not None:  # first: another rank may need a unit for what is reduced next
                    self._domain.gatherer.join_remaining()
                self._finish_followers()
                self._finish_round()
                self.on_reduced()
        except BaseException as error:
            self.give_up(error)
            raise
        self.on_end(True)

    def _finish_round(self) -> None:
        with self._domain.clock.phase("reduce"):
            flags = self._reduce_remaining()
            report = self._report(flags)
            if report.late.any():
                late = {entry for entry, is_late in zip(self.entries, report.late, strict=True) if is_late}
                self._reduce_late({entry.shard.number for entry in late})
                report = self._report(flags)  # finish_late() changed the sums
            if self.leads and (self._told or self.is_weighted):
                self.weights = self.weights or GradientWeights()
                self.weights.settle(report.weights)
                for each in self._bound_followers:
                    each.end_weighted_round()
            if not self.leads and self.is_weighted:
                # The report of the main domain tells the tokens of all ranks.
                self._weighted, self.found_nonfinite = report, bool(report.nonfinite.any())
            else:
                self._end_round(report)

    def _end_round(self, report: Report) -> None:
        self._show_gradients(report)
        if self.followers:
            for each in (*self.followers, self):
                each.mark_spoilt(report.spoilt)
        self._is_fresh = False
        self._reducer.end_round()  # last: after an interrupt that left some gradients out, the round is LOST
        self._stage = None

    def end_weighted_round(self) -> None:
        """Ends the round of a follower, once the tokens of all ranks are known."""
        report, self._weighted = self._weighted, None
        if report is not None and self.is_open:
            self._end_round(report)


def _has_unreduced(entry: ParamRecord) -> bool:
    """True if the param shows a gradient, or a part of one, that no round has reduced."""
    own = entry.gradient_slice
    return own is not None and entry.grad is not None and bool(own.unreduced or own.pending is not None)


def _note_unreduced(entry: ParamRecord, is_early: bool) -> None:
    grad, gradient_slice = entry.grad, entry.gradient_slice
    if gradient_slice is not None and type(grad) is torch.Tensor and grad.layout is torch.strided:
        gradient_slice.unreduced, gradient_slice.was_early = grad.data_ptr(), is_early
