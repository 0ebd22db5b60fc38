"""The update by a rule of whole matrices: each is made whole on one rank, once, between two passes over the shards.

::

    rank 0    accumulate ->|   elementwise rules   |-> function of matrices 0, 2 ->|-> apply
    rank 1    accumulate ->|   of other params     |-> function of matrices 1, 3 ->|-> apply
                    slices travel, bf16                            slices travel back, bf16

A step of one rank is the same, and nothing travels. Of a matrix that is cut over a tensor mesh the slice of each tensor
rank is made whole so, and then the matrix, see :mod:`.tensor_mates`.

A rank that fails on the way keeps its error in a relay, and tells it wherever others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..domain.matrix_placement import MatrixPlacement, matrix_placement_of
from ..errors import RuleError
from ..kernels.tables import BLOCK
from ..partition.comm.together import riding_on
from ..partition.matrix_plan import MatrixPlan, MatrixSlice, PlannedMatrix, cost_of, owners_on_mesh, plan_matrices
from ..rules.matrix import STACK, MatrixRule, matrices_of
from .params import ParamUpdate, Variants
from .tensor_mates import PlacedMatrix, put_together

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..domain.domain import Domain
    from ..domain.shard import Shard
    from ..partition.comm.together import Relay
    from ..rules.matrix import MatrixScalars
    from .launches import Launch, StepPlan

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


class MatrixWork:
    """Which matrices a step updates, and which rank makes each of them whole; frozen with the step's plan.

    Attributes:
        shards: those whose rule is one of whole matrices, in the order of their updates; the same on all ranks.
    """

    def __init__(self, domain: Domain, numbers: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]):
        variant_of = Variants(domain.rule, numbers)
        kinds = [variant_of(group).around is not None for group in range(len(numbers))]
        present = {each.entry.shard for each in updates if kinds[each.group]} if any(kinds) else set()
        self.shards = [shard for shard in reversed(domain.shards) if shard in present]
        if not self.shards:
            return
        bucket_of = {shard: number for number, shard in enumerate(self.shards)}
        found = [job for each in updates if each.entry.shard in bucket_of for job in _jobs(numbers, each, bucket_of)]
        size = domain.transport.ranks.size
        self.jobs = [job for _, job in found]
        self.owners = _owners_of_placed(self.jobs, size)
        wanted = [
            each._replace(owner=self.owners[number][0]) if number in self.owners else each
            for number, (each, _) in enumerate(found)
        ]
        self.plan: MatrixPlan = plan_matrices(tuple(wanted), size)


class MatrixUpdate:
    """One step of the shards whose rule is one of whole matrices. The calls, in order: see :mod:`.program`.

    Attributes:
        made: 1D [shard_numel] bf16 of each shard, where kernels run: what the first pass writes.
    """

    def __init__(self, work: MatrixWork, plan: StepPlan):
        self._step = plan
        self._transport = plan.domain.transport
        self._ranks = self._transport.ranks
        self._shards, self._jobs, self._owners, self._plan = work.shards, work.jobs, work.owners, work.plan
        self.made: dict[Shard, torch.Tensor] = {}
        self._updates: dict[Shard, torch.Tensor] = {}  # where params are: of the first pass, then the function's
        self._own: list[torch.Tensor] = []  # by rank: what this one sends it
        self._received: list[torch.Tensor] = []  # by rank: its slices of the matrices of this one
        self._whole: dict[int, torch.Tensor] = {}
        self._arrive: Callable[[], None] | None = None

    def make_room(self) -> None:
        """Makes memory for the updates of the first pass."""
        for shard in self._shards:
            self.made[shard] = torch.empty(shard.numel, dtype=torch.bfloat16, device=shard.home.device)

    def send(self, relay: Relay) -> None:
        """Collective: starts to send slices of the first pass's updates to where their matrices are made whole."""
        relay.attempt(self._pack)

        def start(failed: bool) -> None:
            exchange = self._transport.all_to_all(_OUT)
            self._arrive = exchange.start(self._own, self._received, _OUT, failed=failed)

        relay.meet(riding_on(start))

    def _pack(self) -> None:
        # Kernels may run in host memory; the updates travel from where the params are.
        self._updates = {shard: update.to(shard.device) for shard, update in self.made.items()}
        self.made = {}
        own = [self._packed_slices(owner) for owner in range(self._ranks.size)]
        self._received = self._room(own, lambda peer: self._plan.numel(peer, self._ranks.rank))
        self._own = own

    def make_whole(self, relay: Relay) -> None:
        """Collective: waits for the slices, and calls the function of each matrix that this rank has whole."""
        clock = self._step.domain.clock
        if self._arrive is not None:
            arrive = self._arrive
            with clock.phase("gather"):
                relay.meet(riding_on(lambda _: arrive()))
        with clock.phase("matrices"):
            relay.attempt(self._call_functions)
        for group in self._groups:  # tensor mates, who wait for a rank with a problem too
            put_together(self._step.domain, group, self._placed(group, self._whole), self._call, relay)

    def send_back(self, relay: Relay) -> None:
        """Collective: sends the results back to where the slices came from."""
        if self._arrive is None:  # no rank could send
            return
        self._own = []
        others = relay.attempt(self._pack_results) or []
        with self._step.domain.clock.phase("gather"):
            exchange = self._transport.all_to_all(_BACK)
            relay.meet(riding_on(lambda failed: exchange.start(self._own, others, _BACK, failed=failed)()))
        relay.attempt(self._unpack, others)

    def _pack_results(self) -> list[torch.Tensor]:
        """Packs what each rank gets. Returns memory for what it sends."""
        self._own = self._taken_apart(self._whole)
        return self._room(self._own, lambda peer: self._plan.numel(self._ranks.rank, peer))

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

    def _call_functions(self) -> None:
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
        self._whole = whole

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

    def second_pass(self, launches: Mapping[Shard, Sequence[Launch]]) -> dict[Shard, list[Launch]]:
        """Returns the launches that apply what the functions made; each launch of the first pass has one or more."""
        return {
            shard: [applied for launch in its for applied in self._applied(shard, launch)]
            for shard, its in launches.items()
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
        for blocks, scalars in _applied_by_run(shard, launch.apply, launch.runs):
            yield replace(launch.apply, scalars=scalars, gradients=gradients, updates=updates, blocks=blocks)


def _applied_by_run(
    shard: Shard, apply: Launch, runs_of_row: Mapping[int, Sequence[MatrixScalars]]
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    """Yields what the launches of the second pass differ in: the blocks that each updates, None for all, its scalars.

    There are several where matrices of one param take other scalars: the first updates the first run of each such
    param and all other params, the next one the second run, and so on.
    """
    if not runs_of_row:
        yield None, apply.scalars
        return
    skipped = len(next(iter(runs_of_row.values()))[0].values) - apply.scalars.shape[1]
    for number in range(max(map(len, runs_of_row.values()))):
        scalars, blocks = apply.scalars.clone(), torch.full((shard.numel // BLOCK,), number == 0)
        for row, runs in runs_of_row.items():
            piece = shard.pieces[row]
            blocks[piece.shard_start // BLOCK : -(-piece.shard_end // BLOCK)] = False
            first, stop = (runs[number].first, runs[number].stop) if number < len(runs) else (0, 0)
            first, stop = max(first, piece.start), min(stop, piece.start + piece.numel)
            if first < stop:
                moved = piece.shard_start - piece.start
                blocks[(first + moved) // BLOCK : -(-(stop + moved) // BLOCK)] = True
                scalars[row] = torch.tensor(runs[number].values[skipped:])
        yield blocks, scalars


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
    numbers: Sequence[Mapping[str, Any]], update: ParamUpdate, bucket_of: Mapping[Shard, int]
) -> Iterator[tuple[PlannedMatrix, MatrixJob]]:
    """Yields the matrices of one param: each apart where its elements lie together, else all of them as one."""
    number = update.number % 2**32
    entry, matrices = update.entry, numbers[update.group].get("matrices")
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
