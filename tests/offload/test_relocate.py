"""Masters and states go elsewhere between steps and come back: the bits are those of a training that never moved."""

import copy
import functools
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardopt
from shardopt import (
    DisagreementError,
    Offload,
    OffloadError,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    Tuning,
)
from tests.offload.test_offload_faults import Faulty, system
from tests.support.memory import resident
from tests.support.offloaded import advance, at_rest, bits, check_trainings, make
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep, sweep_at_once
from tests.support.training import raw

MIB = 1 << 20


def move(optimizer: ShardedOptimizer, to: str, root: Path) -> None:
    {
        "reload": optimizer.reload,
        "cpu": lambda: optimizer.offload("cpu"),
        "disk": lambda: optimizer.offload(root),
    }[to]()


def rests(optimizer: ShardedOptimizer) -> dict[str, dict[str, int]]:
    return {kind: tiers for kind, tiers in optimizer.memory().items() if kind in ("master", "state")}


# -- one rank ----------------------------------------------------------------------------------------------------------


@sweep({"dtype": (torch.bfloat16, torch.float32), "base": ("device", "cpu", "disk")}, strength=1)
def test_every_way_leaves_the_same_bits(dtype: torch.dtype, base: str, tmp_path: Path) -> None:
    """Every pair of moves behind a step; a step, a load or nothing comes in between behind each, and before each."""
    offload = {"device": None, "cpu": "cpu", "disk": tmp_path}[base]
    params, optimizer = make(ShardedAdamW, offload, dtype, amsgrad=True)
    others, still = make(ShardedAdamW, None, dtype, amsgrad=True)
    optimizer.offload(tmp_path / "too early")  # there is nothing to move
    numbers = itertools.count()
    advance(params, optimizer, range(1))
    advance(others, still, range(1))
    places, turn = ("cpu", "disk", "reload"), ("device", "cpu", "disk").index(base)
    for (at, first), (by, second) in itertools.product(enumerate(places), repeat=2):
        between = (None, "step", "load")[(at + by + turn) % 3]
        move(optimizer, first, tmp_path)
        number = next(numbers)
        for each, one in ((params, optimizer), (others, still)):
            if between == "step":
                advance(each, one, range(number, number + 1))
            elif between == "load":
                one.load_state_dict(copy.deepcopy(one.state_dict()))
        move(optimizer, second, tmp_path)
        assert bits(params, optimizer) == bits(others, still), (first, between, second)
    advance(params, optimizer, range(2))
    advance(others, still, range(2))
    assert bits(params, optimizer) == bits(others, still)
    optimizer.close()
    assert not os.listdir(tmp_path)


def test_memory_says_where(tmp_path: Path) -> None:
    def trained(**keywords: Any) -> ShardedOptimizer:
        params = [Parameter(torch.ones(1024, dtype=torch.bfloat16)) for _ in range(8)]
        optimizer = ShardedAdamW(params, tuning=Tuning(bucket_bytes=2048), **keywords)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer

    optimizer = trained()
    whole = {"master": 4 * 8192, "state": 8 * 8192}
    assert rests(optimizer) == {kind: {"device": nbytes} for kind, nbytes in whole.items()}
    for to, tier in (("cpu", "host"), ("disk", "disk"), ("cpu", "host"), ("reload", "device")):
        move(optimizer, to, tmp_path)
        assert rests(optimizer) == {kind: {tier: nbytes} for kind, nbytes in whole.items()}
        assert len(os.listdir(tmp_path)) == (tier == "disk")


def test_a_directory_takes_the_memory_away(tmp_path: Path) -> None:
    params = [Parameter(torch.ones(4 * MIB, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ShardedAdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    full = resident()
    optimizer.offload(tmp_path)
    away = resident()
    optimizer.reload()
    back = resident()
    states = 12 * 8 * MIB
    assert full - away > 0.9 * states and back - away > 0.9 * states


def test_a_move_that_fails_has_not_happened(tmp_path: Path) -> None:
    params, optimizer = make(ShardedAdamW, None, torch.bfloat16)
    advance(params, optimizer, range(2))
    before, where = bits(params, optimizer), rests(optimizer)
    (tmp_path / "a file").write_text("not a directory")
    with pytest.raises(OffloadError, match="a file"):
        optimizer.offload(tmp_path / "a file")
    assert (bits(params, optimizer), rests(optimizer)) == (before, where)
    optimizer.close()
    for call in (optimizer.offload, lambda: optimizer.offload(tmp_path)):
        with pytest.raises(shardopt.ShardoptError, match="closed"):
            call()


def test_a_write_outside_of_steps_holds_whole_or_not_at_all(tmp_path: Path) -> None:
    params, optimizer = make(ShardedAdamW, tmp_path, torch.bfloat16, master="split")
    advance(params, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    advance(params, optimizer, range(2, 4))
    for param in params:
        param.data.mul_(2)
    before, failures = bits(params, optimizer), 0
    for call in (optimizer.refresh_masters, lambda: optimizer.load_state_dict(saved)):
        for at in itertools.count():
            try:
                with system(Faulty("write", "EIO", at)):
                    call()
                break
            except OffloadError:
                failures += 1
                assert bits(params, optimizer) == before, (call, at)
        assert bits(params, optimizer) != before
        before = bits(params, optimizer)
    assert failures > 4
    optimizer.close()


# -- several ranks -----------------------------------------------------------------------------------------------------


@contextmanager
def moving(root: str) -> Iterator[None]:
    """States move after every step."""
    ways = itertools.cycle(("disk", "cpu", "reload", "cpu", "cpu", "reload", "disk", "disk", "reload", "reload"))

    def moves(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert isinstance(optimizer, ShardedOptimizer)
        move(optimizer, next(ways), Path(root))

    handle = register_optimizer_step_post_hook(moves)
    try:
        yield
    finally:
        handle.remove()


def bases(root: Path) -> dict[str, Offload | None]:
    return {"device": None, "cpu": Offload(), "disk": Offload(root)}


AXES = {
    "stage": (0, 1, 2, 3),
    "neighbours": (True, False),
    "base": tuple(bases(Path())),
    "recipe": ("clips in the step", "accumulates in the shard", "overflows"),
}


@sweep_at_once(AXES)
def test_every_stage_leaves_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    calls = [
        (recipe, at_rest(stage, neighbours, stage % 2 == 0, live_bytes=1 << 20, offload=bases(tmp_path)[base]))
        for stage, neighbours, base, recipe in rows
    ]
    check_trainings(calls, ranks, 2, functools.partial(moving, str(tmp_path)))


def saves_and_loads(root: str) -> None:
    """Checkpoints of offloaded states are those of others, and are loaded where the states are."""
    runs, swap = Path(root) / "runs", Path(root) / "swap"
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(100, 70)
        optimizer = ShardedAdamW(model, stage=2, tuning=Tuning(chunk_bytes=4096, bucket_bytes=4000))

        def steps(count: int, model: Any = model, optimizer: Any = optimizer) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.ones(4, 100)).sum().backward()
                optimizer.step()

        steps(2)
        if moves:
            optimizer.offload(swap)
        shardopt.save_checkpoint(runs / str(moves), model, optimizer)
        steps(2)
        shardopt.load_checkpoint(runs / str(moves), model, optimizer)
        steps(1)
        if moves:
            assert set(rests(optimizer)["state"]) == {"disk"}
            optimizer.reload()
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
        ends.append([raw(param) for param in model.parameters()] + [raw(v) for s in state.values() for v in s.values()])
        optimizer.close()
    assert ends[0] == ends[1]


def test_checkpoints_of_offloaded_states(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(saves_and_loads, str(tmp_path), world=2)
    assert not os.listdir(tmp_path / "swap")


def other_calls(root: str) -> list[str]:
    """One rank moves; the other one steps, moves elsewhere, or has no place to go to."""
    params, optimizer = make(ShardedSGD, None, torch.bfloat16, lr=0.1, momentum=0.9)
    advance(params, optimizer, range(2))
    is_first, told = dist.get_rank() == 0, []
    for theirs in (optimizer.step, lambda: optimizer.offload("cpu"), lambda: optimizer.offload("/dev/null")):
        before, where = bits(params, optimizer), rests(optimizer)
        try:
            optimizer.offload(root) if is_first else theirs()
            told.append("")
        except (DisagreementError, OffloadError) as error:
            told.append(f"{type(error).__name__}: {error}")
        assert (bits(params, optimizer), rests(optimizer)) == (before, where)
    dist.barrier()
    assert not os.listdir(root)
    advance(params, optimizer, range(2, 4))
    return told


def test_all_ranks_move_or_none(ranks: Pool, tmp_path: Path) -> None:
    for told in ranks.run(other_calls, str(tmp_path), world=2):
        assert "DisagreementError" in told[0] and "tier to move" in told[0], told
        assert "DisagreementError" in told[1] and "'disk'" in told[1] and "'host'" in told[1], told
        assert "OffloadError" in told[2] and "/dev/null" in told[2], told
