"""One rank over NCCL, on machines with one GPU: its collectives run on NCCL's stream, and are waited for there.

A group of one rank needs no collectives, so a step takes none. Here they are made all the same.
"""

from unittest.mock import patch

import pytest
import torch

import shardopt
from shardopt.partition.comm.all_gather import Window, by_collectives
from shardopt.partition.comm.group import Ranks, Traffic
from shardopt.partition.comm.reduce_scatter import ReduceScatter, Reduction
from shardopt.partition.comm.reduce_scatter_collective import CollectiveReduceScatter
from shardopt.partition.comm.transport import Transport
from tests.support.chain import train_chain
from tests.support.ranks import Pool

pytestmark = pytest.mark.gpu

TUNING = shardopt.Tuning(bucket_bytes=4000, keep_below=500, live_bytes=0)
NUMEL, ROUNDS = 1 << 12, 3


def by_nccl(transport: Transport) -> ReduceScatter:
    return CollectiveReduceScatter(Ranks(None, None), transport.traffic)


def trains_by_nccl() -> None:
    for stage in (0, 1, 2, 3):
        for offload in (None, "cpu"):
            expected = train_chain(stage, "cuda", offload, tuning=TUNING)
            with patch.object(Transport, "reduce_scatter", by_nccl):
                assert train_chain(stage, "cuda", offload, tuning=TUNING) == expected, (stage, offload)


def moves() -> None:
    """What is made on the current stream is reduced and gathered, and read there again, without a wait of the host."""
    ranks, traffic = Ranks(None, None), Traffic()
    reduces = CollectiveReduceScatter(ranks, traffic)
    for number in range(ROUNDS):
        reduces.start_round(number)
        sums = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for add in (False, True):
                target = torch.full((NUMEL,), 1.0, device="cuda")
                # A product that takes its time: who does not wait for it reads what lay there.
                made = torch.eye(512, device="cuda").matmul(torch.full((512, NUMEL // 512), 2.0, device="cuda"))
                reduces.start(Reduction(made.to(dtype).flatten(), target, add))
                sums.append((target, 3.0 if add else 2.0))
        assert len(reduces.finish()) == len(sums)
        for target, value in sums:
            assert target.eq(value).all(), (number, value)
    for number in range(ROUNDS):
        flat = torch.zeros(NUMEL, device="cuda")
        flat += torch.eye(64, device="cuda").matmul(torch.full((64, NUMEL // 64), 4.0, device="cuda")).flatten()
        gathers = by_collectives(ranks, "gathering")
        with patch.object(Window, "nbytes_received", 1):
            gathers.start(Window(flat, NUMEL, number))
        gathers.finish()
        assert flat.mul(2).eq(8).all()
    told = torch.arange(NUMEL, device="cuda")
    ranks.all_reduce(told, "telling")
    assert ranks.read(told, "telling").tolist() == list(range(NUMEL))


def test_steps_leave_the_same_bits(ranks: Pool) -> None:
    ranks.run(trains_by_nccl, world=1, backend="nccl")


def test_what_nccl_moves_is_waited_for(ranks: Pool) -> None:
    ranks.run(moves, world=1, backend="nccl")
