"""Backward of a module that was taken over: the reducer sums gradients over ranks, and ``param.grad`` becomes a part.

A round is one backward that reduces gradients; with gradient accumulation, the last backward before the step. The
gradient of the module's output, or else the first gradient of a param, opens the round. Autograd accumulates gradients,
and each one goes to the reducer at once. When autograd is done, the reducer sends the remaining buckets. Then one small
all-reduce (:mod:`shardopt.module.gradient_report`) tells all ranks each param's norms, and ``param.grad`` becomes a
part. A gradient may arrive after its bucket was sent (reentrant activation checkpointing): that bucket is reduced once
more, and a second all-reduce tells the norms of the new sums.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from ..domain.agreement import StepDigest, agree
from ..domain.domain import Domain
from ..domain.host_sum import HostSum
from ..domain.param import ParamRecord
from ..domain.shard import Shard
from ..errors import CommunicationError, DisagreementError, ShardoptError
from ..kernels.formats import Format
from ..kernels.launch import backend_of
from ..kernels.reductions import COLUMNS, norms_of_limbs
from ..kernels.tables import Factors, Gradients
from ..partition.streams import last_used
from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import GradientSlice, Norms
from ..tensors.part import Part
from ..tensors.unsharded_guard import keep_pattern
from .closure import ClosureState
from .gradient_report import Arrivals, Report, ReportLayout
from .hooks import call_while_alive


class Round(Enum):
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


class Backward:
    """Takes the gradients of a domain's params.

    Attributes:
        is_syncing: True if the backward of the last forward is a round; that forward sets it.
        on_end: is called when a round ends (True) or is lost (False).
        is_in_forward: True from the beginning of a forward that a backward can follow to its end; one that raises has
            no end.
        units: by the name of each unit of stage 3, its params.
        before_round: is called before each round while a ``join()`` is open, with the numbers of the params that hold a
            gradient. It returns the divisor of the round's sums, or None for the number of all ranks.
        closure: the closure of a step, if one runs.
    """

    def __init__(self, domain: Domain):
        self._domain = domain
        self._entries: list[ParamRecord] = []
        self._rows: dict[Shard, np.ndarray[Any, Any]] = {}  # 1D [pieces]: the number of each piece's entry
        self._tables: dict[Shard, Gradients] = {}  # the kernels' tables, for sums that stay on the device
        # The same for sums that are copied to host memory, by their address on the device, and the totals that were
        # taken before the copy.
        self._staged: dict[tuple[Shard, int], Gradients] = {}
        self._early_totals: dict[Shard, torch.Tensor] = {}
        self._layout = ReportLayout([], 0, 1)  # where each number lies in the report that ends a round
        self._hooks: list[Any] = []
        self.is_syncing = self.is_in_forward = False
        self._lost: str | None = None  # why the gradients are lost; None unless the round is LOST
        self.on_end: Callable[[bool], None] = lambda _: None
        self.before_round: Callable[[list[int]], int | None] | None = None
        self.units: Mapping[str, Sequence[torch.nn.Parameter]] = {}
        self._divisor = domain.mesh.world.size  # of this round's sums
        self.closure = ClosureState()
        self._failed = False  # this rank's closure raised: it sends zeros for the rest of the round, and reports it

    @property
    def entries(self) -> Sequence[ParamRecord]:
        """All bound params, in the order of binding."""
        return self._entries

    # -- params ----------------------------------------------------------------------------------------------------

    def attach(self, entries: Sequence[ParamRecord], shards: Sequence[Shard]) -> None:
        """Takes the gradients of params that were just bound to these shards, from now on."""
        for entry in entries:
            self._entries.append(entry)
            self._attach_slice(entry)
            hook = call_while_alive(lambda me, entry, _: me.take_gradient(entry), self, entry)
            self._hooks.append(entry.param.register_post_accumulate_grad_hook(hook))
        for shard in shards:
            numbers = {entry.index: number for number, entry in enumerate(self._entries) if entry.shard is shard}
            self._rows[shard] = np.array([numbers[piece.param] for piece in shard.pieces], dtype=np.int64)
            self._watch_sums(shard)
        mesh = self._domain.mesh
        where = [(entry.shard.bucket.layout, entry.index) for entry in self._entries]
        self._layout = ReportLayout(where, mesh.shard.rank, mesh.world.size)

    def _watch_sums(self, shard: Shard) -> None:
        if isinstance(shard.reduced, HostSum):
            shard.reduced.on_sum = call_while_alive(Backward.total_early, self, shard)
            return
        self._tables[shard] = shard.sums

    def _attach_slice(self, entry: ParamRecord) -> None:
        domain, shard = self._domain, entry.shard
        where, index, receive = (
            shard.slice_of(entry.index),
            entry.index,
            call_while_alive(Backward._receive, self, entry),
        )

        def gather(_: torch.Tensor) -> torch.Tensor:
            return shard.as_param(domain.gather_slices(shard, shard.reduced.total, "gradients"), index).clone()

        shared = domain.mesh.shard.size > 1
        entry.gradient_slice = GradientSlice(
            shard.reduced.total[where.local], where.start, receive, gather if shared else None
        )

    def detach(self) -> None:
        """Removes all hooks: gradients are autograd's own again."""
        for hook in self._hooks:
            hook.remove()
        for entry in self._entries:
            if isinstance(entry.param.grad, Part):
                entry.param.grad = None
            entry.gradient_slice = None  # its closures hold the domain: a cycle would outlive the optimizer
        self._hooks, self._entries, self._rows, self._tables = [], [], {}, {}
        self._staged, self._early_totals = {}, {}
        self.is_syncing = False  # the user may still run backward through an older graph

    # -- a round ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Round:
        """The state of the round. The reducer knows if one is open; ``abandon()`` stores why one is lost."""
        if self.is_open:
            return Round.OPEN
        return Round.CLOSED if self._lost is None else Round.LOST

    @property
    def is_open(self) -> bool:
        """True if a round is open."""
        return self._domain.reducer is not None and self._domain.reducer.is_open

    def check_whole(self) -> None:
        """Raises ShardoptError if gradients were reduced in part only."""
        if self.is_open:
            self.abandon("backward ended before all gradients were reduced")
        if self._lost is not None:
            raise ShardoptError(
                "call zero_grad() on every rank and go on with the next batch: the gradients are those of a part of a "
                f"backward only, and a step would train on them. {self._lost}."
            )
        shown = ((each, _shown(each)) for each in self._entries)
        waiting = next((each for each, found in shown if found is not None and found.pending is not None), None)
        if waiting is not None:
            raise ShardoptError(
                "run the last backward before step() outside of no_sync(), or call zero_grad(): gradients of "
                f"{waiting.name} were accumulated under no_sync() and not reduced, and a step would omit them."
            )

    def abandon(self, reason: str) -> None:
        """Abandons the open round, which is LOST then. The other ranks hear of it if the transport can tell them."""
        assert self._domain.reducer is not None
        self._domain.reducer.abandon_round()
        self._lost = reason
        self.on_end(False)
        for entry in self._entries:
            if entry.gradient_slice is not None:  # its sum may hold a part of the lost round
                entry.gradient_slice.part = None

    def forget_gradients(self) -> None:
        """Forgets all gradients: the user set them to None or zero."""
        if self.is_open:
            self.abandon("zero_grad() was called in the middle of it")
        self._lost = None
        for entry in self._entries:
            if entry.gradient_slice is not None:
                entry.gradient_slice.pending = None
        # Only after a forward that raised. Otherwise another rank may have abandoned the batch that this rank has yet
        # to run: this rank would run it as the attempt after, and ranks would wait for each other (zeroes_late).
        if self.is_in_forward:
            self.catch_up()
            self.is_in_forward = False

    @property
    def rounds(self) -> int:
        """Number of rounds that all ranks finished."""
        return 0 if self._domain.reducer is None else self._domain.reducer.rounds

    def fail(self, error: Exception, rounds: int) -> bool:
        """Tells ranks that wait in a round that this rank's closure raised. See :mod:`shardopt.module.closure`.

        Args:
            rounds: how many rounds were finished when the closure began.

        Returns:
            True if all ranks will meet at the beginning of the step.
        """
        reducer = self._domain.reducer
        if reducer is None:
            return True
        if reducer.tells:
            reducer.fail(self.closure.number)
            if self.is_open:
                self.abandon(f"{type(error).__name__}: {error}")
            return True
        if self.is_open and reducer.can_meet:
            self._failed = True
            try:
                self._finish()
            except CommunicationError:  # raised by the other ranks; this rank raises the closure's own error
                pass
            finally:
                self._failed = False
        # In a join() they meet before each forward and backward.
        meets = self.before_round is not None or not self._gathers_by_messages
        return (reducer.can_meet and meets) or reducer.rounds > rounds

    @property
    def _gathers_by_messages(self) -> bool:
        sharded = self._domain.sharded
        return sharded is not None and sharded.gatherer.waits_for_others

    def catch_up(self) -> None:
        """Begins the next round with ranks that abandoned an attempt at it, which this rank did not begin."""
        if self._domain.reducer is not None:
            self._domain.reducer.catch_up()

    def open(self) -> None:
        """Opens a round; it ends with the outermost of the graphs that autograd is running."""
        self._divisor, reducer, told = self._domain.mesh.world.size, self._domain.reducer, None
        assert reducer is not None
        if self.before_round is not None:
            told = self.before_round(
                [number for number, entry in enumerate(self._entries) if _shown(entry) is not None]
            )
            self._divisor = told or self._divisor
        if told is None and self.closure.is_on and reducer.can_meet and not reducer.tells:
            with self.closure.meeting():
                agree(StepDigest("round", dict), self._domain.mesh.world, self._domain.device)
        reducer.watch(self.closure.number if self.closure.is_on else 0)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._begin_round()

    def open_early(self) -> None:
        """Opens a round ahead of the first gradient of a param, if the backward that runs will have one."""
        # False inside of torch.autograd.grad(), which accumulates nothing; backward(inputs=...) may, later.
        accumulates = torch.autograd.Variable._execution_engine.is_checkpoint_valid()
        if self.is_syncing and not self.is_open and accumulates:
            self.open()

    def run_round_of_zeros(self, held: Collection[int], divisor: int) -> None:
        """Runs a round to which this rank adds zeros: it has run out of batches.

        Args:
            held: numbers of the params that hold a gradient of an earlier round on the other ranks.
            divisor: the divisor of the round's sums.
        """
        for number, entry in enumerate(self._entries):
            if entry.gradient_slice is not None:
                entry.gradient_slice.pending = None
            if number not in held:
                entry.param.grad = None
        self._divisor = divisor
        self._begin_round()
        self._finish()

    def _begin_round(self) -> None:
        reducer = self._domain.reducer
        assert reducer is not None
        held: list[set[int]] = [set() for _ in reducer.buckets]
        absent: list[set[int]] = [set() for _ in reducer.buckets]
        for entry in self._entries:
            grad, gradient_slice = entry.param.grad, entry.gradient_slice
            if not entry.param.requires_grad:
                absent[entry.shard.number].add(entry.index)
            if gradient_slice is None:
                continue
            gradient_slice.edits = []
            if not gradient_slice.shows_in(grad):
                gradient_slice.pending = gradient_slice.undivided = None
                continue
            held[entry.shard.number].add(entry.index)
            # The user may have read or scaled the mean since.
            read = gradient_slice.restore_sum(self._divisor)
            if read is not None:
                last_used(read)  # the stream of the first hook is not the one that allocated it
        reducer.start_round(held, absent)
        self._lost = None
        if self._domain.sharded is not None:
            self.pass_over(self._domain.sharded.gatherer.past)

    def pass_over(self, units: Sequence[str]) -> None:
        """Awaits no more gradients from units that this backward is past: ranks may differ in the params they use."""
        reducer, entries = self._domain.reducer, self._domain.entries
        if units:  # before any gradient, if a skipped unit ends the model: the first gather may wait for a reduction
            self.open_early()
        if not self.is_open or reducer is None:
            return
        found = [entries[param] for name in units for param in self.units[name] if param in entries]
        # A list: each of them is passed over.
        if any([reducer.pass_over(entry.shard.number, entry.index) for entry in found]):
            reducer.start_completed()

    def _receive(self, entry: ParamRecord, grad: torch.Tensor) -> None:
        """Takes a gradient that autograd adds to a part."""
        gradient_slice = entry.gradient_slice
        assert gradient_slice is not None
        if gradient_slice.pending is not None:
            gradient_slice.pending.add_(grad.detach())
        else:
            # Autograd may pass the same tensor to another param. A round reads it at once; under no_sync() it is kept
            # until a later backward, and a write to the other param's gradient would change it.
            gradient_slice.pending = grad.detach() if self.is_syncing else grad.detach().clone()

    def take_gradient(self, entry: ParamRecord) -> None:
        """Takes the gradient of a param that autograd has just accumulated."""
        if not self.is_syncing:
            return
        try:
            if not self.is_open:
                self.open()
            self._deliver(entry)
        except BaseException as error:
            if self.is_open:
                self.abandon(f"{type(error).__name__}: {error}")
            raise

    def _deliver(self, entry: ParamRecord) -> None:
        reducer, param, gathered, gradient_slice = (
            self._domain.reducer,
            entry.param,
            entry.shard.gathered,
            _shown(entry),
        )
        assert reducer is not None
        if gathered is not None and not gathered.unit.is_here and torch._C._current_graph_task_id() != -1:
            raise ShardoptError(
                "return from a module's forward every tensor that others use (an auxiliary loss kept as an attribute, "
                f"say), or construct the optimizer with {keep_pattern(self._domain.name_of(entry.param))} and the "
                f"param stays whole: {entry.name} got a gradient while its values were released, so backward may have "
                "read memory that was freed."
            )
        grad = param.grad
        if gradient_slice is not None:
            grad, gradient_slice.pending = gradient_slice.pending, None
        else:
            param.grad = None
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ShardoptError(
                "build the embedding with sparse=False, or give this param to torch.optim.SparseAdam and another "
                f"module to DDP: the gradient of {entry.name} is sparse ({grad.layout}), and only dense ones are "
                "reduced."
            )
        reducer.deliver(entry.shard.number, entry.index, grad.detach(), entry.shard.strides(entry.index))

    def _finish(self) -> None:
        if not self.is_open:  # abandoned since autograd was asked for this call
            return
        try:
            # Params may be resharded by now; without this, reading any of their attributes would run the guard's
            # checks.
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                if self._domain.sharded is not None:  # first: another rank may need a unit for what is reduced next
                    self._domain.gatherer.join_rest()
                self._finish_round()
        except BaseException as error:
            if self.is_open:
                self.abandon(f"{type(error).__name__}: {error}")
            raise
        self.on_end(True)

    def _finish_round(self) -> None:
        reducer = self._domain.reducer
        assert reducer is not None
        with self._domain.clock.phase("reduce"):
            arrivals = self._reduce_rest()
            report = self._report(arrivals)
            if report.late.any():
                late = (entry for entry, is_late in zip(self._entries, report.late, strict=True) if is_late)
                reducer.finish_late(sorted({entry.shard.number for entry in late}))
                report = self._report(arrivals)  # finish_late() changed the sums
            reducer.end_round()
            self._show_gradients(report)

    def _reduce_rest(self) -> Arrivals:
        """Reduces the remaining buckets, until every rank's sums are complete."""
        reducer = self._domain.reducer
        assert reducer is not None
        held = self._deliver_rest()
        reducer.finish()
        where = [(entry.shard.number, entry.index) for entry in self._entries]
        present = np.array([reducer.has_arrived(*each) for each in where], dtype=bool)
        return Arrivals(present, held, late=np.array([reducer.is_late(*each) for each in where], dtype=bool))

    def _deliver_rest(self) -> "np.ndarray[Any, Any]":
        """Delivers the gradients of no_sync() that this backward did not touch.

        Returns:
            1D [entries] bool: True for params that showed a sum of earlier rounds.
        """
        held = np.zeros(len(self._entries), dtype=bool)
        for number, entry in enumerate(self._entries):
            gradient_slice = entry.gradient_slice
            held[number] = _shown(entry) is not None
            is_pending = gradient_slice is not None and gradient_slice.pending is not None
            if is_pending or (entry.param.grad is not None and not held[number]):
                self._deliver(entry)
        return held

    # -- what every rank knows -------------------------------------------------------------------------------------

    def _report(self, arrivals: Arrivals) -> Report:
        """Collective: returns what all ranks together know of every gradient.

        Raises:
            CommunicationError: a rank died, is late, or failed in this backward; on every rank but that one.
            DisagreementError: some ranks added to an earlier gradient and others did not; on every rank.
        """
        mesh = self._domain.mesh
        report, error = self._own_report(arrivals)
        mesh.world.add_up(report.vector, "telling norms of gradients")
        if error is not None:
            raise error
        if report.failed:
            raise CommunicationError(
                f"call zero_grad() on every rank and go on together: rank {report.failed[0]} left this backward after "
                "an error of its own (look at its output), and its gradients are missing. Params and states are "
                "unchanged."
            )
        if report.held_apart.any():
            name = self._entries[int(report.held_apart.argmax())].name
            raise DisagreementError(
                f"call zero_grad() on every rank, or on none: {name} has a gradient from an earlier backward on some "
                "ranks and none on others, and the new one was added on some only."
            )
        return report

    def _own_report(self, arrivals: Arrivals) -> tuple[Report, Exception | None]:
        """Returns this rank's report, and the error that made its sums impossible, which the report tells all ranks."""
        mesh, report, error = self._domain.mesh, self._layout.blank(), None
        report.fill_arrivals(arrivals)
        if self._updated():
            report.mark_updated()
        try:
            sums = self._sums()
            if mesh.world.rank in mesh.one_copy:  # replicas of a shard hold the same sums, which count once
                report.fill_sums(sums)
        except Exception as raised:
            error = raised
        if self._failed or error is not None:
            report.mark_failed(mesh.world.rank)
        return report, error

    def _sums(self) -> "np.ndarray[Any, Any]":
        """Returns the totals of this rank's slices: 2D [entries, COLUMNS] int64, as in ``Totals``."""
        sums = np.zeros((len(self._entries), COLUMNS), dtype=np.int64)
        for shard, gradients in self._tables.items():
            self._add_totals(sums, shard, shard.kept.gradient, gradients)
        for shard, table in self._early_totals.items():
            self._store_rows(sums, shard, table)
        return sums

    def total_early(self, shard: Shard, total: torch.Tensor) -> None:
        """Takes the totals of a sum, 1D on the device, before it is copied to host memory."""
        if not len(self._rows[shard]):
            return
        where = shard, total.data_ptr()
        if where not in self._staged:  # a new table makes the host wait for the device in the middle of backward
            self._staged[where] = shard.tables.gradients_in(total)
        self._early_totals[shard] = self._totals(shard, shard.kept.gradient, self._staged[where])

    def _add_totals(self, sums: "np.ndarray[Any, Any]", shard: Shard, grad: Format, gradients: Gradients) -> None:
        """Writes the totals of the params in one shard to their rows of ``sums``."""
        if len(self._rows[shard]):
            self._store_rows(sums, shard, self._totals(shard, grad, gradients))

    def _totals(self, shard: Shard, grad: Format, gradients: Gradients) -> torch.Tensor:
        """Returns the totals of a shard's gradients: 2D [rows, COLUMNS] int64, on their device."""
        backend = backend_of(shard.device)
        blocks = backend.block_sums(grad, gradients, Factors(self._divisor))
        return backend.totals(blocks, gradients).table

    def _store_rows(self, sums: "np.ndarray[Any, Any]", shard: Shard, table: torch.Tensor) -> None:
        rows = self._rows[shard]
        sums[rows] = table[: len(rows)].cpu().numpy()

    def _updated(self) -> bool:
        """True if the round has changed this rank's params or states."""
        return False

    def _show_gradients(self, report: Report) -> None:
        """Makes ``param.grad`` a part wherever any rank had a gradient."""
        two, largest, counts = norms_of_limbs(report.limbs).tolist(), report.largest.tolist(), report.nonfinite.tolist()
        present, held = report.present.tolist(), report.held.tolist()
        for number, entry in enumerate(self._entries):
            gradient_slice = entry.gradient_slice
            if gradient_slice is None or not (present[number] or held[number]):
                continue
            gradient_slice.divisor, gradient_slice.is_used = self._divisor, False
            gradient_slice.norms = Norms(two[number], gradient_slice.rounded(largest[number]), counts[number])
            if not held[number]:
                entry.param.grad = GradientPart(gradient_slice, entry.param)


def _shown(entry: ParamRecord) -> GradientSlice | None:
    """Returns the slice of the param's reduced gradient if ``param.grad`` shows it."""
    found = entry.gradient_slice
    return found if found is not None and found.shows_in(entry.param.grad) else None
