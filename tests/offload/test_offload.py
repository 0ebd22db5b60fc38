"""Where states rest changes no bit: every rule, every stage, every call that reads or sets states."""

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

import shardopt
from shardopt import (
    BindingError,
    Offload,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    Tuning,
)
from shardopt.domain.tiers import check_offload
from tests.step.test_stages import STAGES
from tests.support.cases import CASES, Case, Keywords
from tests.support.offloaded import CHUNK, advance, at_rest, bits, check_trainings, make
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep_at_once
from tests.support.training import raw

# -- one rank ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_leaves_the_same_bits(case: Case, tmp_path: Path) -> None:
    grid: list[tuple[torch.dtype, Keywords]] = [(torch.float32, {}), (torch.bfloat16, case.keywords[-1])]
    tiers = [tmp_path, "cpu", Offload(tmp_path, fraction=0.4)]
    for number, (dtype, keywords) in enumerate(grid):
        ends, turn = [], (CASES.index(case) + number) % 2  # over all cases every tier meets both
        for offload in (None, *tiers[turn::2]):
            params, optimizer = make(case.ours, offload, dtype, **keywords)
            advance(params, optimizer, range(4))
            ends.append(bits(params, optimizer))
            optimizer.close()
        assert all(end == ends[0] for end in ends[1:]), (dtype, keywords)
    assert not os.listdir(tmp_path)


def test_a_flag_turned_on_in_mid_training_makes_its_state(tmp_path: Path) -> None:
    ends = []
    for offload in (None, tmp_path):
        params, optimizer = make(ShardedAdamW, offload, torch.bfloat16)
        advance(params, optimizer, range(2))
        optimizer.param_groups[0]["amsgrad"] = True
        advance(params, optimizer, range(2, 5))
        ends.append(bits(params, optimizer))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_saved_and_loaded_from_where_they_rest(dtype: torch.dtype, tmp_path: Path) -> None:
    def state_dict_of(optimizer: ShardedOptimizer) -> dict[str, Any]:
        return copy.deepcopy(optimizer.state_dict())

    params, optimizer = make(ShardedAdamW, tmp_path, dtype, amsgrad=True)
    advance(params, optimizer, range(3))
    kept = optimizer.state_dict()  # live, as torch's is, until states are loaded
    saved, weights = state_dict_of(optimizer), [param.detach().clone() for param in params]
    twins, (others, twin) = copy.deepcopy((params, optimizer)), make(ShardedAdamW, None, dtype, amsgrad=True)
    advance(params, optimizer, range(3, 6))
    expected = bits(params, optimizer)
    for index, state in state_dict_of(optimizer)["state"].items():
        assert all(raw(value) == raw(kept["state"][index][name]) for name, value in state.items())

    def restore(params: list[Parameter], optimizer: ShardedOptimizer) -> list[bytes]:
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
        optimizer.load_state_dict(saved)
        advance(params, optimizer, range(3, 6))
        return bits(params, optimizer)

    assert restore(others, twin) == expected  # from disk into memory
    assert restore(params, optimizer) == expected  # into the file that goes on
    assert restore(*make(ShardedAdamW, tmp_path, dtype, amsgrad=True)) == expected  # before it is made
    advance(*twins, range(3, 6))
    assert bits(*twins) == expected
    optimizer.state = {}
    assert not optimizer.state_dict()["state"]


def test_weights_that_were_loaded_reach_the_masters(tmp_path: Path) -> None:
    ends = []
    for offload in (None, tmp_path):
        params, optimizer = make(ShardedAdamW, offload, torch.bfloat16)
        advance(params, optimizer, range(2))
        with torch.no_grad():
            params[-1][1000:1100] = 0.25
        advance(params, optimizer, range(2, 3))
        for param in params:
            param.data.mul_(2)
        advance(params, optimizer, range(4, 5))
        ends.append(bits(params, optimizer))
    assert ends[0] == ends[1]


def test_memory_and_room(tmp_path: Path) -> None:
    """At most 6 chunks and one low-precision shard above the params; the file holds two copies."""
    params = [Parameter(torch.ones(40 * 1024, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ShardedAdamW(params, offload=tmp_path, tuning=Tuning(chunk_bytes=CHUNK))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    numel = 80 * 1024
    memory = optimizer.memory()
    assert memory["master"] == {"disk": 4 * numel} and memory["state"] == {"disk": 8 * numel}
    assert memory["param"] == memory["gradient"] == {"device": 2 * numel}
    assert memory["buffer"]["host"] <= 4 * 3 * CHUNK + 2 * numel + CHUNK  # and one transfer's outside of steps
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert file.stat().st_size == 4096 + 2 * 12 * numel <= 512 * file.stat().st_blocks
    in_memory = ShardedAdamW([Parameter(torch.ones(5))], offload="cpu")
    in_memory.param_groups[0]["params"][0].grad = torch.ones(5)
    in_memory.step()
    assert in_memory.memory()["state"] == {"host": 2 * 1024}


def test_what_is_not_offered_is_refused(tmp_path: Path) -> None:
    nonsense: list[dict[str, Any]] = [{"step": "disk"}, {"gradients": "/tmp"}, {"params": "/tmp"}]
    for wrong in nonsense:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Offload(**wrong)
    for word in ("disk", "gpu", "CPU"):
        with pytest.raises(ValueError, match=f"'./{word}'"):  # it would be a directory where the script runs
            ShardedSGD(torch.nn.Linear(2, 2), lr=0.5, offload=word)
    assert Offload("./disk").directory == Offload(Path("disk")).directory
    model = torch.nn.Linear(2, 2)
    for stage, vain in ((1, Offload(gradients="cpu")), (2, Offload(params="cpu"))):
        with pytest.raises(ValueError, match="no effect"):
            ShardedSGD(model, lr=0.5, stage=stage, offload=vain)
    params = [Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    expected = ShardedSGD([Parameter(params[0].detach().clone())], lr=0.5)
    expected.param_groups[0]["params"][0].grad = torch.ones(3)
    for optimizer in (expected, ShardedSGD(params, lr=0.5, offload=Offload(tmp_path))):
        optimizer.step()
    assert torch.equal(params[0], expected.param_groups[0]["params"][0])
    file = tmp_path / "a file"
    file.write_text("not a directory")
    with pytest.raises(shardopt.OffloadError, match="a file"):
        optimizer = ShardedSGD(params, lr=0.5, offload=file)
        optimizer.step()


def test_a_cpu_refuses_what_takes_a_gpu(tmp_path: Path) -> None:
    """What params on a GPU refuse is in test_cpu_step.py."""
    for fine in (None, Offload("cpu"), Offload(tmp_path), Offload(step="cpu"), Offload(params="cpu")):
        check_offload(fine, torch.device("cpu"))
    with pytest.raises(BindingError, match="nothing was bound"):
        check_offload(Offload(step="gpu"), torch.device("cpu"))
    check_offload(Offload(step="gpu"), torch.device("cuda", 0))


# -- several ranks -----------------------------------------------------------------------------------------------------


def ways(root: Path) -> dict[str, Offload]:
    return {
        "cpu": Offload(),
        "disk": Offload(root),
        "part": Offload(root, fraction=0.4),
        "gradients too": Offload(root, gradients="cpu"),
    }


RECIPES = ("clips in the step", "SGD", "overflows")
AXES = {"stage": STAGES, "neighbours": (True, False), "way": tuple(ways(Path())), "recipe": RECIPES}


def allowed(stage: int, way: str, **_: Any) -> bool:
    return stage >= 2 or way != "gradients too"


@sweep_at_once(AXES, allowed=allowed)
def test_every_stage_leaves_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    calls = [
        (recipe, at_rest(stage, neighbours, stage % 2 == 0, live_bytes=6000, offload=ways(tmp_path / str(stage))[way]))
        for stage, neighbours, way, recipe in rows
    ]
    check_trainings(calls, ranks, 2)
    # Nothing was closed; at stage 3 a sharded module keeps its optimizer until it is.
    assert not any(os.listdir(tmp_path / stage) for stage in "012")


@sweep_at_once({"world": (2, 1), "live_bytes": (6000, 1 << 20), "recipe": RECIPES}, strength=1)
def test_params_in_a_file_leave_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    for world in (1, 2):
        calls = [
            (
                recipe,
                at_rest(3, neighbours=False, live_bytes=live, offload=Offload(tmp_path, params=tmp_path)),
            )
            for number, live, recipe in rows
            if number == world
        ]
        check_trainings(calls, ranks, world)


def saved_on_rank_0(offload: str | None) -> list[bytes]:
    """What one rank saves alone, while the others wait."""
    params, optimizer = make(ShardedAdamW, offload, torch.bfloat16)
    advance(params, optimizer, range(3))
    found: list[bytes] = []
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)["state"]
        found = [raw(value) for index in sorted(state) for value in state[index].values()]
    dist.barrier()
    optimizer.close()
    return found


def test_one_rank_saves_alone_what_rests_on_every_ranks_disk(ranks: Pool, tmp_path: Path) -> None:
    expected, _ = ranks.run(saved_on_rank_0, None, world=2)
    found, _ = ranks.run(saved_on_rank_0, str(tmp_path), world=2)
    assert found == expected and len(found) > 20
    assert not os.listdir(tmp_path)
