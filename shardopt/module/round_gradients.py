"""The gradients of a domain's params in one round: from the params to the reducer, and back as parts of the sums.

A round is begun with the sums that params show. Gradients are delivered as they come, or at the end (those that were
accumulated before). What remains is reduced, one all-reduce (:mod:`shardopt.module.gradient_report`) gives all ranks
each param's norms, and ``param.grad`` becomes a part. When rounds begin and end is for
:class:`shardopt.module.backward.Backward`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..domain.host_sum import HostSum
from ..errors import CommunicationError, DisagreementError, ShardoptError
from ..kernels.reductions import norms_of_limbs
from ..kernels.tables import Gradients, sent
from ..partition.streams import call_on, last_used
from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import GradientSlice, set_norms, settle
from ..tensors.unsharded_guard import gradient_in, keep_pattern
from .gradient_report import GradientFlags, Report, ReportLayout
from .gradient_totals import GradientTotals
from .hooks import call_while_alive

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..partition.reducer import Reducer
    from .arrivals import Arrivals
    from .gradient_weights import GradientWeights

# The references to a part that only its slice refers to, while all parts are counted in one list.
_UNSHARED = next(map(getrefcount, [object()])) + 1
_REPORTING = "telling norms of gradients"


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


class RoundGradients:
    """Delivers the gradients of one round after the other, and shows the sums.

    Attributes:
        entries: all bound params, in the order of binding.
        has_stages: each backward runs through one of several pipeline stages on this rank.
        found_nonfinite: an Inf or NaN, in the last round.
        leads: this is the main domain, whose report has all ranks; not that of experts.
    """

    def __init__(self, domain: Domain, num_batches: int | None = None):
        """
        Args:
            num_batches: the number of ranks that have a batch; None: of the domain's ranks. Experts have fewer ranks.
        """
        self._domain = domain
        self.entries: list[ParamRecord] = []
        self._arrivals: dict[Shard, Arrivals] = {}
        self._numbers: dict[Shard, np.ndarray[Any, Any]] = {}  # 1D [params]: the numbers of a bucket's params
        self._totals = GradientTotals()
        # The kernels' tables for sums that are copied to host memory, by their address on the device.
        self._staged: dict[tuple[Shard, int], Gradients] = {}
        self._layout = ReportLayout([], 0, 1)  # where each number lies in the report that ends a round
        self._num_batches = domain.mesh.world.size if num_batches is None else num_batches
        self._divisor = self._num_batches  # of this round's sums
        self._stage: int | None = None  # the pipeline stage whose backward runs; None: of all
        self._late_buckets: frozenset[int] = frozenset()  # the buckets that got late gradients in this round
        self._sum_error: Exception | None = None  # why this rank could not use its sums of this round
        self._follower_error: Exception | None = None  # why this rank could not end a round of its experts
        self._is_spoilt_by_followers = False  # a gradient of an expert holds an Inf or NaN
        self.has_stages = self.found_nonfinite = False
        self.leads = True
        self.weights: GradientWeights | None = None  # from the first call of gradient_weight() on
        self._told: list[int] = []  # the ranks that told a weight in this round
        self._failed = False  # this rank's closure raised: it sends zeros for the rest of the round, and reports it

    @property
    def _reducer(self) -> Reducer:
        """The reducer of the domain, which is bound."""
        links = self._domain.links
        assert links is not None and links.reducer is not None
        return links.reducer

    @property
    def layout(self) -> ReportLayout:
        """Where the numbers of each param and piece lie in a report."""
        return self._layout

    @property
    def _slices(self) -> list[GradientSlice]:
        """The slices of all gradients."""
        return [entry.gradient_slice for entry in self.entries if entry.gradient_slice is not None]

    @property
    def _gradients(self) -> list[torch.Tensor | None]:
        """What ``param.grad`` is now, of each of ``entries``."""
        return list(map(gradient_in, [entry.outer for entry in self.entries]))

    def _number(self, shards: Iterable[Shard]) -> None:
        """Gives numbers to all params anew; these shards are new."""
        for shard in shards:
            indices = {entry.index: number for number, entry in enumerate(self.entries) if entry.shard is shard}
            self._numbers[shard] = np.array([indices[index] for index in range(len(indices))], dtype=np.int64)
            # 1D [pieces]: the number of each piece's entry.
            self._measure_sums_of(shard, np.array([indices[piece.param] for piece in shard.pieces], dtype=np.int64))
        mesh = self._domain.mesh
        where = [(entry.shard.bucket.layout, entry.index) for entry in self.entries]
        self._layout = ReportLayout(where, mesh.shard.rank, mesh.world.size)

    def _measure_sums_of(self, shard: Shard, params: np.ndarray[Any, Any]) -> None:
        self._totals.add(shard, params, is_early=isinstance(shard.gradient_sum, HostSum))
        if isinstance(shard.gradient_sum, HostSum):
            shard.gradient_sum.on_sum = call_while_alive(RoundGradients.measure_early, self, shard)

    def measure_early(self, shard: Shard, total: torch.Tensor) -> None:
        """Measures a sum, 1D on the device, before it is copied to host memory."""
        where = shard, total.data_ptr()
        if where not in self._staged:
            self._staged[where] = shard.tables.gradients_in(total).there()
        self._totals.measure(shard, shard.formats.gradient, self._staged[where], self._divisor)

    # -- to the reducer --------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        divisor = self._divisor
        if self.weights is not None and self.weights.is_on:
            # Sums stay sums while tokens are added, and are measured as sums: the total is known behind the report.
            divisor, self._divisor = self.weights.divisor, 1
        held: list[set[int]] = [set() for _ in self._reducer.buckets]
        absent: list[set[int]] = [set() for _ in self._reducer.buckets]
        fresh: list[int] = []  # gradients that begin anew
        for entry, grad in zip(self.entries, self._gradients, strict=True):
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
        if self._domain.edits:
            self._domain.edits.forget(fresh)
        reducer = self._reducer
        awaited = reducer.start_round(held, absent, self._stage)
        for arrivals in self._arrivals.values():
            arrivals.begin(awaited[arrivals.shard.number], reducer)
        self._late_buckets = frozenset()

    def _hand_over(self, arrivals: Arrivals) -> None:
        """Delivers the gradients of a bucket that rest, and counts those that are still missing."""
        grads, number, reducer = arrivals.take(), arrivals.shard.number, arrivals.reducer
        if grads:
            its, stream = (number, grads, arrivals.shard.all_strides), arrivals.stream
            arrivals.missing = reducer.deliver(*its) if stream is None else call_on(stream, reducer.deliver, *its)
            return
        for entry in arrivals.entries if grads is None else ():
            if entry.outer.grad is not None and (shown_slice(entry) is None or _is_pending(entry)):
                call_on(arrivals.stream, self._deliver, entry)
        arrivals.missing = reducer.num_awaited(number)

    def _check_here(self, entry: ParamRecord) -> None:
        """Raises ShardoptError if a gradient arrives of a param whose values were released."""
        gathered = entry.shard.gathered
        if gathered is not None and not gathered.unit.is_here and torch._C._current_graph_task_id() != -1:
            raise ShardoptError(
                "return from a module's forward every tensor that others use (an auxiliary loss kept as an attribute, "
                f"say), or construct the optimizer with {keep_pattern(self._domain.name_of(entry.param))} and the "
                f"param stays whole: {entry.name} got a gradient while its values were released, so backward may have "
                "read memory that was freed."
            )

    def _deliver(self, entry: ParamRecord) -> None:
        """Delivers the gradient of one param."""
        grad, gradient_slice = entry.grad, shown_slice(entry)
        if gradient_slice is not None:
            grad, gradient_slice.pending = gradient_slice.pending, None
        else:
            entry.outer.grad = None
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ShardoptError(
                "build the embedding with sparse=False, or give this param to torch.optim.SparseAdam and another "
                f"module to DDP: the gradient of {entry.name} is sparse ({grad.layout}), and only dense ones are "
                "reduced."
            )
        self._reducer.deliver(entry.shard.number, {entry.index: grad}, entry.shard.all_strides)

    def _reduce_late(self, numbers: Collection[int]) -> None:
        if not all(self._reducer.reduces(number, self._stage) for number in numbers):
            # A graph ran through several stages, as all ranks know now: from here on each round reduces all buckets.
            self.has_stages = False
        self._late_buckets = frozenset(numbers)
        self._reducer.finish_late(sorted(numbers))

    def _reduce_remaining(self) -> GradientFlags:
        """Reduces the remaining buckets, until every rank's sums are complete."""
        reducer = self._reducer
        held, self._sum_error, self._follower_error = self._deliver_rest(), self._follower_error, None
        try:
            reducer.finish()
        except Exception as error:
            if not reducer.is_reduced:
                raise
            self._sum_error = error  # the other ranks have their sums, and wait for this rank's report
        present, late = np.zeros(len(self.entries), dtype=bool), np.zeros(len(self.entries), dtype=bool)
        arrived = reducer.arrived
        for shard, numbers in self._numbers.items():
            indices, late_ones = arrived[shard.number]
            present[numbers[list(indices)]] = True
            if late_ones:
                late[numbers[list(late_ones)]] = True
        return GradientFlags(present, held, late)

    def _deliver_rest(self) -> np.ndarray[Any, Any]:
        """Delivers the gradients of no_sync() that this backward did not touch.

        Returns:
            1D [entries] bool: True for params that showed a sum of earlier rounds.
        """
        held, reducer = np.zeros(len(self.entries), dtype=bool), self._reducer
        for arrivals in self._arrivals.values():
            if arrivals.missing:
                self._hand_over(arrivals)
            arrivals.missing = 0
        for number, (entry, grad) in enumerate(zip(self.entries, self._gradients, strict=True)):
            if grad is None:
                continue
            held[number] = shown_slice(entry) is not None
            if (_is_pending(entry) or not held[number]) and reducer.reduces(entry.shard.number, self._stage):
                if entry.outer is not entry.param:  # a zero-bubble schedule assigns what no hook has placed
                    entry.place_gradient()
                self._deliver(entry)
        return held

    # -- what every rank knows -------------------------------------------------------------------------------------

    def _report(self, flags: GradientFlags) -> Report:
        """Collective: returns what all ranks together know of every gradient.

        Raises:
            CommunicationError: a rank died, is late, or failed in this backward; on every rank but that one.
            DisagreementError: some ranks added to an earlier gradient and others did not; on every rank.
        """
        report, error = self._add_reports(flags)
        if error is not None:
            raise error
        self._told = report.told
        if self._told and report.failed:
            raise _left(report)
        if report.held_apart.any():
            name = self.entries[int(report.held_apart.argmax())].name
            raise DisagreementError(
                f"call zero_grad() on every rank, or on none: {name} has a gradient from an earlier backward on some "
                "ranks and none on others, and the new one was added on some only."
            )
        return report

    def _add_reports(self, flags: GradientFlags) -> tuple[Report, Exception | None]:
        """Collective: returns the reports of all ranks added up.

        Also the error that made this rank's own sums impossible; the report shows all ranks that there was one.
        """
        mesh, device, report = self._domain.mesh, self._domain.device, self._layout.blank()
        unused, self._sum_error = self._sum_error, None  # its traceback refers to this object
        report.fill_flags(flags)
        if self._is_spoilt_by_followers:
            report.mark_spoilt()
        if self.weights is not None:
            report.tell_weight(mesh.world.rank, self.weights.word)
        if self._failed:
            report.mark_failed(mesh.world.rank)
        # Where the ranks' messages travel from device to device, the totals do not come to the host before.
        stays = device.type != "cpu" and mesh.world.size > 1 and mesh.world.carries(device)
        vector, error = sent(report.vector, device) if stays else report.vector, None
        try:
            if unused is not None:
                raise unused
            # Replicas of a shard hold the same sums, which count once.
            self._fill_sums(report, vector, counts=mesh.world.rank in mesh.one_copy)
        except Exception as raised:
            error = raised
            report.mark_failed(mesh.world.rank)
            vector = sent(report.vector, device) if stays else report.vector
        mesh.world.all_reduce(vector, _REPORTING)
        if stays:
            report.vector.copy_(mesh.world.read(vector, _REPORTING))  # the one wait of a backward
        return report, error

    def _fill_sums(self, report: Report, vector: torch.Tensor, counts: bool) -> None:
        """Adds the totals of this rank's slices to its report, which may travel from the device.

        Args:
            counts: False if another rank's report holds the same totals.
        """
        if counts:
            self._totals.add_to(vector, self._layout, self._divisor)

    def mark_spoilt(self, is_spoilt: bool) -> None:
        """Records whether gradients of any rank's experts hold an Inf or NaN, for the GradScalers of all ranks."""
        for each in self._slices:
            each.is_spoilt_elsewhere = is_spoilt

    def _show_gradients(self, report: Report) -> None:
        """Makes ``param.grad`` a part wherever any rank had a gradient."""
        two, largest, counts = norms_of_limbs(report.limbs), report.largest, report.nonfinite
        divisor, self.found_nonfinite = self._divisor, bool(counts.any())
        if self.weights is not None and self.weights.is_on:  # what was measured are sums
            divisor = self.weights.divisor
            two, largest = two / divisor, largest / divisor
        shown = (report.present | report.held).nonzero()[0]
        measured = np.zeros(len(self.entries), dtype=bool)
        for shard, numbers in self._numbers.items():
            reduces_all = self._stage is None
            if reduces_all or self._reducer.reduces(shard.number, self._stage) or shard.number in self._late_buckets:
                measured[numbers] = True
        rounds, slices = self._reducer.rounds, list[GradientSlice]()
        to_show: list[tuple[ParamRecord, GradientSlice]] = []
        for number, is_held in zip(shown.tolist(), report.held[shown].tolist(), strict=True):
            entry = self.entries[number]
            gradient_slice = entry.gradient_slice
            if gradient_slice is None:
                continue
            gradient_slice.divisor, gradient_slice.is_used, gradient_slice.has_mean = divisor, False, True
            # Every rank has come to this round: an older gradient is read of copies alone.
            gradient_slice.round, gradient_slice.edit_count, gradient_slice.was_read = rounds, 0, False
            if gradient_slice.kept:
                gradient_slice.drop_kept()
            slices += (gradient_slice,)
            if not is_held:
                to_show += ((entry, gradient_slice),)
        uses = list(map(getrefcount, [own.part for _, own in to_show]))
        for (entry, own), count in zip(to_show, uses, strict=True):
            if entry.outer is entry.param and count == _UNSHARED:  # it can show another gradient
                entry.param.grad = own.part
            else:
                entry.show_gradient(GradientPart(own, entry.param))
        settle(slices)
        numbers = shown[measured[shown]]
        found = [self.entries[number].gradient_slice for number in numbers.tolist()]
        slices = [each for each in found if each is not None]
        set_norms(slices, two[numbers], largest[numbers], counts[numbers])


def _is_pending(entry: ParamRecord) -> bool:
    """True if autograd has added a gradient to the part that ``param.grad`` shows."""
    return entry.gradient_slice is not None and entry.gradient_slice.pending is not None


def shown_slice(entry: ParamRecord) -> GradientSlice | None:
    """Returns the slice of the param's reduced gradient if ``param.grad`` shows it."""
    found = entry.gradient_slice
    grad = entry.param.grad if entry.outer is entry.param else entry.grad  # each param asks several times a backward
    return found if found is not None and found.shows_in(grad) else None
