"""Released gradients: a bucket is updated in backward, as soon as it is reduced, and its gradients are gone.

::

    backward   fill 0   fill 1   fill 2     end
    reducer             sum 0    sum 1      sum 2
    update               |  0     |  1       |  2   tell, agree, gather, commit
    live       [0]      [0 1]    [1 2]      [2]     no gradient is left

What a step decides with all gradients at hand cannot be decided here, and is refused: clipping, loss scaling, a second
backward. When backward returns, the step was taken, on all ranks alike; ``step()`` says so and lets the next one begin.
An error in the midst of a backward leaves some buckets updated and others not, on each rank others: the domain is
broken then.

An update writes to params while backward goes on. Autograd accumulates the gradient of a param when all that used it
has run backward, so nobody reads it any more; whoever does all the same (a graph that was given ``param.detach()``)
meets a version that moved on, and autograd's own error; but for a checkpoint, which runs that graph's forward anew in
backward, with what the param is by then.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..domain.bind import checksum
from ..domain.domain import Domain
from ..domain.hyperparameters import check_numbers, plain_numbers
from ..domain.masters import follow_written_params
from ..domain.param import Group, ParamRecord
from ..domain.shard import Shard
from ..errors import BindingError, ShardoptError
from ..kernels.formats import format_of
from ..kernels.reductions import COLUMNS, NONFINITE, norms_of_limbs
from ..kernels.tables import Factors
from ..module.backward import Backward
from ..module.gradient_report import Report
from ..rules import Variant
from ..tensors.gradient_slice import divide_
from ..tensors.released_gradient import ReleasedGradient, second_backward
from .step import (
    NOTHING_DONE,
    Call,
    Outcome,
    check_unbroken,
    close_step,
    skip,
    update_early,
    view_of,
)
from .survey import (
    GradientStats,
    Launch,
    Place,
    Ready,
    Scaling,
    StepPlan,
    launches_of,
    placed,
    scalars_of,
    states_of_shards,
)


@dataclass
class _Round:
    """One backward: what it updates with, as it was when the backward began, and how far it has come."""

    numbers: list[dict[str, Any]]  # hyper-parameters of each group
    variants: list[Variant]
    places: dict[ParamRecord, Place]
    states: dict[Shard, dict[str, None]]
    written: list[ParamRecord]  # params that others wrote since the last step
    bits: dict[str, int]  # sums of theirs, to be compared
    sums: "np.ndarray[Any, Any]"  # 2D [entries, COLUMNS] int64: of this rank's slices
    # Sums of buckets of which not all gradients came on this rank: others may have had the rest.
    waiting: dict[Shard, torch.Tensor] = field(default_factory=dict)
    updated: bool = False


Begin = Callable[[], tuple[Sequence[Group], Mapping[str, Any]]]


class UpdateInBackward(Backward):
    """Takes the gradients of a domain's params, and the steps."""

    def __init__(self, domain: Domain, begin: Begin):
        """``begin`` is called when a backward begins to update, for the param groups and their defaults.

        Raises:
            BindingError: gradients are summed in two directions of a mesh.
        """
        if domain.mesh.is_hybrid:
            raise BindingError(
                "release_gradients=True was given with a 2D DeviceMesh: what the copies of a shard add up to is known "
                "when all buckets are reduced, and none could be released before. Give a process group, or a mesh of "
                "one dimension; or leave release_gradients away."
            )
        super().__init__(domain)
        self._begin = begin
        self._round: _Round | None = None
        self._outcome: Outcome | None = None  # of the backward that no step() has followed yet

    # -- params ----------------------------------------------------------------------------------------------------

    def _attach_slice(self, entry: ParamRecord) -> None:
        """No gradient is ever shown."""

    def _watch_sums(self, shard: Shard) -> None:
        me, there = weakref.ref(self), weakref.ref(shard)  # a cycle would keep masters and states

        def use(total: torch.Tensor, arrived: AbstractSet[int]) -> None:
            release, shard = me(), there()
            if release is not None and shard is not None:
                release._use(shard, total, arrived)

        shard.passing.on_sum = use

    # -- a round ---------------------------------------------------------------------------------------------------

    def close(self, params: Sequence[torch.nn.Parameter]) -> Outcome:
        """What the last backward did, once.

        Args:
            params: of all groups; their gradients are None from now on.

        Raises:
            ShardoptError: it did not end, or there are gradients that it did not bring.
        """
        self.check_whole()
        drop_gradients(params)
        outcome, self._outcome = self._outcome or NOTHING_DONE, None
        return outcome

    def check_whole(self) -> None:
        if self.is_open:
            self.abandon("backward ended before all gradients were reduced")
        check_unbroken(self._domain)
        super().check_whole()

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        self._round = None
        assert self._domain.reducer is not None
        # On any rank a bucket was updated only if it had left all of them.
        if self._domain.reducer.has_started:
            why = f"a backward with release_gradients=True, of which some buckets were used: {reason}"
            self._domain.break_off(why)

    def take_gradient(self, entry: ParamRecord) -> None:
        if not self.is_syncing:
            raise ShardoptError(
                f"{entry.name} got a gradient under no_sync(), or behind no forward of the module that was handed "
                "over, with release_gradients=True: it would have to be kept for a later backward. Run the module's "
                "own forward, or call optimizer.bind() before, and call backward() outside of no_sync(), once a step; "
                "or construct the optimizer without release_gradients."
            )
        super().take_gradient(entry)

    def open(self) -> None:
        if self._outcome is not None and not any(entry.param.requires_grad for entry in self._entries):
            return  # it runs through a frozen module, and adds nothing to the gradients that were used
        try:
            if self._outcome is not None:
                raise second_backward()
            check_unbroken(self._domain)
            self._round = self._prepare()
        except BaseException:
            assert self._domain.reducer is not None
            self._domain.reducer.leave()  # the other ranks need not wait for this one
            raise
        super().open()

    def _prepare(self) -> _Round:
        domain, (groups, defaults) = self._domain, self._begin()
        is_streaming = domain.device.type != "cpu" and domain.store.tier != "device"
        if not domain.store.is_final or is_streaming:
            raise ShardoptError(
                f"a backward began while masters and states are offloaded ({domain.store.tier}), with "
                "release_gradients=True: buckets are updated one by one, and updates from there belong together. Call "
                "reload() on every rank first."
            )
        numbers = [plain_numbers(group) for group in groups]
        check_numbers(numbers, defaults)
        places = {place.entry: place for place in placed(domain, groups)}
        for place in {place.group: place for place in places.values()}.values():  # before the first bucket is updated
            group, entry = numbers[place.group], place.entry
            domain.rule.evaluate(domain.rule.variant(group), group, entry.step + 1, entry.carried)
        written = [entry for entry in self._entries if entry.param._version != entry.version]
        with torch.no_grad():
            follow_written_params(domain)
        bits = {}
        if domain.mesh.world.size > 1:
            bits = {f"weights (sum of bits) of {entry.name}": checksum(entry.param) for entry in written}
        variants = [domain.rule.variant(group) for group in numbers]
        states = states_of_shards(domain, groups, numbers)
        sums = np.zeros((len(self._entries), COLUMNS), dtype=np.int64)
        return _Round(numbers, variants, places, states, written, bits, sums)

    def _use(self, shard: Shard, total: torch.Tensor, arrived: AbstractSet[int]) -> None:
        """The sum of a bucket is there: 1D, this rank's slice."""
        assert self._round is not None
        with torch.no_grad(), self._domain.clock.phase("update"):
            if not self._look_at(shard, total):
                return
            if self._domain.mesh.world.size > 1 and len(arrived) < len(shard.bucket.params):
                self._round.waiting[shard] = total
                return
            launches = self._launches(shard, total, arrived)
            self._round.updated |= bool(launches)
            update_early(self._domain, shard, self._round.states[shard], launches)
            # Also of params of which other ranks hold all: whoever still needs one meets the same error on all ranks.
            params = [shard.bucket.params[index] for index in arrived]
            places, entries = self._round.places, self._domain.entries
            torch.autograd.graph.increment_version([param for param in params if entries[param] in places])

    def _look_at(self, shard: Shard, total: torch.Tensor) -> bool:
        """Whether the sum may be used."""
        assert self._round is not None
        gradients = shard.tables.gradients_in(total)
        self._add_totals(self._round.sums, shard, format_of(total.dtype, "a gradient"), gradients)
        spoilt = self._round.sums[self._rows[shard], NONFINITE].any()
        return not spoilt or self._domain.options.tuning.nonfinite == "propagate"

    def _launches(self, shard: Shard, total: torch.Tensor, present: AbstractSet[int]) -> list[Launch]:
        """What updates the present params of a shard with their sum over ranks."""
        current, domain = self._round, self._domain
        assert current is not None
        divisor = domain.mesh.world.size
        if Factors(divisor).folded() is None:
            divide_(total, divisor)
            divisor = 1
        ready = {}
        for piece in shard.pieces:
            place = current.places.get(domain.entries[shard.bucket.params[piece.param]])
            if piece.param in present and place is not None:
                grad = total[piece.shard_start : piece.shard_end]
                ready[piece.param] = Ready(place.entry, place.group, grad, place.number, piece.start)
        scalars = scalars_of(domain, current.numbers, list(ready.values()))
        launches = launches_of(shard, current.variants, ready, scalars, domain.options.tuning.seed)
        return [replace(launch, divisor=divisor) for launch in launches]

    # -- its end ---------------------------------------------------------------------------------------------------

    def _sums(self) -> "np.ndarray[Any, Any]":
        assert self._round is not None
        return self._round.sums.copy()

    def _updated(self) -> bool:
        return self._round is not None and self._round.updated

    def _finish_round(self) -> None:
        reducer, current = self._domain.reducer, self._round
        assert reducer is not None and current is not None
        with self._domain.clock.phase("reduce"):
            report = self._report(self._reduce_rest())
        self._check_in_time(report)
        present = [entry for entry, is_there in zip(self._entries, report.present, strict=True) if is_there]
        if not present:  # on no rank: it was another module's backward, and no step
            reducer.end()
            self._round = None
            return
        nonfinite = int(report.nonfinite.sum())
        norm = math.inf if nonfinite else _norm(report)
        is_skipped = bool(nonfinite) and self._domain.options.tuning.nonfinite != "propagate"
        if is_skipped and report.updated:
            raise ShardoptError(
                f"{nonfinite} elements of the gradients are Inf or NaN{self._where(report)}, and buckets without any "
                "were updated before (release_gradients=True): some params took the step and others did not. "
                "Construct model and optimizer anew and load a checkpoint; "
                'Tuning(nonfinite="propagate") would go on as torch does, and without release_gradients '
                "such a step is skipped or refused as a whole."
            )
        if not is_skipped:
            self._close(current, present, norm)
        reducer.end()
        self._round = None
        for entry in present:
            entry.param.grad = ReleasedGradient(entry.name, entry.param)
        if is_skipped:
            self._keep_versions(current)
            skip(self._domain.options.tuning.nonfinite, nonfinite, self._where(report))
        self._outcome = Outcome(updated=not is_skipped, grad_norm=norm)

    def _keep_versions(self, current: _Round) -> None:
        """No update was made, but some versions moved. Of params that others wrote the next backward is told again."""
        for entry in self._entries:
            if entry not in current.written:
                entry.follow_param()

    def _check_in_time(self, report: Report) -> None:
        if report.late.any():
            name = self._entries[int(report.late.argmax())].name
            raise ShardoptError(
                f"another gradient of {name} arrived in a backward in which it had been used already "
                "(release_gradients=True): a reentrant activation checkpoint hands over the gradients of a param that "
                "is used elsewhere too one by one. Use checkpoint(..., use_reentrant=False), or construct the "
                "optimizer without release_gradients."
            )

    def _where(self, report: Report) -> str:
        return f" (first in {self._entries[int((report.nonfinite > 0).argmax())].name})"

    def _close(self, current: _Round, present: Sequence[ParamRecord], norm: float) -> None:
        """The rest of the step, together with all ranks."""
        domain, launches = self._domain, []
        indices = {shard: {entry.index for entry in present if entry.shard is shard} for shard in current.waiting}
        for shard, total in current.waiting.items():
            launches += self._launches(shard, total, indices[shard])
        places = [current.places[entry] for entry in present if entry in current.places]
        ready = [Ready(place.entry, place.group, torch.empty(0), place.number) for place in places]
        scalars = scalars_of(domain, current.numbers, ready)
        looked = GradientStats(norm=norm)
        seen = StepPlan(ready, launches, scalars, current.states, current.written, looked)
        view = view_of(domain, Call({}, Scaling(), closure=False, problem=None), current.numbers, seen)
        close_step(domain, seen, replace(view, consequence=_TOO_LATE), current.bits)


_TOO_LATE = (
    "and with release_gradients=True each rank's buckets were updated in backward, with its own. Start anew from a "
    "checkpoint"
)


def drop_gradients(params: Sequence[torch.nn.Parameter]) -> None:
    """Sets the gradients of these params to None.

    Raises:
        ShardoptError: one is there that no backward handed over, so that a step would leave it out. All are as before.
    """
    for param in params:
        if param.grad is not None and not isinstance(param.grad, ReleasedGradient):
            raise ShardoptError(
                f"a param of shape {tuple(param.shape)} has a gradient that no backward handed over: it was "
                "assigned by hand, or its backward began in a submodule before the first forward of the module, "
                "and with release_gradients=True a step would leave it out. Run forward and backward of the module "
                "that was handed over, or call optimizer.bind() before, or construct the optimizer without "
                "release_gradients."
            )
    for param in params:
        param.grad = None


def _norm(report: Report) -> float:
    """The 2-norm of all gradients."""
    # fsum rounds once, so that the order of params cannot show.
    return math.sqrt(math.fsum((norms_of_limbs(report.limbs) ** 2).tolist()))
