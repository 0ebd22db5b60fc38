"""Which rank makes a matrix whole: the example of matrix_plan.py, balance, and what travels."""

import torch

from shardopt.partition.layout import BLOCK, BucketLayout
from shardopt.partition.matrix_plan import PlannedMatrix, cost_of, owners_on_mesh, plan_matrices

GPT = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 6


def wanted(shapes: list[tuple[int, int]], num_ranks: int) -> tuple[PlannedMatrix, ...]:
    """Matrices that share one bucket."""
    layout = BucketLayout(tuple(rows * columns for rows, columns in shapes), num_ranks)
    return tuple(
        PlannedMatrix(0, layout.offsets[index], rows, columns, layout.shard_numel)
        for index, (rows, columns) in enumerate(shapes)
    )


def test_the_example() -> None:
    plan = plan_matrices(wanted([(3, BLOCK), (2, BLOCK), (2, BLOCK)], 2), 2)
    assert plan.owners == (0, 1, 1)
    assert (plan.numel(0, 1), plan.numel(1, 0)) == (BLOCK, 0)
    (moved,) = [each for each in plan.slices(0, 1) if each.matrix == 1]
    assert (moved.start, moved.numel, moved.shard_start) == (0, BLOCK, 3 * BLOCK)


def test_owners_are_balanced_and_what_travels_is_bounded() -> None:
    for num_ranks in (1, 2, 3, 4, 8):
        shapes = [*GPT, (7, 300), (33, 65), (1, 5)]
        matrices = wanted(shapes, num_ranks)
        plan = plan_matrices(matrices, num_ranks)
        busy = [sum(matrices[number].cost for number in plan.owned(rank)) for rank in range(num_ranks)]
        least = max(sum(busy) / num_ranks, *(each.cost for each in matrices))
        assert max(busy) <= 1.2 * least, num_ranks
        numel = torch.tensor([[plan.numel(rank, owner) for owner in range(num_ranks)] for rank in range(num_ranks)])
        elements = sum(rows * columns for rows, columns in shapes)
        assert numel.sum() == elements  # each slice once
        assert numel.sum() - numel.trace() <= (num_ranks - 1) / num_ranks * elements, num_ranks


def test_what_a_tensor_mesh_cuts_is_balanced_over_all_ranks() -> None:
    for num_data, num_tensor in ((1, 2), (2, 2), (4, 2)):
        costs = tuple(cost_of(*shape) for shape in GPT)
        held = tuple((rows * columns // num_tensor,) * num_tensor for rows, columns in GPT)
        owners = owners_on_mesh(costs, held, num_data)
        busy = torch.zeros(num_data, num_tensor, dtype=torch.int64)
        for cost, owner in zip(costs, owners, strict=True):
            busy[owner] += cost
        assert busy.max() <= 1.2 * max(sum(costs) / busy.numel(), *costs)
    assert owners_on_mesh((5, 5), ((3, 1), (0, 4)), 1) == ((0, 0), (0, 1))  # to the rank that holds most of it


def test_a_matrix_that_lies_whole_on_a_rank_stays_there_if_costs_are_about_even() -> None:
    """Three of 9 on one rank, 9, 7, 7, 3 and 3 on the other: 27 and 29, where 28 and 28 would be even."""
    shapes = [(1024, 256)] * 4 + [(768, 256)] * 2 + [(256, 256)] * 2
    plan = plan_matrices(wanted(shapes, 2), 2)
    assert (plan.numel(0, 1), plan.numel(1, 0)) == (0, 0)
    uneven = plan_matrices(wanted([(512, 512)] * 2 + [(64, 1024)] * 8, 2), 2)  # nearly all of the cost on one rank
    assert uneven.owners[0] != uneven.owners[1]
