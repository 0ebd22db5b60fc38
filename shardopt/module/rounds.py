"""Rounds of a module that was taken over: the reducer sums gradients over ranks, and ``param.grad`` becomes a part.

A round is one backward that reduces gradients; with gradient accumulation, the last backward before the step. The
gradient of the module's output, or else the first gradient of a param, opens the round. Autograd accumulates gradients,
and those of a bucket go to the reducer together (:mod:`shardopt.module.arrivals`). When autograd is done, the reducer
sends the remaining buckets, and ``param.grad`` becomes a part (:mod:`shardopt.module.round_gradients`). A gradient may
arrive after its bucket was sent (reentrant activation checkpointing): that bucket is reduced once more, and a second
all-reduce reports the norms of the new sums.

The rounds of all domains, the main one and those of experts, open, end and are lost together::

    main      open  gradients ...................  reduce, report          time ->
    experts    open  gradients ..  reduce, report

A gradient of any domain opens the rounds of all: a rank whose experts got no token takes part with zeros. All ranks end
the rounds in one order, the main domain's last, so that groups of ranks that overlap do not wait for each other. The
main domain has all ranks: its report shows them what failed on the ranks of one expert.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from ..domain.agreement import agree_on
from ..domain.alone import check_not_alone
from ..domain.turn import holding
from ..errors import CommunicationError, ShardoptError
from ..tensors.pipelining import ZERO_BUBBLE
from ..tensors.unsharded_guard import keep_pattern
from .arrivals import shown_slice
from .gradient_report import Report
from .gradient_weights import GradientWeights
from .round_gradients import RoundGradients
from .running import threads_in_backward
from .syncing import Syncing

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..units.unit import Unit
    from ..units.unit_orders import Direction
    from .arrivals import Arrivals
    from .round_gradients import Release
    from .syncing import Owner


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


class Announcer(Protocol):
    """Announces what this rank is about to do to those that have run out of batches; it lies above."""

    def before_buffers(self, called: str) -> None:
        """Collective: a forward takes buffers, of the called module of this name."""

    def before_gathers(self, gathers: Direction | Unit) -> None:
        """Collective where params travel: a forward or backward begins, or a use that the schedule does not have."""

    def before_round(self, held: list[int]) -> int | None:
        """Collective: a round opens; ``held``: the numbers of the params that hold a gradient.

        Returns:
            The divisor of the round's sums; None: the number of all ranks.
        """


class Rounds:
    """Opens, ends and abandons the rounds of all domains of an optimizer, each of which has its own gradients.

    Attributes:
        main: the gradients of the main domain.
        parts: those of all domains in the order in which rounds end, the same on all ranks: the main one is the last.
        bound: those of ``parts`` that hold params, and the main one once any does.
        release: what uses sums within backward; None: ``param.grad`` shows them.
        syncing: whether the backward that runs is a round.
        is_in_forward: True from the beginning of a forward that a backward can follow to its end; one that raises has
            no end.
        announcer: announces to other ranks what this one does, while a ``join()`` is open.
        closure: the closure of a step, if one runs.
        turn: of the optimizer, which each hook holds.
    """

    def __init__(self, owner: Owner, main: Domain, release: Release | None, has_stages: bool):
        """``has_stages``: each backward runs through one of several pipeline stages on this rank."""
        self._owner = weakref.ref(owner)  # weak: a cycle would outlive the optimizer
        self.turn, self.closure, self.release, self.weights = main.turn, owner.closure, release, GradientWeights()
        self.main = RoundGradients(main, self.weights, release)
        self.main.has_stages = has_stages
        self.parts, self.bound = [self.main], list[RoundGradients]()
        self.syncing, self.is_in_forward = Syncing(), False
        self._is_on_host = True
        self._thread = 0  # the thread that opened the last round: on a GPU one of autograd's own
        self._lost: str | None = None  # why the gradients are lost; None unless the round is LOST
        self._is_fresh = False  # what gradients there are have been zeroed, and none was added
        self.announcer: Announcer | None = None

    # -- params ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[ParamRecord]:
        """The bound params of all domains."""
        return [entry for part in self.parts for entry in part.entries]

    def add_experts(self, domain: Domain) -> None:
        """Experts have a domain of their own."""
        self.parts.insert(-1, RoundGradients(domain, self.weights))
        self.weights.weighs_outputs = self.weights.in_use

    def attach(self, domain: Domain, entries: Sequence[ParamRecord]) -> None:
        """Takes the gradients of params that were just bound, from now on."""
        next(each for each in self.parts if each.domain is domain).attach(entries, self, self.syncing)
        # The main domain opens and ends the rounds of all, also where only experts train. Where nothing trains, a
        # backward opens none: ranks may run it alone. Tests: test_experts_train_alone and
        # test_one_rank_runs_a_frozen_module.
        leads = self.main.domain.reducer is not None and any(each.entries for each in self.parts)
        self.bound = [each for each in self.parts if each.entries or (leads and each is self.main)]
        if domain is self.main.domain:
            self.turn.reducer, self._is_on_host = domain.reducer, domain.device.type == "cpu"
        for entry in entries:
            _note_unreduced(entry, is_early=True)
        if self.weights.in_use:
            self.weights.attach(entries)

    def detach(self) -> None:
        """Removes all hooks: gradients are autograd's own again."""
        for each in self.parts:
            each.detach()
        self.weights.detach()
        self.bound, self.turn.reducer = [], None
        self.syncing.is_on = False  # the user may still run backward through an older graph

    # -- the state of a round --------------------------------------------------------------------------------------

    @property
    def state(self) -> RoundState:
        """The state of the round. The reducer knows if one is open; ``abandon()`` stores why one is lost."""
        if self.is_open:
            return RoundState.OPEN
        return RoundState.CLOSED if self._lost is None else RoundState.LOST

    @property
    def is_open(self) -> bool:
        """True if a round is open."""
        reducer = self.turn.reducer
        return reducer is not None and reducer.is_open

    def check_thread(self) -> None:
        """Raises ShardoptError if the round is open for a backward that another thread is in the middle of.

        A round that a failed backward left open belongs to no thread any more.
        """
        others = threads_in_backward() - {threading.get_ident()}
        if self._is_on_host:
            others &= {self._thread}
        if others:
            raise ShardoptError(
                "let one thread at a time run forward and backward of this module (a lock around both): another thread "
                "is in the middle of a backward, which this call would end or mix with its own."
            )

    def check_reduced(self) -> None:
        """Raises ShardoptError if a round was abandoned."""
        if self.is_open:
            self.abandon("backward ended before all gradients were reduced")
        if self.release is not None:
            self.release.check()
        if self._lost is not None:
            raise ShardoptError(
                "call zero_grad() on every rank and go on with the next batch: the gradients are those of a part of a "
                f"backward only, and a step would train on them. {self._lost}."
            )

    def check_whole(self) -> None:
        """Raises ShardoptError if gradients were reduced in part only."""
        self.check_reduced()
        if self.weights.in_use:
            self.weights.check()
        for part in self.parts:
            for entry in part.entries:
                own = entry.gradient_slice
                if own is not None and own.pending is not None and shown_slice(entry) is not None:
                    raise ShardoptError(
                        "run the last backward before step() outside of no_sync(), or call reduce_gradients(): "
                        f"gradients of {entry.name} were accumulated under no_sync(), or added by a zero-bubble "
                        f"schedule, and were not reduced, and a step would omit them. {ZERO_BUBBLE}"
                    )

    def abandon(self, reason: str) -> None:
        """Abandons the open round, which is LOST then. The other ranks notice it if the transport can notify them."""
        for each in self.bound:
            each.abandon()
        self._lost = reason
        owner = self._owner()
        if owner is not None:
            owner.round_ended(False)
        if self.release is not None:
            self.release.abandon(reason, self.main.reducer.has_started)

    def give_up(self, error: BaseException) -> None:
        """Abandons the round, if one is open, after an error."""
        if self.is_open:
            self.abandon(f"{type(error).__name__}: {error}")

    def forget_gradients(self) -> None:
        """Forgets all gradients: the user set them to None or zero."""
        if self.is_open:
            self.abandon("zero_grad() was called in the middle of it")
        self._lost, self._is_fresh = None, True
        self.weights.forget()
        for each in self.parts:
            if each.domain.early is not None:
                each.domain.early.forget()
            for own in each.slices:
                own.pending, own.unreduced, own.has_mean = None, 0, False
        # Only after a forward that raised. Otherwise another rank may have abandoned the batch that this rank has yet
        # to run: this rank would run it as the attempt after, and ranks would wait for each other (zeroes_late).
        if self.is_in_forward:
            self.catch_up()
            self.is_in_forward = False

    def catch_up(self) -> None:
        """Begins the next round with ranks that abandoned an attempt at it, which this rank did not begin."""
        for each in self.bound:
            each.reducer.catch_up()

    # -- it opens --------------------------------------------------------------------------------------------------

    @holding("backward()")
    def open_round(self) -> None:
        """Opens a round; it ends with the outermost of the graphs that autograd is running."""
        if self.release is not None and not self.release.begin(in_backward=True):
            return
        world, divisor = self.main.domain.mesh.world, None
        if self.turn.alone is not None:
            check_not_alone(self.main.domain, "a backward")
        if self.announcer is not None:
            divisor = self.announcer.before_round(self.main.held)
        if divisor is None and self.closure.is_on and not self.main.reducer.notifies_peers:
            with self.closure.raising_together():
                agree_on("round", world)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._thread = threading.get_ident()
        self._begin(divisor or world.size, self.main.stage)

    def _begin(self, divisor: int, stage: int | None = None) -> None:
        """Begins the rounds of all domains.

        Args:
            divisor: the number of ranks that have a batch: for experts too, whose groups have fewer ranks.
            stage: the pipeline stage whose backward runs; None: of all.
        """
        if self.weights.in_use:
            self.weights.begin_round(any(shown_slice(entry) is not None for entry in self.entries), self._is_fresh)
        with torch._C.DisableTorchFunctionSubclass():  # params may be resharded: see finish()
            for each in reversed(self.bound):
                each.begin(divisor, stage if each is self.main else None, self.closure)
        self._lost = None
        if self.main.domain.sharded is not None:
            self.main.domain.sharded.gatherer.passes.tell_past()

    def begin_graph(self, syncs: bool, stage: int = 0) -> None:
        """The backward of a forward begins: the gradient of an output has arrived.

        Args:
            syncs: this backward is a round.
            stage: the number of the called module that ran.
        """
        is_open = self.is_open
        if is_open and self._is_on_host and self._thread != threading.get_ident():
            self.check_thread()
        self.syncing.graph_begins(syncs, is_open)
        if not is_open:
            # The ranks that run out in a join() follow rounds of all buckets.
            self.main.stage = stage if self.main.has_stages and self.announcer is None else None
        self.open_round_early()

    def open_round_early(self) -> None:
        """Opens a round ahead of the first gradient of a param, if the backward that runs will have one."""
        # False inside of torch.autograd.grad(), which accumulates nothing; backward(inputs=...) may, later.
        accumulates = torch.autograd.Variable._execution_engine.is_checkpoint_valid()
        if self.syncing.is_on and not self.is_open and accumulates:
            self.open_round()

    def reduce_now(self) -> None:
        """Collective, outside of a backward: a round of the gradients that were accumulated under ``no_sync()``."""
        if self.release is None or self.release.begin(in_backward=False):
            self._begin(self.main.domain.mesh.world.size)
            self.finish()

    def run_round_of_zeros(self, held: Collection[int], divisor: int, is_weighted: bool) -> None:
        """Runs a round to which this rank adds zeros, as it has run out of batches.

        Args:
            held: numbers of the params that hold a gradient of an earlier round on the other ranks.
            divisor: the divisor of the round's sums.
            is_weighted: gradients of the others have weights.
        """
        if is_weighted:
            self.weights.run_out()
        for number, entry in enumerate(self.main.entries):
            if entry.gradient_slice is not None:
                entry.gradient_slice.pending = None
            if number not in held:
                entry.outer.grad = None
        self._begin(divisor)
        self.finish()

    # -- gradients come --------------------------------------------------------------------------------------------

    def pass_over(self, params: Collection[torch.nn.Parameter]) -> None:
        """Awaits no more gradients of params that this backward is past: ranks may differ in the params they use."""
        # Before any gradient, if a skipped unit ends the model: the first gather may wait for a reduction.
        self.open_round_early()
        for each in self.bound if self.is_open else ():
            each.pass_over(params)

    @holding("backward()")
    def take_gradient(self, arrivals: Arrivals, entry: ParamRecord) -> None:
        """Takes the gradient of a param that autograd has just accumulated."""
        try:
            if entry.outer is not entry.param:  # a DTensor, whose local gradient is placed as the param
                entry.place_gradient()
            if not self.is_open:
                self.syncing.decide(self._owner())
            if not self.syncing.is_on:
                if self.release is not None:
                    self.release.check_unused()
                _note_unreduced(entry, is_early=False)
                return
            if not self.is_open:
                self.open_round()
            with torch._C.DisableTorchFunctionSubclass():
                if not arrivals.rests(entry):
                    _check_here(self.main.domain, entry)
                    arrivals.deliver(entry)
                if arrivals.missing:
                    arrivals.missing -= 1
                    if not arrivals.missing:
                        arrivals.hand_over()
        except BaseException as error:
            self.give_up(error)
            raise

    @holding("backward()")
    def take_all(self, arrivals: Arrivals) -> None:
        """Takes the gradients of a bucket, the last of which has just come to rest; a round is open."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                arrivals.hand_over()
        except BaseException as error:
            self.give_up(error)
            raise

    # -- it ends ---------------------------------------------------------------------------------------------------

    @holding("backward()")
    def finish(self, problem: Exception | None = None) -> None:
        """Collective: ends the rounds of all domains.

        Args:
            problem: why this rank's sums are no good, as the report tells the other ranks.
        """
        if not self.is_open:  # abandoned since autograd was asked for this call
            return
        if torch.is_grad_enabled():  # in hardly any backward
            with torch.no_grad():
                return self.finish(problem)
        domain, owner = self.main.domain, self._owner()
        try:
            # Params may be resharded by now; without this, reading any of their attributes would run the guard's
            # checks.
            with torch._C.DisableTorchFunctionSubclass():
                if domain.sharded is not None:  # first: another rank may need a unit for what is reduced next
                    domain.gatherer.passes.join_remaining()
                if self.release is not None:
                    self.release.take_step(self.main, problem)
                else:
                    with domain.clock.phase("reduce"):
                        self._end(problem)
                if owner is not None:
                    owner.coverage.average_others()
        except BaseException as error:
            self.give_up(error)
            raise
        if owner is not None:
            owner.round_ended(True)

    def _end(self, problem: Exception | None) -> None:
        is_spoilt, reported = False, list[tuple[RoundGradients, Report]]()
        for each in self.bound[:-1]:
            try:
                report = each.reduce()
                is_spoilt = is_spoilt or bool(report.nonfinite.any())
                # The report of the main domain tells the tokens of all ranks.
                if self.weights.in_use and self.weights.is_on:
                    reported.append((each, report))
                else:
                    each.show(report)
            except Exception as error:  # the ranks of the next expert, and those of the main domain, wait for this one
                each.abandon()
                problem = problem or error
        report = self.main.reduce(problem, is_spoilt)
        if report.told or (self.weights.in_use and self.weights.is_on):
            self.weights.settle(report.weights)
        for each in self.parts if len(self.parts) > 1 else ():
            each.mark_spoilt(report.spoilt)
        for each, own in (*reported, (self.main, report)):
            each.show(own)
        self._is_fresh = False


def _check_here(domain: Domain, entry: ParamRecord) -> None:
    """Raises ShardoptError if a gradient arrives of a param whose values were released."""
    gathered = entry.shard.gathered
    if gathered is not None and not gathered.unit.is_here and torch._C._current_graph_task_id() != -1:
        raise ShardoptError(
            "return from a module's forward every tensor that others use (an auxiliary loss kept as an attribute, "
            f"say), or construct the optimizer with {keep_pattern(domain.name_of(entry.param))} and the param stays "
            f"whole: {entry.name} got a gradient while its values were released, so backward may have read memory that "
            "was freed."
        )


def _note_unreduced(entry: ParamRecord, is_early: bool) -> None:
    grad, own = entry.grad, entry.gradient_slice
    if own is not None and type(grad) is torch.Tensor and grad.layout is torch.strided:
        own.unreduced, own.was_early = grad.data_ptr(), is_early


def rounds_ended(rounds: Rounds | None) -> int:
    """Returns how many rounds all ranks have finished."""
    reducer = None if rounds is None else rounds.main.domain.reducer
    return 0 if reducer is None else reducer.rounds


def fail_closure(rounds: Rounds, error: Exception, ended_before: int) -> bool:
    """Notifies ranks that wait in a round that this rank's closure raised. See :mod:`shardopt.module.closure`.

    Args:
        ended_before: how many rounds were finished when the closure began.

    Returns:
        True if all ranks will raise together at the beginning of the step.
    """
    reducer, sharded = rounds.main.domain.reducer, rounds.main.domain.sharded
    if reducer is None:
        return True
    if reducer.notifies_peers:
        for each in rounds.bound:
            each.reducer.fail_closure(rounds.closure.number)
        rounds.give_up(error)
        return True
    if reducer.on_stream:
        rounds.give_up(error)
    elif rounds.is_open:
        try:
            rounds.finish(error)
        except CommunicationError:  # the report has told the other ranks; this rank raises the closure's own error
            pass
        except Exception as other:
            if other is not error:
                raise
    # In a join() all ranks exchange what they do before each forward and backward.
    gathers_by_messages = sharded is not None and sharded.gatherer.waits_for_others
    return rounds.announcer is not None or not gathers_by_messages or reducer.rounds > ended_before
