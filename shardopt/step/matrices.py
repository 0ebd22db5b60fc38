"""The update by a rule of whole matrices: each is made whole on one rank, once, between two passes over the shards.

::

    rank 0    accumulate ->|   elementwise rules   |-> function of matrices 0, 2 ->|-> apply
    rank 1    accumulate ->|   of other params     |-> function of matrices 1, 3 ->|-> apply
                    slices travel, bf16                            slices travel back, bf16

A step of one rank is the same, and nothing travels. Of a matrix that is cut over a tensor mesh the slice of each tensor
rank is made whole so, and then the matrix, see :mod:`.tensor_mates`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..domain.matrix_placement import MatrixPlacement, matrix_placement_of
from ..errors import CommunicationError, DisagreementError, RuleError
from ..kernels.tables import Factors
from ..partition.matrix_plan import MatrixPlan, MatrixSlice, PlannedMatrix, cost_of, owners_on_mesh, plan_matrices
from ..rules.choice import RuleChoice
from ..rules.matrix import STACK, MatrixRule, MatrixVariant, matrices_of
from .matrix_passes import applied_by_run
from .tensor_mates import PlacedMatrix, put_together

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..domain.shard import Shard
    from .launches import Launch, StepPlan
    from .param_update import ParamUpdate

# Runs launches over their shards. Where updates are given, 1D of each shard, they stand in place of the params.
RunLaunches = Callable[
    [Mapping["Shard", Sequence["Launch"]], Factors, "Mapping[Shard, torch.Tensor] | None"],
    None,
]
_OUT, _BACK = "sending slices of matrices to where they are made whole", "sending matrices back in slices"


class MatrixJob(NamedTuple):
    """The work on one of the plan's matrices, on its owner."""

    name: str  # of the param
    param: int  # its number, counted through all groups
    group: int  # number of its param group
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    matrices: Sequence[tuple[int, int]]  # their shapes, one below the other
    placement: MatrixPlacement | None = None  # shape and strides are of this rank's slice


class MatrixUpdate:
    """One step of the shards whose rule is one of whole matrices. The calls, in order: ``send``, ``finish``.

    Attributes:
        launches: of the first pass, by shard.
    """

    def __init__(self, plan: StepPlan, launches: Mapping[Shard, Sequence[Launch]], factors: Factors):
        self.launches, self._shards = launches, list(launches)
        self._step, self._factors = plan, factors
        self._transport = plan.domain.transport
        self._ranks = self._transport.ranks
        bucket_of = {shard: number for number, shard in enumerate(self._shards)}
        jobs = [job for each in plan.updates if each.entry.shard in launches for job in _jobs(plan, each, bucket_of)]
        self._jobs = [job for _, job in jobs]
        self._owners = _owners_of_placed(self._jobs, self._ranks.size)
        wanted = [
            each._replace(owner=self._owners[number][0]) if number in self._owners else each
            for number, (each, _) in enumerate(jobs)
        ]
        self._plan: MatrixPlan = plan_matrices(tuple(wanted), self._ranks.size)
        self._updates: dict[Shard, torch.Tensor] = {}  # 1D [shard_numel] bf16: of the first pass, then the function's
        self._received: list[torch.Tensor] = []  # by rank: its slices of the matrices of this one
        self._arrive: Callable[[], None] | None = None

    def send(self, run: RunLaunches, problem: Exception | None = None) -> Exception | None:
        """Collective: accumulates, and starts to send the updates. Returns the first error, of this rank or another.

        Args:
            problem: an earlier error of this rank.
        """
        own: list[torch.Tensor] = []
        if problem is None:
            try:
                self._accumulate(run)
                own = [self._packed_slices(owner) for owner in range(self._ranks.size)]
                self._received = self._room(own, lambda peer: self._plan.numel(peer, self._ranks.rank))
            except Exception as error:
                problem = error
        try:
            exchange = self._transport.all_to_all(_OUT)
            self._arrive = exchange.start(own, self._received, _OUT, failed=problem is not None)
        except (CommunicationError, DisagreementError) as error:
            problem = problem or error
        return problem

    def _accumulate(self, run: RunLaunches) -> None:
        # Where the kernel runs, which may be in host memory; the updates travel from where the params are.
        made = {
            shard: torch.empty(shard.numel, dtype=torch.bfloat16, device=shard.home.device) for shard in self.launches
        }
        run(self.launches, self._factors, made)
        self._updates = {shard: update.to(shard.device) for shard, update in made.items()}

    def finish(self, run: RunLaunches, problem: Exception | None) -> Exception | None:
        """Collective: makes each matrix whole, sends it back, applies. Returns the first error.

        Args:
            problem: an error of this rank since ``send``, or what ``send`` returned.
        """
        whole: dict[int, torch.Tensor] = {}
        try:
            if self._arrive is not None:
                with self._step.domain.clock.phase("gather"):
                    self._arrive()
            if problem is None:
                with self._step.domain.clock.phase("matrices"):
                    whole = self._made_whole()
        except Exception as error:
            problem = problem or error
        for group in self._groups:  # tensor mates, who wait for a rank with a problem too
            problem = put_together(self._step.domain, group, self._placed(group, whole), self._call, problem)
        if self._arrive is None:  # no rank could send
            return problem
        own: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        try:
            if problem is None:
                own = self._taken_apart(whole)
                others = self._room(own, lambda peer: self._plan.numel(self._ranks.rank, peer))
        except Exception as error:
            problem = error
        try:
            with self._step.domain.clock.phase("gather"):
                self._transport.all_to_all(_BACK).start(own, others, _BACK, failed=problem is not None)()
            if problem is None:
                self._unpack(others)
                run(self._second_pass(), Factors(), None)
        except Exception as error:
            problem = problem or error
        return problem

    # -- slices --------------------------------------------------------------------------------------------------------

    def _update_of(self, piece: MatrixSlice) -> torch.Tensor:
        return self._updates[self._shards[piece.bucket]][piece.in_shard]

    def _packed_slices(self, owner: int) -> torch.Tensor:
        """Returns this rank's slices of the matrices of ``owner``, one after the other."""
        return self._cat([self._update_of(piece) for piece in self._plan.slices(self._ranks.rank, owner)])

    def _cat(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(pieces)) if pieces else self._empty(0)

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=torch.bfloat16, device=self._step.domain.device)

    def _room(self, own: Sequence[torch.Tensor], numel: Callable[[int], int]) -> list[torch.Tensor]:
        """Returns memory for what each rank sends; this rank's own slices stay where they are."""
        rank = self._ranks.rank
        others = [own[rank] if peer == rank else self._empty(numel(peer)) for peer in range(self._ranks.size)]
        self._transport.traffic.matrices += sum(each.nbytes for peer, each in enumerate(others) if peer != rank)
        return others

    def _unpack(self, others: Sequence[torch.Tensor]) -> None:
        for owner, packed in enumerate(others):
            pieces = self._plan.slices(self._ranks.rank, owner)
            for piece, values in zip(pieces, packed.split([each.numel for each in pieces]), strict=True):
                self._update_of(piece).copy_(values)

    # -- whole matrices ------------------------------------------------------------------------------------------------

    def _made_whole(self) -> dict[int, torch.Tensor]:
        """Puts the slices of each matrix of this rank together, 1D, and calls its function unless it is cut."""
        rank = self._ranks.rank
        whole = {number: self._empty(self._plan.matrices[number].numel) for number in self._plan.owned(rank)}
        for peer, packed in enumerate(self._received):
            pieces = self._plan.slices(peer, rank)
            for piece, values in zip(pieces, packed.split([each.numel for each in pieces]), strict=True):
                whole[piece.matrix][piece.in_matrix].copy_(values)
        self._received = []
        for number, flat in whole.items():
            job = self._jobs[number]
            if job.placement is None:
                self._call(number, flat.as_strided(job.shape, job.strides))
        return whole

    def _taken_apart(self, whole: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Returns for each rank its slices of the results."""
        return [
            self._cat([whole[piece.matrix][piece.in_matrix] for piece in self._plan.slices(peer, self._ranks.rank)])
            for peer in range(self._ranks.size)
        ]

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        return list(dict.fromkeys(job.placement.group for job in self._jobs if job.placement is not None))

    def _placed(self, group: dist.ProcessGroup, whole: Mapping[int, torch.Tensor]) -> dict[int, PlacedMatrix]:
        """Returns the matrices that this rank and its tensor mates put together."""
        found: dict[int, PlacedMatrix] = {}
        for number, flat in whole.items():
            job = self._jobs[number]
            if job.placement is not None and job.placement.group == group:
                own = flat.as_strided(job.shape, job.strides)
                found[number] = PlacedMatrix(job.param, job.placement, own, self._owners[number][1])
        return found

    def _call(self, number: int, whole: torch.Tensor) -> None:
        """Puts the function's results in place of the updates of one job."""
        job = self._jobs[number]
        group = self._step.numbers[job.group]
        rule = self._step.domain.rule.of(group)
        assert isinstance(rule, MatrixRule)
        for update in whole if whole.ndim == 3 else whole.split([rows for rows, _ in job.matrices]):
            made = rule.matrix(update, group)
            if not isinstance(made, torch.Tensor) or made.shape != update.shape:
                found = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
                raise RuleError(
                    f"return a tensor of shape {tuple(update.shape)}, that of the update, from {rule.name!r}: it "
                    f"returned {found} for {job.name}, which no slice of the param can be updated with."
                )
            if made.untyped_storage().data_ptr() == update.untyped_storage().data_ptr():
                made = made.clone()  # perhaps the update's own elements in another order
            update.copy_(made)

    # -- the second pass -----------------------------------------------------------------------------------------------

    def _second_pass(self) -> dict[Shard, list[Launch]]:
        return {
            shard: [applied for launch in launches for applied in self._applied(shard, launch)]
            for shard, launches in self.launches.items()
        }

    def _applied(self, shard: Shard, launch: Launch) -> Iterator[Launch]:
        """Yields the launches that apply what the function made, which they take for gradients."""
        assert launch.apply is not None
        pieces = {row: shard.pieces[row] for row in launch.updates}
        grads = {row: (self._updates[shard][piece.local], piece.start) for row, piece in pieces.items()}
        updates = {
            row: each._replace(
                grad=grads[row][0], start=grads[row][1], gradient_slice=None, divisor=1, is_on_host=False
            )
            for row, each in launch.updates.items()
        }
        gradients = shard.tables.gradients(grads)
        for blocks, scalars in applied_by_run(shard, launch.apply, launch.runs):
            yield replace(
                launch,
                spec=launch.apply.spec,
                number=0,
                scalars=scalars,
                noise=launch.apply.noise,
                gradients=gradients,
                updates=updates,
                divisor=1,
                is_on_host=False,
                apply=None,
                runs={},
                blocks=blocks,
            )


def split_matrices(
    plan: StepPlan, launches: Mapping[Shard, Sequence[Launch]], factors: Factors
) -> tuple[MatrixUpdate | None, dict[Shard, Sequence[Launch]]]:
    """Parts the shards whose rule is one of whole matrices from the others; None: there are none."""
    if not isinstance(plan.domain.rule, MatrixRule | RuleChoice):
        return None, dict(launches)
    kinds = [isinstance(plan.domain.rule.variant(group), MatrixVariant) for group in plan.numbers]
    shards = {each.entry.shard for each in plan.updates if kinds[each.group]} if any(kinds) else set()
    if not shards:
        return None, dict(launches)
    matrices = {shard: its for shard, its in launches.items() if shard in shards}
    return MatrixUpdate(plan, matrices, factors), {shard: its for shard, its in launches.items() if shard not in shards}


def _owners_of_placed(jobs: Sequence[MatrixJob], num_data: int) -> dict[int, tuple[int, int]]:
    """Returns the owner of each job that is cut: its numbers among the data-parallel and the tensor ranks."""
    by_group: dict[dist.ProcessGroup, dict[int, MatrixPlacement]] = {}
    for number, job in enumerate(jobs):
        if job.placement is not None:
            by_group.setdefault(job.placement.group, {})[number] = job.placement
    owners: dict[int, tuple[int, int]] = {}
    for placed in by_group.values():
        costs = tuple(sum(cost_of(*each) for each in jobs[number].matrices) for number in placed)
        held = tuple(tuple(map(each.numel, range(len(each.sizes)))) for each in placed.values())
        owners.update(zip(placed, owners_on_mesh(costs, held, num_data), strict=True))
    return owners


def _jobs(
    plan: StepPlan, update: ParamUpdate, bucket_of: Mapping[Shard, int]
) -> Iterator[tuple[PlannedMatrix, MatrixJob]]:
    """Yields the matrices of one param: each apart where its elements lie together, else all of them as one."""
    number = update.number % 2**32
    entry, matrices = update.entry, plan.numbers[update.group].get("matrices")
    shard, shape = entry.shard, tuple(entry.param.shape)
    layout, strides = shard.bucket.layout, shard.strides(entry.index)
    offset, bucket = layout.offsets[entry.index], bucket_of[shard]
    placement = matrix_placement_of(entry.outer, is_stack=matrices == STACK)
    if 0 in (shape if placement is None else placement.shape):
        return
    shapes = matrices_of(shape if placement is None else placement.shape, matrices)
    if placement is not None:
        own = PlannedMatrix(bucket, offset, shape[-2], shape[-1], layout.shard_numel, math.prod(shape[:-2]))
        yield own, MatrixJob(entry.name, number, update.group, shape, strides, shapes, placement)
        return
    rows, columns = shapes[0]
    if strides[-2:] != (columns, 1) or (len(shape) == 3 and strides[0] != rows * columns):
        work = sum(cost_of(*each) for each in shapes)
        whole = PlannedMatrix(bucket, offset, math.prod(shape[:-1]), columns, layout.shard_numel, work=work)
        yield whole, MatrixJob(entry.name, number, update.group, shape, strides, shapes)
        return
    for rows, columns in shapes:
        each = PlannedMatrix(bucket, offset, rows, columns, layout.shard_numel)
        yield each, MatrixJob(entry.name, number, update.group, (rows, columns), (columns, 1), [(rows, columns)])
        offset += rows * columns
