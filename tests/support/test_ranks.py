"""The harness itself: results by rank, exceptions with their rank, a hang ended and explained, and work afterwards."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Pool, RankFailure


def rank_sum(value: int) -> tuple[int, float]:
    total = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fails_on(rank: int) -> None:
    assert dist.get_rank() != rank, "this rank was told to fail"


def hangs_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def poisoned() -> bool:
    return bool(torch.empty(1000).isnan().all())


def test_ranks(ranks: Pool) -> None:
    assert ranks.run(rank_sum, 10, world=3) == [(0, 33.0), (1, 33.0), (2, 33.0)]
    with pytest.raises(RankFailure, match=r"rank 1 of 2 --\nTraceback[\s\S]*fails_on[\s\S]*told to fail") as caught:
        ranks.run(fails_on, 1, world=2, timeout=5)
    assert "rank 1 of 2 --" in str(caught.value)
    assert ranks.run(rank_sum, 1, world=2) == [(0, 3.0), (1, 3.0)]
    assert ranks.run(poisoned, world=1) == [True]


def test_hang_is_ended_and_explained() -> None:
    pool = Pool()  # of its own: the processes of the others keep what they have compiled
    try:
        assert pool.run(rank_sum, 0, world=2) == [(0, 1.0), (1, 1.0)]
        with pytest.raises(RankFailure, match=r"rank 1 of 2 --\nnot done in time[\s\S]*hangs_on"):
            pool.run(hangs_on, 1, world=2, deadline=2)
        assert pool.run(rank_sum, 0, world=1) == [(0, 0.0)]
    finally:
        pool.close()
