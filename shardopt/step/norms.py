"""The passes of a rule that looks at whole params, up to the last one: what they measure is known on all ranks then.

::

    shards      | pass 0 | pass 0 | pass 0 |            | pass 1, the last one: an update like any other
    totals      |  1 row a param           |            |
    all ranks                              | one sum    |
    mesh                                   | one more   |           of slices of DTensors, in each dimension of the mesh
    scalars                                  norms  --> |

Each pass goes over all shards, as an update does, and takes exact sums of what the rule takes norms of. One all-reduce
joins the sums of all params, whatever number of norms; the results are columns of the next pass's scalars. The ranks
of a tensor mesh hold slices of one param, each with data-parallel ranks of its own. So what these have added up is
added up once more, along each dimension of the mesh in which the param is cut; ranks that hold copies do not meet. Sums
are those of integers (``kernels/reductions.py``): a norm has the same bits at every stage, on every number of ranks and
with every size of buckets and chunks. Blocks are those of a slice, so another mesh may change its last bits.

A pass writes states before all ranks have met: an error on one rank, or of the collective, ends the training, but for
states on a disk, whose writes are taken back on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import CommunicationError
from ..kernels.reductions import COLUMNS, LARGEST, LIMBS, NONFINITE, squares_of_limbs
from ..kernels.tables import read_together
from ..module.gradient_report import Report, ReportLayout
from ..partition.comm.together import riding_on
from ..rules.passes import passes_of
from .params import ParamUpdate, Variants

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..partition.comm.together import Relay
    from .launches import Launch

    Array = np.ndarray[Any, Any]

_ADDING_UP = "adding up what a rule takes norms of"


class NormSums:
    """Where the sums of a step's params lie in the messages that add them up; frozen with the step's plan.

    Attributes:
        cuts: how many times the ranks must meet before the last pass; the same on all ranks.
    """

    def __init__(self, domain: Domain, numbers: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]):
        self._domain = domain
        variant_of = Variants(domain.rule, numbers)
        variants = {variant_of(each.group, each.entry.shape) for each in updates}
        self._passes = [passes_of(each) for each in variants if each.reductions]
        self.cuts = max((len(each) - 1 for each in self._passes), default=0)
        if not self.cuts:
            return
        self._entries = [each.entry for each in updates]
        self._numbers = {entry: number for number, entry in enumerate(self._entries)}
        self._numels = [math.prod(entry.shape) for entry in self._entries]
        self._passes_of_cut = {  # a param that is cut over a tensor mesh -> passes of its rule
            each.entry: passes_of(variant_of(each.group, each.entry.shape))
            for each in updates
            if each.entry.param in domain.cut_over
        }
        params = [(entry.shard.bucket.layout, entry.index) for entry in self._entries]
        self._layout = ReportLayout(params, domain.mesh.shard.rank, domain.mesh.world.size)

    def add_up(self, number: int, ran: Sequence[Launch], relay: Relay) -> None:
        """Collective: adds up what a pass measured on all ranks, and fills the results into the scalars.

        Args:
            ran: the launches of this rank, see :func:`launch_of_pass`.
            relay: has the reason why this rank's sums are missing, if they are.

        Raises:
            Exception: this rank's; CommunicationError on the other ranks.
        """
        slots = max(len(each[number].measured) for each in self._passes if number < len(each) - 1)
        reports = [Report(self._layout) for _ in range(slots)]
        relay.attempt(self._measure, ran, reports)
        totals = relay.meet(riding_on(lambda failed: self._exchange(number, reports, failed)))
        relay.check()
        assert totals is not None
        self._fill(ran, totals)

    def _measure(self, ran: Sequence[Launch], reports: Sequence[Report]) -> None:
        mesh, sums = self._domain.mesh, self._sums(ran, len(reports))
        if mesh.world.rank in mesh.one_copy:  # replicas of a shard hold the same sums, which count once
            for report, each in zip(reports, sums, strict=True):
                report.fill_sums(each)

    def _exchange(self, number: int, reports: Sequence[Report], has_failed: bool) -> Array:
        """Collective: returns the totals of whole params, 3D [slots, params, COLUMNS] int64."""
        world = self._domain.mesh.world
        if has_failed:
            reports[0].mark_failed(world.rank)
        joined = torch.cat([each.vector for each in reports])
        world.all_reduce(joined, _ADDING_UP)
        for report, vector in zip(reports, joined.split(len(reports[0].vector)), strict=True):
            report.vector.copy_(vector)
        failed = [f"rank {rank}" for rank in reports[0].failed]
        totals = np.stack([each.totals for each in reports])
        if self._join_slices(number, totals, bool(failed)):
            failed.append("the other ranks of the tensor mesh")
        if failed:
            raise CommunicationError(
                f"look at the output of {failed[0]} for an error: a rank could not compute what the rule takes norms "
                "of, so no rank knows the norms and none can finish this step."
            )
        return totals

    def _join_slices(self, number: int, totals: Array, failed: bool) -> bool:
        """Collective over tensor meshes: makes totals of slices those of whole params, in place.

        Args:
            totals: 3D [slots, params, COLUMNS] int64, which the ranks that hold the same slices have added up.
            failed: some of these ranks could not measure.

        Returns:
            True if some rank could not measure.
        """
        measured = {entry: len(its[number].measured) for entry, its in self._passes_of_cut.items() if its[number + 1 :]}
        for ranks, entries in self._domain.by_mesh(measured).items():
            # Slots of these params alone: of others, some of these ranks may have none.
            slots, numbers = slice(max(measured.values())), [self._numbers[entry] for entry in entries]
            own = totals[slots, numbers]
            # A sum does not keep a maximum: each rank has a column of its own for the largest magnitude.
            largest = np.zeros((*own.shape[:2], ranks.size), np.int64)
            largest[:, :, ranks.rank] = own[:, :, LARGEST]
            sent = np.concatenate([own, largest], axis=2)
            message = torch.from_numpy(np.append(sent.reshape(-1), failed))
            ranks.all_reduce(message, _ADDING_UP)
            failed = bool(message[-1])
            found = message[:-1].numpy().reshape(sent.shape)
            found[:, :, LARGEST] = found[:, :, COLUMNS:].max(axis=2)
            totals[slots, numbers] = found[:, :, :COLUMNS]
        return failed

    def _sums(self, ran: Sequence[Launch], slots: int) -> Array:
        """Returns the totals of this rank's elements: 3D [slots, params, COLUMNS] int64."""
        sums = np.zeros((slots, len(self._entries), COLUMNS), np.int64)
        measuring = [(launch, launch.totals) for launch in ran if launch.totals is not None]
        world = self._domain.mesh.world
        found = read_together([totals for _, totals in measuring], lambda there: world.read(there, _ADDING_UP))
        for (launch, _), totals in zip(measuring, found, strict=True):
            rows, numbers = self._rows(launch)
            sums[: len(totals), numbers] = totals.numpy()[:, rows]
        return sums

    def _rows(self, launch: Launch) -> tuple[list[int], list[int]]:
        """Returns the rows of a launch that are updated, and the numbers of their params."""
        return list(launch.updates), [self._numbers[each.entry] for each in launch.updates.values()]

    def _fill(self, ran: Sequence[Launch], totals: Array) -> None:
        results = [results_of(of_slot, self._numels) for of_slot in totals]
        for launch in ran:
            rows, numbers = self._rows(launch)
            table, part = launch.scalars.numpy(), launch.part
            with np.errstate(over="ignore"):  # a norm beyond fp32 is infinite there
                for result, word, column in zip(results, part.words, part.results, strict=False):
                    table[rows, column] = result[word][numbers].astype(np.float32)


def launch_of_pass(launch: Launch, number: int) -> Launch:
    """Returns the launch of an earlier pass; the results of what it measures go into the same table of scalars."""
    shape = (len(launch.spec.passes[number].measured), launch.shard.tables.num_rows, COLUMNS)
    totals = torch.zeros(shape, dtype=torch.int64, device=launch.shard.home.device)
    return replace(launch, number=number, totals=totals if shape[0] else None)


def results_of(totals: Array, numels: Sequence[int] | Array) -> dict[str, Array]:
    """Returns what each word gives of one measured value of each param: 1D [params] float64, a NaN where it is none.

    Args:
        totals: 2D [params, COLUMNS] int64, of all elements.
    """
    largest, is_bad = totals[:, LARGEST].astype(np.int32).view(np.float32), totals[:, NONFINITE] > 0
    squares = np.where(is_bad, np.nan, squares_of_limbs(totals[:, :LIMBS]))
    top = np.where(is_bad, np.nan, largest.astype(np.float64))
    return {"norm": np.sqrt(squares), "mean_square": squares / np.maximum(numels, 1), "max_abs": top}
