"""The gradients of a domain's params in one round: from the params to the reducer, and back as parts of the sums.

A round is begun with the sums that params show. Gradients are delivered as they come, or at the end (those that were
accumulated before). What remains is reduced, one all-reduce (:mod:`shardopt.module.gradient_report`) gives all ranks
each param's norms, and ``param.grad`` becomes a part. When rounds begin and end is for
:class:`shardopt.module.rounds.Rounds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress, count, repeat
from operator import attrgetter, is_not, or_
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..domain.remote_gradients import GradientFetch
from ..errors import CommunicationError, DisagreementError
from ..kernels.reductions import norms_of_limbs
from ..kernels.tables import Gradients, sent
from ..partition.streams import last_used
from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import GradientSlice, Home, set_norms, settle
from ..tensors.norm_table import NormTable
from ..tensors.part import Part
from ..tensors.unsharded_guard import gradient_in
from .arrivals import Arrivals, is_pending, shown_slice
from .gradient_report import Report, ReportLayout
from .gradient_totals import GradientTotals
from .hooks import call_while_alive, remove_all

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..partition.reducer import Reducer
    from .arrivals import Taker
    from .closure import ClosureState
    from .gradient_weights import GradientWeights
    from .syncing import Syncing

_UNSHARED = next(map(getrefcount, [object()]))  # the references to a part that only its slice refers to
_REPORTING = "telling norms of gradients"
_OUTER, _PART = map(attrgetter, ("outer", "part"))  # read of many, in C


def _left(report: Report) -> CommunicationError:
    found = (
        f"rank {report.failed[0]} left this backward after an error of its own (look at its output), and its gradients "
        "are missing."
    )
    if report.updated:  # release_gradients=True updates buckets within backward
        return CommunicationError(f"restart from a checkpoint: {found} Some params are updated, others are not.")
    return CommunicationError(
        f"call zero_grad() on every rank and go on together: {found} Params and states are unchanged."
    )


class Release(Protocol):
    """Uses each sum as soon as it is complete, and takes the step within backward; it lies above."""

    def begin(self, in_backward: bool) -> bool:
        """A round is about to open. Returns False if it does not."""

    def take_sum(self, shard: Shard, total: torch.Tensor, arrived: AbstractSet[int], totals: GradientTotals) -> None:
        """Takes the sum of a bucket's gradients, which is complete."""

    def fill(self, report: Report, vector: torch.Tensor) -> None:
        """Fills in what the round has done until now."""

    def take_step(self, gradients: RoundGradients, problem: Exception | None) -> None:
        """Collective: autograd is done."""

    def abandon(self, reason: str, has_started: bool) -> None:
        """The round is lost; ``has_started``: other ranks may have used a sum."""

    def check(self) -> None:
        """Raises ShardoptError if a round was lost that had changed something."""

    def check_unused(self) -> None:
        """Raises ShardoptError if the gradients of this step were used already."""


class RoundGradients:
    """Delivers the gradients of one round after the other, and shows the sums.

    Attributes:
        reducer: of the domain, once that is bound.
        entries: all bound params, in the order of binding.
        slices: of their gradients; empty if sums are used at once.
        layout: where the numbers of each param and piece lie in the report that ends a round.
        weights: of all domains' gradients.
        release: what uses sums at once, in place of showing them.
        stage: the pipeline stage whose backward runs; None: of all.
        has_stages: each backward runs through one of several pipeline stages on this rank.
    """

    reducer: Reducer

    def __init__(self, domain: Domain, weights: GradientWeights, release: Release | None = None):
        self.domain, self.weights, self.release = domain, weights, release
        self.entries: list[ParamRecord] = []
        self.slices: list[GradientSlice] = []
        self._buckets: dict[int, Arrivals] = {}  # by their number in the reducer
        self._hooks: list[Any] = []
        self._totals = GradientTotals()
        # The kernels' tables for sums that are copied to host memory, by their address on the device.
        self._staged: dict[tuple[Shard, int], Gradients] = {}
        self.layout = ReportLayout([], 0, 1)
        self._divisor = 1  # of this round's sums
        self.stage: int | None = None
        self.has_stages = False
        self._late_buckets: frozenset[int] = frozenset()  # the buckets that got late gradients in this round

    @property
    def held(self) -> list[int]:
        """The numbers of the params that show a sum."""
        return [number for number, entry in enumerate(self.entries) if shown_slice(entry) is not None]

    # -- params ----------------------------------------------------------------------------------------------------

    def attach(self, entries: Sequence[ParamRecord], taker: Taker, syncing: Syncing) -> None:
        """Takes the gradients of params that were just bound, which the hooks give to ``taker``."""
        assert self.domain.reducer is not None
        self.reducer, self._device = self.domain.reducer, self.domain.device
        if self.release is None:
            _make_slices(self.domain, entries, syncing)
        by_shard: dict[Shard, list[int]] = {}
        for number, entry in enumerate(entries, len(self.entries)):
            if entry.gradient_slice is not None:
                entry.gradient_slice.number = number
                self.slices.append(entry.gradient_slice)
            by_shard.setdefault(entry.shard, []).append(number)
        self.entries += entries
        for shard, of_shard in by_shard.items():
            some = [self.entries[number] for number in of_shard]
            in_order = sorted((self.entries[number].index, number) for number in of_shard)
            numbers = np.array([number for _, number in in_order], dtype=np.int64)
            self._buckets[shard.number] = bucket = Arrivals(taker, shard, some, numbers)
            self._hooks += bucket.attach()
            is_early = self.release is not None or shard.gradient_sum.is_on_host
            params = numbers[[piece.param for piece in shard.pieces]]
            self._totals.add(shard, params, is_early, self.reducer.waits_for_messages)
        mesh = self.domain.mesh
        where = [(entry.shard.bucket.layout, entry.index) for entry in self.entries]
        self.layout = ReportLayout(where, mesh.shard.rank, mesh.world.size)
        self.reducer.on_sum = call_while_alive(RoundGradients.take_sum, self)
        self.reducer.shows_sums = self.domain.early is not None

    def detach(self) -> None:
        """Removes all hooks: gradients are autograd's own again."""
        remove_all(self._hooks)
        for entry in self.entries:
            if isinstance(entry.grad, Part):
                entry.outer.grad = None
            entry.gradient_slice = None  # its closures hold the domain: a cycle would outlive the optimizer
        self.entries, self.slices, self._totals, self._staged, self._buckets = [], [], GradientTotals(), {}, {}
        vars(self).pop("reducer", None)  # and its buffers, however long the closed optimizer is kept

    # -- to the reducer --------------------------------------------------------------------------------------------

    def begin(self, divisor: int, stage: int | None, closure: ClosureState) -> None:
        """Begins a round, see :meth:`Rounds._begin`."""
        self._divisor, self.stage = divisor, stage
        if self.weights.in_use and self.weights.is_on:
            # Sums stay sums while tokens are added, and are measured as sums: the total is known behind the report.
            divisor, self._divisor = self.weights.divisor, 1
        if self.domain.early is not None:
            self.domain.early.begin_round()
        held: list[set[int]] = [set() for _ in self.reducer.buckets]
        absent: list[set[int]] = [set() for _ in self.reducer.buckets]
        fresh: list[int] = []  # gradients that begin anew
        for entry, grad in zip(self.entries, map(gradient_in, map(_OUTER, self.entries)), strict=True):
            gradient_slice = entry.gradient_slice
            # A sum that is used at once waits for what micro-batches brought before the param was frozen.
            if not entry.outer.requires_grad and (gradient_slice is not None or grad is None):
                absent[entry.shard.number].add(entry.index)
            if gradient_slice is None:
                continue
            gradient_slice.edits, gradient_slice.is_moving, gradient_slice.has_mean = [], True, False
            if gradient_slice.was_read:
                gradient_slice.keep_mean()
            if grad is None or not gradient_slice.shows_in(entry.grad):
                gradient_slice.pending = gradient_slice.undivided = None
                fresh += (gradient_slice.number,)
                continue
            held[entry.shard.number].add(entry.index)
            # The user may have read or scaled the mean since.
            if gradient_slice.divisor != divisor:
                read = gradient_slice.restore_sum(divisor)
                if read is not None:
                    last_used(read)  # the stream of the first hook is not the one that allocated it
        if self.domain.edits:
            self.domain.edits.forget(fresh)
        reducer = self.reducer
        awaited = reducer.start_round(held, absent, stage, closure.number if closure.is_on else 0)
        for number, bucket in self._buckets.items():
            bucket.begin(awaited[number], reducer)
        self._late_buckets = frozenset()
        for store in self.domain.stores:
            store.read_ahead()

    def pass_over(self, params: Collection[torch.nn.Parameter]) -> None:
        """Awaits no more gradients of these params, some of which are in this domain."""
        known, reducer = self.domain.entries, self.reducer
        found = [known[param] for param in params if param in known]
        for number in {entry.shard.number: None for entry in found}:
            if self._buckets[number].missing:
                self._buckets[number].hand_over()
        # A list: each of them is passed over.
        if any([reducer.pass_over(entry.shard.number, entry.index) for entry in found]):
            reducer.start_completed()

    def arrivals_of(self, params: Collection[torch.nn.Parameter]) -> list[Arrivals]:
        """Returns the buckets in which some of these params lie."""
        known = self.domain.entries
        return [self._buckets[each] for each in {known[param].shard.number: 0 for param in params if param in known}]

    def take_sum(self, number: int, total: torch.Tensor, arrived: AbstractSet[int]) -> None:
        """Takes the sum of a bucket as soon as it is complete: one that does not stay on the device, or is used early.

        Args:
            total: 1D on the device, at least as long as this rank's slice.
            arrived: the params of the bucket of which this rank had a gradient in it.
        """
        shard = self._buckets[number].shard
        if self.release is not None:
            self.release.take_sum(shard, total, arrived, self._totals)
            return
        if not shard.gradient_sum.is_on_host:
            if self.domain.early is not None:
                self.domain.early.update(self.domain, shard, self._divisor)
            return
        where = shard, total.data_ptr()
        if where not in self._staged:
            self._staged[where] = shard.tables.gradients_in(total).there()
        self._totals.measure(shard, shard.formats.gradient, self._staged[where], self._divisor)

    def abandon(self) -> None:
        """Abandons the round, if one is open. The other ranks notice it if the transport can notify them."""
        if not self.reducer.is_open:
            return
        sharded = self.domain.sharded
        self.reducer.abandon_round(owes_more=sharded is not None and sharded.gatherer.passes.owes_gathers)
        if self.domain.early is not None:
            self.domain.early.lose_round()
        for bucket in self._buckets.values():
            bucket.abandon()
        for gradient_slice in self.slices:  # its sum may hold a part of the lost round
            gradient_slice.part = None

    # -- what every rank knows -------------------------------------------------------------------------------------

    def reduce(self, problem: Exception | None = None, is_spoilt: bool = False) -> Report:
        """Collective: reduces what remains, late gradients too. All else is as with ``report``."""
        report = self.report(problem, is_spoilt)
        late = report.late
        if late:
            numbers = {self.entries[number].shard.number for number in late}
            if not all(self.reducer.reduces(number, self.stage) for number in numbers):
                # A graph ran through several stages, as all ranks know now: from here on each round reduces all
                # buckets.
                self.has_stages = False
            self._late_buckets = frozenset(numbers)
            self.reducer.finish_late(sorted(numbers))
            report = self._report(None, is_spoilt)  # finish_late() changed the sums
        return report

    def report(self, problem: Exception | None = None, is_spoilt: bool = False) -> Report:
        """Collective: reduces the remaining buckets, and returns what all ranks together know of every gradient.

        Args:
            problem: why this rank's sums are no good, which the other ranks are told.
            is_spoilt: gradients of this rank's experts hold an Inf or NaN.

        Raises:
            Exception: the problem.
            CommunicationError: a rank died, is late, or failed in this backward; on every rank but that one.
            DisagreementError: some ranks added to an earlier gradient and others did not; on every rank.
        """
        reducer, held = self.reducer, self._deliver_rest()
        try:
            if self._totals.has_large and problem is None:
                reducer.start_rest()
                problem = self._measure_meanwhile()
            reducer.finish()
        except Exception as error:
            if not reducer.is_reduced:
                raise
            problem = error  # the other ranks have their sums, and wait for this rank's report
        flags, arrived = np.zeros((3, len(self.entries)), dtype=bool), reducer.arrived
        if held:
            flags[1, held] = True
        for number, bucket in self._buckets.items():
            indices, late_ones = arrived[number]
            flags[0, bucket.numbers_of(indices)] = True
            if late_ones:
                flags[2, bucket.numbers_of(late_ones)] = True
        self._flags = flags
        return self._report(problem, is_spoilt)

    def _measure_meanwhile(self) -> Exception | None:
        """Measures sums that are whole. Returns the error, which the other ranks are told where they meet this one."""
        try:
            self._totals.measure_meanwhile(self.reducer.has_summed, self._divisor)
        except Exception as error:
            return error
        return None

    def _deliver_rest(self) -> list[int]:
        """Delivers the gradients of no_sync() that this backward did not touch.

        Returns:
            The numbers of the params that showed a sum of earlier rounds.
        """
        held, reducer = list[int](), self.reducer
        for bucket in self._buckets.values():
            if bucket.missing:
                bucket.hand_over()
            bucket.missing = 0
        # Nearly always none is left: then Python runs no turn of the loop.
        for number in compress(count(), map(is_not, map(gradient_in, map(_OUTER, self.entries)), repeat(None))):
            entry = self.entries[number]
            is_held = shown_slice(entry) is not None
            if is_held:
                held += (number,)
            if (is_pending(entry) or not is_held) and reducer.reduces(entry.shard.number, self.stage):
                if entry.outer is not entry.param:  # a zero-bubble schedule assigns what no hook has placed
                    entry.place_gradient()
                self._buckets[entry.shard.number].deliver(entry)
        return held

    def _report(self, problem: Exception | None, is_spoilt: bool) -> Report:
        """Collective: adds up the reports of all ranks, which show all of them if a rank has a problem."""
        mesh, device, report = self.domain.mesh, self._device, Report(self.layout)
        report.fill_flags(self._flags)
        if is_spoilt:
            report.mark_spoilt()
        if self.weights.in_use and self.weights.is_on:
            report.tell_weight(mesh.world.rank, self.weights.word)
        # Where the ranks' messages travel from device to device, the totals do not come to the host before.
        stays = device.type != "cpu" and mesh.world.size > 1 and mesh.world.carries(device)
        vector = sent(report.vector, device) if stays else report.vector
        try:
            if problem is not None:
                raise problem
            if self.release is not None:
                self.release.fill(report, vector)
            if mesh.world.rank in mesh.one_copy:  # replicas of a shard hold the same sums, which count once
                self._totals.add_to(vector, self.layout, self._divisor)
        except Exception as raised:
            problem = raised
            report.mark_failed(mesh.world.rank)
            vector = sent(report.vector, device) if stays else report.vector
        mesh.world.all_reduce(vector, _REPORTING)
        if stays:
            report.vector.copy_(mesh.world.read(vector, _REPORTING))  # the one wait of a backward
        if problem is not None:
            raise problem
        if report.told and report.failed:
            raise _left(report)
        if report.held_apart:
            name = self.entries[report.held_apart[0]].name
            raise DisagreementError(
                f"call zero_grad() on every rank, or on none: {name} has a gradient from an earlier backward on some "
                "ranks and none on others, and the new one was added on some only."
            )
        return report

    # -- shown -----------------------------------------------------------------------------------------------------

    def mark_spoilt(self, is_spoilt: bool) -> None:
        """Records whether gradients of any rank's experts hold an Inf or NaN, for the GradScalers of all ranks."""
        for each in self.slices:
            each.is_spoilt_elsewhere = is_spoilt

    def show(self, report: Report) -> None:
        """Collective: makes ``param.grad`` a part wherever any rank had a gradient, and ends the round."""
        two, largest, counts = norms_of_limbs(report.limbs), report.largest, report.nonfinite
        divisor, reducer = self._divisor, self.reducer
        if self.weights.in_use and self.weights.is_on:  # what was measured are sums
            divisor = self.weights.divisor
            two, largest = two / divisor, largest / divisor
        present, held, _ = report.counts
        is_shown, shown, slices = list(map(or_, present, held)), self.entries, self.slices
        is_whole, numbers = 0 not in is_shown, list(range(len(shown)))  # nearly always
        if not is_whole:
            numbers, shown = list(compress(numbers, is_shown)), list(compress(shown, is_shown))
            slices = list(compress(slices, is_shown))
        for own in slices:
            own.divisor, own.is_used, own.has_mean = divisor, False, True
            # Every rank has come to this round: an older gradient is read of copies alone.
            own.round, own.edit_count, own.was_read = reducer.rounds, 0, False
            if own.kept:
                own.drop_kept()
        uses = list(map(getrefcount, map(_PART, slices)))
        try:
            for own, entry, used in zip(slices, shown, uses, strict=True):
                if held[own.number]:  # it shows that sum still
                    continue
                if entry.outer is entry.param and used == _UNSHARED:  # the part can show another gradient
                    entry.param.grad = own.part
                else:
                    entry.show_gradient(GradientPart(own, entry.param))
        except RuntimeError:  # torch compares dtypes and devices: the model was moved before this forward
            for entry in shown:
                entry.check()
            raise
        settle(slices)
        if self.stage is not None:  # other stages' sums were not measured, and have their norms still
            buckets = [entry.shard.number for entry in shown]
            is_new = [reducer.reduces(number, self.stage) or number in self._late_buckets for number in buckets]
            is_whole, numbers, slices = False, list(compress(numbers, is_new)), list(compress(slices, is_new))
        rows: Any = slice(None) if is_whole else numbers
        set_norms(slices, two[rows], largest[rows], counts[rows])
        reducer.end_round()  # last: after an interrupt that left some gradients out, the round is LOST
        self.stage = None


def _make_slices(domain: Domain, entries: Sequence[ParamRecord], syncing: Syncing) -> None:
    """Gives params the slices of their gradients, with norms in one table for all that are alike."""
    alike: dict[torch.dtype, list[ParamRecord]] = {}
    for entry in entries:
        alike.setdefault(entry.shard.gradient_sum.total.dtype, []).append(entry)
    counts = Counter(entry.shard for entry in entries)
    homes = {shard: Home(shard.gradient_sum.total, count) for shard, count in counts.items()}
    for dtype, some in alike.items():
        table = NormTable(dtype, [entry.shard.bucket.layout.numels[entry.index] for entry in some], domain.edits)
        for row, entry in enumerate(some):
            entry.gradient_slice = _slice_of(domain, entry, (table, row), homes[entry.shard], syncing)


def _slice_of(
    domain: Domain, entry: ParamRecord, place: tuple[NormTable, int], home: Home, syncing: Syncing
) -> GradientSlice:
    shard, where, index = entry.shard, entry.shard.slice_of(entry.index), entry.index
    total = shard.gradient_sum.total[where.local]

    def gather(own: torch.Tensor) -> torch.Tensor:
        flat = shard.gradient_sum.total
        if own is not total:  # of a result
            flat = torch.zeros(shard.numel, dtype=own.dtype, device=shard.device)
            flat[where.local] = own.to(flat.device)
        return shard.as_param(domain.gather_slices(shard, flat, "gradients"), index).clone()

    is_whole = domain.mesh.shard.size == 1
    whole, fetch = (None, None) if is_whole else (gather, GradientFetch(domain, shard, index))
    receive, group = call_while_alive(_receive, syncing, entry), domain.mesh.world.group
    # A gradient that a script keeps must not keep the optimizer (test_no_page_of_sums_stays_registered).
    draws = call_while_alive(lambda domain, entry: domain.draw(entry), domain, entry)
    return GradientSlice(total, where.start, place, receive, whole, fetch, group, draws, home)


def _receive(syncing: Syncing, entry: ParamRecord, grad: torch.Tensor) -> None:
    """Takes a gradient that autograd adds to a part."""
    own = entry.gradient_slice
    assert own is not None
    if own.pending is not None:
        own.pending.add_(grad.detach())
    else:
        # Autograd may pass the same tensor to another param. A round reads it at once. Under no_sync() it is kept until
        # a later backward: without a copy, a write to the other param's gradient would change it.
        own.pending = grad.detach() if syncing.is_on else grad.detach().clone()
