"""The harness itself: results by rank, exceptions with their rank, a hang ended and explained, and work afterwards."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.support import ranks as ranks_module
from tests.support.moments import Moments
from tests.support.ranks import Pool, RankFailure


def rank_sum(value: int) -> tuple[int, float]:
    total = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fails_on(rank: int) -> None:
    assert dist.get_rank() != rank, "this rank was told to fail"


def hangs_on(rank: int, folder: Path) -> None:
    while dist.get_rank() == rank:
        Moments(folder).say("hangs")
        time.sleep(0.01)


def dies_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def poisoned() -> bool:
    return bool(torch.empty(1000).isnan().all())


def gathered_behind(groups: int) -> list[float]:
    """In a mesh of two columns, when so many other groups were made before: they have the names of the next ones."""
    for _ in range(groups):
        dist.new_group([0, 1])
        dist.new_group([2, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    own = torch.full((1,), float(dist.get_rank()))
    found: list[float] = (DTensor.from_local(own, mesh["row"], [Shard(0)]) + 1).full_tensor().tolist()
    return found


def loops_of_gloo() -> int:
    """Returns the number of groups whose threads this process runs."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def test_a_job_meets_no_group_of_an_earlier_one() -> None:
    """Torch keeps what it found of DTensors by the equality of meshes, and asks for groups by name.

    The groups of a mesh go with their job: a process that kept them would spend its core on their threads.
    """
    pool = Pool()  # of its own, with no groups of other tests
    try:
        for groups in (0, 1, 2):
            assert pool.run(gathered_behind, groups, world=4) == [[1.0, 3.0], [2.0, 4.0]] * 2
        if sys.platform == "linux":
            assert pool.run(loops_of_gloo, world=4) == [1] * 4
    finally:
        pool.close()


def test_ranks(ranks: Pool) -> None:
    assert ranks.run(rank_sum, 10, world=3) == [(0, 33.0), (1, 33.0), (2, 33.0)]
    with pytest.raises(RankFailure, match=r"rank 1 of 2 --\nTraceback[\s\S]*fails_on[\s\S]*told to fail") as caught:
        ranks.run(fails_on, 1, world=2)
    assert "rank 1 of 2 --" in str(caught.value)
    assert ranks.run(rank_sum, 1, world=2) == [(0, 3.0), (1, 3.0)]
    assert ranks.run(poisoned, world=1) == [True]


def test_hang_is_ended_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()  # of its own: the processes of the others keep what they have compiled
    try:
        assert pool.run(rank_sum, 0, world=2) == [(0, 1.0), (1, 1.0)]

        def time_is_up(pipes: Any, timeout: float) -> list[Any]:
            Moments(tmp_path).wait("hangs")
            return []

        with monkeypatch.context() as patched:
            patched.setattr(ranks_module.connection, "wait", time_is_up)
            with pytest.raises(RankFailure, match=r"rank 1 of 2 --\nnot done in time[\s\S]*hangs_on"):
                pool.run(hangs_on, 1, tmp_path, world=2)
        with pytest.raises(RankFailure, match="rank 1 of 2 --\nnot done in time"):
            pool.run(hangs_on, 1, tmp_path, world=2, deadline=0)
        assert pool.run(rank_sum, 0, world=1) == [(0, 0.0)]
    finally:
        pool.close()


def test_a_death_is_told_unless_it_was_meant() -> None:
    pool = Pool()
    try:
        with pytest.raises(RankFailure, match="rank 1 of 2 --\nthe process died, exit code -9"):
            pool.run(dies_on, 1, world=2)
        assert pool.run(dies_on, 1, world=2, doomed=(1,)) == [0, None]
    finally:
        pool.close()


def test_a_death_between_jobs_fails_one_of_them() -> None:
    pool = Pool()
    try:
        assert pool.run(rank_sum, 0, world=2) == [(0, 1.0), (1, 1.0)]
        pool._workers[1].process.kill()
        pool._workers[1].process.join()
        with pytest.raises(RankFailure, match="died behind its last job"):
            pool.run(rank_sum, 0, world=2)
        assert pool.run(rank_sum, 0, world=2) == [(0, 1.0), (1, 1.0)]
    finally:
        pool.close()
