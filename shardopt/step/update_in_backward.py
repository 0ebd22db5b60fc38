"""Released gradients: a bucket is updated in backward, as soon as it is reduced, and its gradients are gone.

::

    backward   fill 0   fill 1   fill 2     end
    reducer             sum 0    sum 1      sum 2
    update               |  0     |  1       |  2   report, agree, gather, commit
    live       [0]      [0 1]    [1 2]      [2]     no gradient is left

Backwards under ``no_sync()`` accumulate in ``param.grad``; the last one reduces what they left, and updates. Whatever a
step decides with all gradients at hand (clipping, loss scaling) cannot be decided here, and is refused. When backward
returns, all ranks have taken the step; ``step()`` returns its outcome and lets the next one begin. An error in the
middle of a backward leaves some buckets updated and others not, and other ones on each rank: the domain is broken then.

An update writes to params while backward goes on. Autograd accumulates the gradient of a param after all that used the
param has run backward, so no node reads it any more. A graph that was given ``param.detach()`` still reads it: it
finds a later version, which is autograd's own error. An activation checkpoint is not caught: it runs its forward
again in backward, with what the param is by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import agree, checksum
from ..domain.hyperparameters import check_numbers, plain_numbers
from ..domain.masters import follow_written_params
from ..domain.param import Group, ParamRecord
from ..errors import BindingError, ShardoptError
from ..kernels.formats import format_of
from ..kernels.reductions import NONFINITE
from ..kernels.tables import Factors
from ..partition.comm.group import Ranks
from ..partition.comm.together import Relay
from ..tensors.gradient_slice import divide_
from ..tensors.released_gradient import ReleasedGradient, second_backward
from .decide import clip_factor, found_in, report_skip
from .launches import Launch, StepPlan
from .step import NOTHING_DONE, Call, Outcome, check_unbroken, commit, digest_of
from .survey import Plans, plan_ahead, plan_of_present, written_params
from .update import Update, update_and_gather

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.shard import Shard
    from ..module.gradient_report import Report
    from ..module.gradient_totals import GradientTotals
    from ..module.round_gradients import RoundGradients
    from .frozen_step import FrozenStep


@dataclass
class _OpenStep:
    """The step that a backward takes: what it updates with, as of its beginning, and the updates that it has made."""

    groups: Sequence[Group]
    numbers: list[dict[str, Any]]  # hyper-parameters of each group
    plans: Plans
    frozen: FrozenStep  # the plan, whose gradients come bucket by bucket
    whole: Sequence[Ranks]  # see run_step()
    written: list[ParamRecord]  # params that others wrote since the last step
    bits: dict[str, int]  # sums of the bits of these weights, to be compared between ranks
    factors: Factors  # of every gradient
    # Sums of buckets that are updated at the end. Of most of them not all gradients came on this rank: other ranks may
    # have had the rest.
    waiting: dict[Shard, torch.Tensor] = field(default_factory=dict)
    # For each bucket that was updated: whether its sum held an Inf or NaN, 0D bool on its device. The launch then left
    # the bucket unchanged. The host does not decide that: it would wait for the device in mid-backward.
    spoilt: list[torch.Tensor] = field(default_factory=list)
    is_told: bool = False  # another rank may know that all of this rank's updates are on its disk


Begin = Callable[[], tuple[Sequence[Group], Mapping[str, Any], Sequence[Ranks], Plans]]


class UpdateInBackward:
    """Updates with each sum of gradients as soon as it is complete: all of a step is taken within backward.

    The rounds call it (``module/rounds.py``): :meth:`begin`, :meth:`take_sum` for each bucket, :meth:`take_step`.
    """

    def __init__(self, domain: Domain, begin: Begin, took_step: Callable[[float], None]):
        """
        Args:
            begin: called when a backward begins to update; returns the param groups and their defaults, the ranks
                over which the whole model decides (empty: over the domain's alone), and the plans of the steps.
            took_step: takes the norm of the gradients of a step, once all ranks have taken it.

        Raises:
            BindingError: gradients are summed in two directions of a mesh.
        """
        if domain.mesh.is_hybrid:
            raise BindingError(
                "give a process group or a mesh of one dimension, or omit release_gradients: with a 2D DeviceMesh the "
                "sum over the copies of a shard is known only once all buckets are reduced, so that none could be "
                "released before."
            )
        self._domain, self._begin, self._took_step = domain, begin, took_step
        self._round: _OpenStep | None = None
        self._outcome: Outcome | None = None  # of a backward that no step() has followed yet

    # -- a round ---------------------------------------------------------------------------------------------------

    def finish_step(self, params: Sequence[torch.nn.Parameter]) -> Outcome:
        """Returns what the last backward did, once.

        Args:
            params: of all groups; their gradients are None from now on.

        Raises:
            ShardoptError: there are gradients that the backward did not bring.
        """
        drop_gradients(params)
        outcome, self._outcome = self._outcome or NOTHING_DONE, None
        return outcome

    def check(self) -> None:
        """Raises ShardoptError if a round was lost that had updated something."""
        check_unbroken(self._domain)

    def check_unused(self) -> None:
        """Raises ShardoptError if the gradients of this step were used already."""
        if self._outcome is not None:
            raise second_backward()

    def abandon(self, reason: str, has_started: bool) -> None:
        """Undoes what the lost round has updated, or marks the domain as broken.

        Args:
            has_started: a reduction of the round was started on this rank.
        """
        current, self._round = self._round, None
        # A bucket was updated on any rank only if all ranks had sent theirs.
        if has_started and not (current is not None and self._undo(current)):
            why = f"in a backward with release_gradients=True that had updated some buckets: {reason}"
            self._domain.mark_broken(why)

    def begin(self, in_backward: bool) -> bool:
        """Begins the step of a round that is about to open. Returns False if none opens: backward has used all."""
        # A backward that runs through a frozen module adds nothing to the gradients that were used.
        adds = in_backward and any(entry.param.requires_grad for entry in self._entries)
        if self._outcome is not None and not adds:
            return False
        try:
            self.check_unused()
            check_unbroken(self._domain)
            self._round = self._prepare()
        except BaseException:
            reducer = self._domain.reducer
            assert reducer is not None
            reducer.abandon_round()  # the other ranks need not wait for this one
            raise
        return True

    @property
    def _entries(self) -> list[ParamRecord]:
        return list(self._domain.entries.values())

    def _undo(self, current: _OpenStep) -> bool:
        """Undoes the updates of this backward. Returns False if that cannot be: they hold as soon as they are made.

        On a disk they hold once all ranks have said that theirs are there, and no rank has said so before its backward
        has ended.
        """
        if self._domain.store.is_final or current.is_told:
            return False
        with torch.no_grad():
            for store in self._domain.stores:
                if store.is_open:
                    store.roll_back()
        self._keep_versions(current)
        return True

    def _prepare(self) -> _OpenStep:
        domain, (groups, defaults, whole, plans) = self._domain, self._begin()
        if domain.device.type != "cpu" and any(shard.home.updates_on_host for shard in domain.shards):
            raise ShardoptError(
                "call reload() on every rank before a backward with release_gradients=True: masters and states are "
                f"offloaded ({domain.store.tier}) to where the CPU updates them, and the backward on {domain.device} "
                "would wait for it, bucket after bucket."
            )
        numbers = [plain_numbers(group) for group in groups]
        check_numbers(numbers, defaults)
        written = written_params(domain)
        with torch.no_grad():
            follow_written_params(domain)
        bits = {}
        if domain.mesh.world.size > 1:
            copied = [entry for entry in written if entry.shard.gathered is None]  # see _compare_written()
            bits = {f"weights (sum of bits) of {entry.name}": checksum(entry.param) for entry in copied}
        factors = Factors(clip=clip_factor(domain.options, None, numbers))
        frozen = plan_ahead(plans, domain, groups, numbers)
        return _OpenStep(groups, numbers, plans, frozen, whole, written, bits, factors)

    def take_sum(self, shard: Shard, total: torch.Tensor, arrived: AbstractSet[int], totals: GradientTotals) -> None:
        """Updates with the sum of a bucket, once it is complete.

        Args:
            total: 1D, this rank's slice of the sum.
            arrived: indices of the params whose gradients came on this rank.
            totals: of all sums of the round.
        """
        current, domain = self._round, self._domain
        assert current is not None
        with torch.no_grad(), domain.clock.phase("update"):
            is_spoilt = self._measure(shard, total, totals)
            # Of states that stay in memory beside a disk updates hold at once, and follow the vote.
            is_after_vote = not domain.store.is_final and shard.store is not domain.store
            if is_after_vote or (domain.mesh.world.size > 1 and len(arrived) < len(shard.bucket.params)):
                current.waiting[shard] = total
                return
            launches = self._launches(shard, total, arrived)
            if launches:
                current.spoilt.append(is_spoilt)
            masked = [replace(each, gradients=each.gradients.unless(is_spoilt)) for each in launches]
            self._update_shard(shard, masked)
            # Also of params of which other ranks hold all: a graph that still needs one then raises the same error on
            # all ranks.
            params = [shard.bucket.params[index] for index in arrived]
            torch.autograd.graph.increment_version(
                [param for param in params if domain.entries[param] in current.frozen.awaited]
            )

    def _measure(self, shard: Shard, total: torch.Tensor, totals: GradientTotals) -> torch.Tensor:
        """Measures a sum. Returns whether it holds an Inf or NaN that must not reach params: 0D bool."""
        grad, world = format_of(total.dtype, "a gradient"), self._domain.mesh.world
        found = totals.measure(shard, grad, shard.tables.gradients_in(total), world.size)
        if found is None or self._domain.options.tuning.nonfinite == "propagate":
            return torch.zeros((), dtype=torch.bool, device=total.device)
        return found[:, NONFINITE].any()

    def _launches(self, shard: Shard, total: torch.Tensor, present: AbstractSet[int]) -> list[Launch]:
        """Makes the launches that update the present params of a shard with their sum over ranks."""
        current, domain = self._round, self._domain
        assert current is not None
        divisor = domain.mesh.world.size
        if Factors(divisor).folded() is None:
            divide_(total, divisor)
            divisor = 1
        entries = {index: domain.entries[shard.bucket.params[index]] for index in present}
        if not current.frozen.awaits_all(entries.values()):
            current.frozen = plan_ahead(current.plans, domain, current.groups, current.numbers, all_anew=True)
        updates = {}
        for piece in shard.pieces:
            update = current.frozen.awaited.get(entries[piece.param]) if piece.param in entries else None
            if update is not None:
                grad = total[piece.shard_start : piece.shard_end]
                updates[piece.param] = update._replace(grad=grad, start=piece.start, divisor=divisor)
        return current.frozen.launches_of(shard, updates)

    def _update_shard(self, shard: Shard, launches: list[Launch]) -> None:
        """Phase 5 of one shard, in memory, ahead of the rest of its step."""
        assert self._round is not None
        if launches:
            self._domain.epoch.begin_step()
        domain, frozen = self._domain, self._round.frozen
        plan = StepPlan(domain, states=frozen.states, program=frozen.program)
        for store in () if domain.store.is_final else domain.stores:
            if not store.is_open:
                store.begin()
        relay = Relay()
        Update(plan, {shard: launches}, self._round.factors, joins=False).run(relay)
        relay.check()

    # -- its end ---------------------------------------------------------------------------------------------------

    def fill(self, report: Report, vector: torch.Tensor) -> None:
        """Tells in the report, which may travel from a device as ``vector``, whether a bucket was updated."""
        assert self._round is not None
        if self._round.spoilt:
            report.mark_updated(vector, ~torch.stack(self._round.spoilt).all())

    def take_step(self, gradients: RoundGradients, problem: Exception | None) -> None:
        """Collective: ends the round, and with it the step.

        Args:
            problem: why this rank's sums are no good.
        """
        reducer, current = gradients.reducer, self._round
        assert current is not None
        relay = Relay()
        report = relay.attempt(self._last_report, gradients, problem)
        found = relay.meet(partial(found_in, self._domain, self._entries, report, current.whole))
        relay.check()
        assert report is not None and found is not None
        present = [entry for entry, is_there in zip(self._entries, report.counts[0], strict=True) if is_there]
        if not present:  # on no rank: it was another module's backward, and no step
            reducer.end_round()
            self._round = None
            return
        nonfinite, norm = found.nonfinite, math.inf if found.nonfinite else found.norm
        is_skipped = bool(nonfinite) and self._domain.options.tuning.nonfinite != "propagate"
        if is_skipped and found.updated and self._domain.store.is_final:
            raise ShardoptError(
                "construct model and optimizer anew and load a checkpoint, without release_gradients or with states on "
                'a disk (such a step is then skipped or refused as a whole) or with Tuning(nonfinite="propagate"), '
                f"which goes on as torch does: {nonfinite} elements of the gradients are Inf or NaN"
                f"{self._where(report)}, and buckets without any were updated before, so some params took the step and "
                "others did not."
            )
        if not is_skipped:
            self._finish_step(current, present, norm)
        reducer.end_round()
        self._round = None
        for entry in present:
            entry.outer.grad = ReleasedGradient(entry.name, entry.outer)
        if is_skipped:
            if not self._undo(current):
                self._keep_versions(current)
            report_skip(self._domain.options.tuning.nonfinite, nonfinite, self._where(report))
        self._outcome = not is_skipped, norm

    def _last_report(self, gradients: RoundGradients, problem: Exception | None) -> Report:
        with self._domain.clock.phase("reduce"):
            report = gradients.report(problem)
        if report.late:
            name = self._entries[report.late[0]].name
            raise ShardoptError(
                "use checkpoint(..., use_reentrant=False), or construct the optimizer without release_gradients: "
                f"another gradient of {name} arrived in a backward in which it had been used already. A reentrant "
                "activation checkpoint hands over the gradients of a param that is used elsewhere too one by one."
            )
        return report

    def _keep_versions(self, current: _OpenStep) -> None:
        """Records the present versions, as no update holds. The next backward finds written params again."""
        self._domain.epoch.cancel_step()
        for entry in self._entries:
            if entry not in current.written:
                entry.follow_param()
            if entry.shard.exact_slice is not None:  # its launches ran, and wrote nothing
                entry.shard.exact_slice.is_ahead = False

    def _where(self, report: Report) -> str:
        found = report.nonfinite > 0  # the element may be another tensor-parallel rank's
        return f" (first in {self._entries[int(found.argmax())].name})" if found.any() else ""

    def _finish_step(self, current: _OpenStep, present: Sequence[ParamRecord], norm: float) -> None:
        """Collective: the rest of the step."""
        domain, launches = self._domain, list[Launch]()
        indices = {shard: {entry.index for entry in present if entry.shard is shard} for shard in current.waiting}
        for shard, total in current.waiting.items():
            launches += self._launches(shard, total, indices[shard])
        plan = plan_of_present(current.plans, domain, current.groups, current.numbers, present)
        plan.launches, plan.written, plan.norm = launches, current.written, norm
        digest = replace(digest_of(plan, Call({})), consequence=_TOO_LATE)
        with domain.clock.phase("agree"):
            consensus = agree(digest, domain.mesh.world)
            if consensus.written and domain.mesh.world.size > 1:
                agree(replace(digest, key=current.bits, describe=lambda: dict(current.bits)), domain.mesh.world)
        domain.count_step()
        current.is_told = True
        undone = update_and_gather([plan], current.factors)
        if undone is not None:  # no rank keeps any
            current.is_told = False
            raise undone
        commit(plan, current.plans)
        self._took_step(norm)


_TOO_LATE = (
    "and with release_gradients=True each rank's buckets were updated in backward, with its own. Start anew from a "
    "checkpoint"
)


def drop_gradients(params: Sequence[torch.nn.Parameter]) -> None:
    """Sets the gradients of these params to None.

    Raises:
        ShardoptError: no backward handed over one of them, so that a step would omit it. All are as before.
    """
    for param in params:
        if param.grad is not None and not isinstance(param.grad, ReleasedGradient):
            raise ShardoptError(
                "run the last backward before step() outside of no_sync(), through the module that was handed over, "
                f"or call reduce_gradients(): a param of shape {tuple(param.shape)} has a gradient that no backward "
                "handed over. It was accumulated under no_sync() or assigned by hand, or its backward began in a "
                "submodule before the first forward of the module, and a step would omit it."
            )
    for param in params:
        param.grad = None
