"""The rank on which each matrix is made whole, and the slices of it that the ranks hold: integers only.

Matrices lie in buckets as params do, cut among the ranks wherever a shard ends. Each has one owner, to which the slices
travel. A matrix that lies whole on one rank stays there, if costs are about even then. The owners of the others are
chosen by cost, the dearest matrix first: it goes to the rank that holds most of it, among those that then have no more
to do than the busiest rank would have if each matrix went to the one with the least to do so far.
A matrix that is cut over a tensor mesh has one owner among all ranks of (data, tensor).
With matrices of 3 x 256, 2 x 256 and 2 x 256 elements on two ranks (one character is a block of 256)::

    matrix   a a a b b c c .          . is padding
    rank     0 0 0 0 1 1 1 1
    owner    0 0 0 1 1 1 1

Of `b` one block travels to rank 1 and back, nothing else. (This example is a test.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

# How much more the busiest rank may compute so that matrices stay where they lie whole: all ranks wait for the busiest
# one, so a higher limit would cost more than the slices that do not travel. Test:
# test_a_matrix_that_lies_whole_on_a_rank_stays_there_if_costs_are_about_even in tests/partition/test_matrix_plan.py.
MOST_IMBALANCE = 1.05


class PlannedMatrix(NamedTuple):
    """A matrix that is to be made whole; or several of one shape, if their rows are not adjacent in memory."""

    bucket: int  # number of its bucket
    offset: int  # first element in the bucket
    rows: int
    columns: int
    shard_numel: int  # of the bucket
    stacked: int = 1  # matrices
    work: int | None = None  # the cost of several, one below the other; None: that of its shape
    owner: int | None = None  # given, of a slice of a matrix that ranks of a tensor mesh put together

    @property
    def numel(self) -> int:
        return self.stacked * self.rows * self.columns

    @property
    def cost(self) -> int:
        return cost_of(self.rows, self.columns, self.stacked) if self.work is None else self.work


def cost_of(rows: int, columns: int, stacked: int = 1) -> int:
    """Returns the cost of a Newton-Schulz step, in multiplications."""
    least, most = sorted((rows, columns))
    return stacked * least * least * (2 * most + least)


class MatrixSlice(NamedTuple):
    """The elements of one matrix that lie in one rank's shard of its bucket."""

    matrix: int  # its number in the plan
    bucket: int
    start: int  # first element in the matrix
    numel: int
    shard_start: int  # first element in the shard

    @property
    def in_matrix(self) -> slice:
        return slice(self.start, self.start + self.numel)

    @property
    def in_shard(self) -> slice:
        return slice(self.shard_start, self.shard_start + self.numel)


class MatrixPlan:
    """The owner of each matrix, on which it is made whole. Equal on all ranks; it changes only with the matrices.

    Attributes:
        matrices: in the order of the step.
        owners: the rank of each.
    """

    def __init__(self, matrices: tuple[PlannedMatrix, ...], num_ranks: int):
        self.matrices, self.num_ranks = matrices, num_ranks
        free = [number for number, each in enumerate(matrices) if each.owner is None]
        held = [[_held(number, matrices[number], rank) for rank in range(num_ranks)] for number in free]
        chosen = dict(zip(free, _owners([matrices[number].cost for number in free], held, num_ranks), strict=True))
        self.owners = tuple(chosen.get(number, each.owner or 0) for number, each in enumerate(matrices))

    @cached_property
    def _slices(self) -> dict[tuple[int, int], list[MatrixSlice]]:
        found: dict[tuple[int, int], list[MatrixSlice]] = {}
        for number, each in enumerate(self.matrices):
            for rank in range(self.num_ranks):
                piece = _slice_on(number, each, rank)
                if piece is not None:
                    found.setdefault((rank, self.owners[number]), []).append(piece)
        return found

    def slices(self, rank: int, owner: int) -> Sequence[MatrixSlice]:
        """Returns what lies on ``rank`` of the matrices of ``owner``, in the order in which it travels."""
        return self._slices.get((rank, owner), ())

    def numel(self, rank: int, owner: int) -> int:
        return sum(each.numel for each in self.slices(rank, owner))

    def owned(self, rank: int) -> list[int]:
        """Returns the numbers of the matrices of this rank."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]


@lru_cache(maxsize=32)
def plan_matrices(matrices: tuple[PlannedMatrix, ...], num_ranks: int) -> MatrixPlan:
    """Returns the plan; the same object for what was planned before."""
    return MatrixPlan(matrices, num_ranks)


@lru_cache(maxsize=32)
def owners_on_mesh(
    costs: tuple[int, ...], held: tuple[tuple[int, ...], ...], num_data: int
) -> tuple[tuple[int, int], ...]:
    """Returns the owners of matrices that are cut: of each its numbers among the data-parallel and the tensor ranks.

    What a tensor rank holds of a matrix is split among its data-parallel ranks as their buckets are, of which its
    tensor mates know nothing. So owners depend on the matrices alone.

    Args:
        held: of each matrix the elements that each tensor rank holds.
    """
    num_tensor = len(held[0]) if held else 1
    owners = _owners(costs, [each * num_data for each in held], num_data * num_tensor)
    return tuple(divmod(owner, num_tensor) for owner in owners)


def _slice_on(number: int, matrix: PlannedMatrix, rank: int) -> MatrixSlice | None:
    first = rank * matrix.shard_numel
    start = max(matrix.offset, first)
    end = min(matrix.offset + matrix.numel, first + matrix.shard_numel)
    if start >= end:
        return None
    return MatrixSlice(number, matrix.bucket, start - matrix.offset, end - start, start - first)


def _owners(costs: Sequence[int], held: Sequence[Sequence[int]], num_ranks: int) -> tuple[int, ...]:
    """Returns the owner of each matrix: the rank that has all of it, unless costs would be too uneven then.

    Args:
        held: of each matrix the elements that lie on each rank.
    """
    on_one = {number: each.index(sum(each)) for number, each in enumerate(held) if sum(each) in each}
    owners, busiest = _balanced(costs, held, num_ranks, {})
    stay, busiest_then = _balanced(costs, held, num_ranks, on_one)
    return stay if busiest_then <= MOST_IMBALANCE * busiest else owners


def _balanced(
    costs: Sequence[int], held: Sequence[Sequence[int]], num_ranks: int, given: Mapping[int, int]
) -> tuple[tuple[int, ...], int]:
    """Returns the owner of each matrix, and what the busiest rank computes.

    In two passes: the first finds how little the busiest rank must do.

    Args:
        given: the owners of some matrices.
    """
    dearest = sorted(range(len(costs)), key=lambda number: (number not in given, -costs[number]))  # stable
    owners, limit = [0] * len(costs), 0
    for _ in range(2):
        busy = [0] * num_ranks
        for number in dearest:
            cost = costs[number]
            free = [rank for rank in range(num_ranks) if busy[rank] + cost <= limit]
            if number in given:
                owner = given[number]
            elif free:
                owner = max(free, key=lambda rank: (held[number][rank], -busy[rank]))
            else:
                owner = min(range(num_ranks), key=lambda rank: (busy[rank], -held[number][rank]))
            owners[number] = owner
            busy[owner] += cost
        limit = max(busy, default=0)
    return tuple(owners), limit


def _held(number: int, matrix: PlannedMatrix, rank: int) -> int:
    piece = _slice_on(number, matrix, rank)
    return 0 if piece is None else piece.numel
