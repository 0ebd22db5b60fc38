"""In a group that carries no host memory, as NCCL's, what ranks tell each other travels beside it and its device.

There is no GPU here. The groups are torch's own, made for tensors of a GPU alone.
"""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedAdamW, Tuning
from shardopt.partition.comm import host_group
from shardopt.partition.comm.group import Ranks
from tests.support.beside_a_device import for_gpus
from tests.support.comparing import snapshot
from tests.support.modules import data
from tests.support.ranks import Pool


def tells() -> None:
    """Every call, with host memory alone."""
    group, rank = for_gpus(), dist.get_rank()
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(torch.ones(1), group=group)
    ranks, vector, shared = Ranks(group, None), torch.ones(3), [torch.full((2,), float(rank))]
    others = [torch.zeros(1) for _ in range(2)]
    assert ranks.exchange([rank], "a test") == [[0], [1]]
    assert ranks.exchange_json({"rank": rank}, "a test") == [{"rank": 0}, {"rank": 1}]
    ranks.all_reduce(vector, "a test")
    ranks.broadcast(shared, "a test", root=1)
    parts = ranks.gather(torch.full((2,), rank), 0, "a test")
    ranks.wait(ranks.exchange_slices([vector[:1]] * 2, others, 1, "a test"))
    assert vector.tolist() == [2.0] * 3 and shared[0].tolist() == [1.0, 1.0] and float(others[1 - rank]) == 2.0
    assert (parts is None) == (rank == 1) and (parts is None or [each.tolist() for each in parts] == [[0, 0], [1, 1]])


def test_host_values_travel_beside_the_device(ranks: Pool) -> None:
    ranks.run(tells, world=2)


def trained(group: dist.ProcessGroup) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64))
    opt = ShardedAdamW(model, stage=3, process_group=group, tuning=Tuning(keep_below=1, bucket_bytes=1))
    for step in range(2):
        opt.zero_grad()
        model(data(step, 4, 64)).square().mean().backward()
        opt.step()
    found = snapshot(model, opt)
    opt.close()
    return found


def is_one_for_all() -> None:
    """Optimizers of a group share the one beside it, which goes when the group does."""
    world = dist.group.WORLD
    assert world is not None
    group, expected = for_gpus(), trained(world)
    assert trained(group) == expected
    beside = weakref.ref(host_group.host_group(group))
    assert trained(group) == expected and host_group.host_group(group) is beside()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert beside() is None


def test_one_group_beside_goes_with_its_group(ranks: Pool) -> None:
    ranks.run(is_one_for_all, world=2)


def told_of_unequal_groups() -> list[list[int]] | None:
    rank = dist.get_rank()
    dist.new_group([0, 2])
    group = for_gpus([0, 1]) if rank < 2 else dist.new_group([0, 1], backend="cuda:gloo")
    return Ranks(group, None).exchange([rank], "a test") if rank < 2 else None


def test_ranks_in_unequal_numbers_of_groups(ranks: Pool) -> None:
    """Only the ranks of the group make the one beside it, whatever else each of them takes part in."""
    assert ranks.run(told_of_unequal_groups, world=3) == [[[0], [1]], [[0], [1]], None]


def waits() -> tuple[float, float, float]:
    own = timedelta(seconds=777)  # long, for new_group() itself waits for the other rank within it
    carries_both = dist.new_group(backend="gloo", timeout=own)
    return tuple(Ranks(*each).seconds for each in ((for_gpus(timeout=own), None), (carries_both, None), (None, own)))  # type: ignore[return-value]


def test_waits_end_with_the_groups_own_timeout(ranks: Pool) -> None:
    assert ranks.run(waits, world=2) == [(777.0, 777.0, 777.0)] * 2
