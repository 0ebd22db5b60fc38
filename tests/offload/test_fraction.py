"""A part of the states is offloaded, and the rest stays: which part, and that no bit depends on it.

Trainings of every rule, stage and tier are beside those of whole offloading, in the other files of this folder.
"""

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import Offload, OffloadError, ShardedAdamW, ShardedLAMB, ShardedMuon, Tuning
from tests.offload.test_offload_faults import Faulty, system
from tests.support.late_copies import AsLateAsAllowed, as_on_a_gpu
from tests.support.offloaded import CHUNK, advance, bits, make
from tests.support.ranks import Pool
from tests.support.training import raw


def ten_buckets(offload: Any, stage: int = 1) -> tuple[torch.nn.Module, shardopt.ShardedOptimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(10)))
    for number, param in enumerate(model.parameters()):
        param.data.copy_(torch.linspace(-1, 1, 1024).roll(number).view(32, 32))
    tuning = Tuning(bucket_bytes=2048, chunk_bytes=CHUNK)
    return model, ShardedAdamW(model.bfloat16(), lr=1e-2, stage=stage, offload=offload, tuning=tuning)


def train(model: torch.nn.Module, optimizer: shardopt.ShardedOptimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 32, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def tiers(optimizer: shardopt.ShardedOptimizer) -> list[str]:
    """Where the states of each bucket are, in the order of backward."""
    assert optimizer.engine.domain is not None
    return [shard.home.tier for shard in optimizer.engine.domain.shards]


def ends(model: torch.nn.Module, optimizer: shardopt.ShardedOptimizer) -> list[bytes]:
    params = list(model.parameters())
    return [raw(param) for param in params] + [raw(optimizer.state[p][name]) for p in params for name in ("exp_avg",)]


@pytest.mark.parametrize("fraction", [1, 0.4, 0.04])
def test_the_first_buckets_of_backward_stay(fraction: float, tmp_path: Path) -> None:
    model, optimizer = ten_buckets(Offload(tmp_path, fraction=fraction))
    train(model, optimizer, range(1))
    away = round(10 * fraction)
    assert tiers(optimizer) == ["device"] * (10 - away) + ["disk"] * away
    memory, states = optimizer.memory(), 10 * 1024 * 8
    assert memory["state"].get("disk", 0) == states * away // 10
    assert memory["state"].get("device", 0) == states * (10 - away) // 10
    assert memory["master"].get("disk", 0) == states * away // 20
    optimizer.offload("cpu")  # all of them
    assert tiers(optimizer) == ["host"] * 10
    train(model, optimizer, range(1, 2))
    optimizer.reload()
    assert tiers(optimizer) == ["device"] * (10 - away) + ["disk"] * away
    optimizer.offload(tmp_path)
    assert tiers(optimizer) == ["disk"] * 10
    optimizer.reload()
    train(model, optimizer, range(2, 3))
    other, plain = ten_buckets(None)
    train(other, plain, range(3))
    assert ends(model, optimizer) == ends(other, plain)
    optimizer.close()


def muon(params: list[torch.nn.Parameter], **keywords: Any) -> ShardedMuon:
    matrices = [param for param in params if param.ndim == 2]
    rest = [param for param in params if param.ndim != 2]
    return ShardedMuon([{"params": matrices}, {"params": rest, "rule": "adamw"}], **keywords)


@pytest.mark.parametrize("kind", [ShardedLAMB, muon])
def test_a_step_that_a_disk_fails_changes_nothing_that_stays(kind: Any, tmp_path: Path) -> None:
    """Rules of several passes too: the first ones write states before all ranks have voted."""
    params, optimizer = make(kind, Offload(tmp_path, fraction=0.5), torch.bfloat16)
    others, plain = make(kind, None, torch.bfloat16)
    for each in ((params, optimizer), (others, plain)):
        advance(*each, range(2))
    assert {"device", "disk"} == set(tiers(optimizer))
    before, failures = bits(params, optimizer), 0
    shown = {param: dict(optimizer.state[param]) for param in params}
    for at in itertools.count():
        try:
            with system(Faulty("write", "EIO", at)):
                advance(params, optimizer, range(2, 3))
            break
        except OffloadError:
            failures += 1
            assert bits(params, optimizer) == before, at
    advance(others, plain, range(2, 3))
    assert failures > 1 and bits(params, optimizer) == bits(others, plain)
    for param, states in shown.items():  # no tensor that was read before was swapped for a copy
        assert all(raw(value) == raw(optimizer.state[param][name]) for name, value in states.items())
    saved = copy.deepcopy(plain.state_dict())
    advance(params, optimizer, range(3, 4))
    before = bits(params, optimizer)
    for at in itertools.count():
        try:
            with system(Faulty("write", "EIO", at)):
                optimizer.load_state_dict(saved)
            break
        except OffloadError:
            assert bits(params, optimizer) == before, at
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            param.copy_(other)
    for each in ((params, optimizer), (others, plain)):
        advance(*each, range(3, 5))
    assert bits(params, optimizer) == bits(others, plain)
    optimizer.close()


def checkpoints(root: str) -> list[list[bytes]]:
    """On the ranks: saved from one fraction, and loaded into another."""
    found = []
    some, most = (Offload(Path(root) / "swap", fraction=fraction) for fraction in (0.4, 0.7))
    for number, (first, second) in enumerate(((None, some), (some, most))):
        model, optimizer = ten_buckets(first, stage=2)
        train(model, optimizer, range(2))
        shardopt.save_checkpoint(Path(root) / str(number), model, optimizer)
        optimizer.close()
        model, optimizer = ten_buckets(second, stage=2)
        shardopt.load_checkpoint(Path(root) / str(number), model, optimizer)
        train(model, optimizer, range(2, 4))
        found.append([raw(param) for param in model.parameters()])
        optimizer.close()
    model, optimizer = ten_buckets(None, stage=2)
    train(model, optimizer, range(4))
    return [*found, [raw(param) for param in model.parameters()]]


def disagrees() -> str:
    model, optimizer = ten_buckets(Offload(fraction=0.4 + 0.2 * dist.get_rank()))
    with pytest.raises(shardopt.DisagreementError, match="fraction") as error:
        train(model, optimizer, range(1))
    return str(error.value)


def test_a_checkpoint_depends_on_no_fraction_and_ranks_agree_on_it(ranks: Pool, tmp_path: Path) -> None:
    for *found, expected in ranks.run(checkpoints, str(tmp_path), world=2):
        assert found == [expected] * len(found)
    assert len(set(ranks.run(disagrees, world=2))) <= 2


@pytest.mark.parametrize("step", ["cpu", "gpu", "auto"])
def test_beside_a_gpu_only_what_is_offloaded_travels(step: Any) -> None:
    with as_on_a_gpu(AsLateAsAllowed):
        model, optimizer = ten_buckets(Offload(step=step, fraction=0.4))
        train(model, optimizer, range(8))
        assert tiers(optimizer) == ["device"] * 6 + ["host"] * 4
        other, plain = ten_buckets(None)
        train(other, plain, range(8))
        assert ends(model, optimizer) == ends(other, plain)
        optimizer.close()


def fills(root: str, rooms: list[int] | None) -> list[Any]:
    """On the ranks: trains with ``fraction="auto"`` on devices with so much room, or with what this machine has."""
    model, optimizer = ten_buckets(Offload(root, fraction="auto"), stage=2)
    asked = patch("shardopt.domain.staying.room_on", lambda _: rooms[dist.get_rank()]) if rooms else nullcontext()
    found: list[Any] = []
    with asked:
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            found.append(tiers(optimizer).count("device"))
            if step == 2:
                optimizer.offload(Path(root) / "away")
                found.append(tiers(optimizer).count("device"))
                optimizer.reload()
    other, plain = ten_buckets(None, stage=2)
    train(other, plain, range(4))
    found.append(ends(model, optimizer) == ends(other, plain))
    optimizer.close()
    return found


def stays_offloaded(root: str) -> None:
    """On the ranks: one cannot read its states when they would be taken back, after a step that all have taken."""
    model, optimizer = ten_buckets(Offload(root, fraction="auto"), stage=2)
    fails = dist.get_rank() == 1
    train(model, optimizer, range(1))
    error = torch.OutOfMemoryError("no")  # as a device says it; a disk's is an OffloadError
    failing = patch("shardopt.domain.staying.copy_streams", side_effect=error if fails else None)
    with failing, pytest.warns(UserWarning, match='in place of Offload\\(fraction="auto"'):
        train(model, optimizer, range(1, 2))
    train(model, optimizer, range(2, 4))
    assert tiers(optimizer) == ["disk"] * 10 and optimizer.updates == 4
    other, plain = ten_buckets(None, stage=2)
    train(other, plain, range(4))
    assert ends(model, optimizer) == ends(other, plain)
    optimizer.close()


def test_auto_fills_what_every_device_has_left_after_the_second_step(ranks: Pool, tmp_path: Path) -> None:
    a_bucket = 12 * 1024 // 2  # of a rank of two
    rooms = [9 * a_bucket, 4 * a_bucket - 1]
    assert ranks.run(fills, str(tmp_path), rooms, world=2) == [[0, 3, 3, 0, 3, True]] * 2
    assert ranks.run(fills, str(tmp_path), None, world=2) == [[0, 10, 10, 0, 10, True]] * 2  # tiny as they are
    ranks.run(stays_offloaded, str(tmp_path), world=2)
    assert ranks.run(fills, str(tmp_path), [-1, 10**9], world=2) == [[0, 0, 0, 0, 0, True]] * 2
