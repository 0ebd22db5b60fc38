"""Damaged, foreign and ill-fitting checkpoints: a typed error that names what is wrong, and nothing changes."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from shardopt import CheckpointError, ShardedAdamW, ShardedSGD, StateError
from shardopt.checkpoint import rng
from shardopt.checkpoint.inspect import verify
from shardopt.checkpoint.manifest import from_bytes, to_bytes
from shardopt.checkpoint.records import Manifest
from shardopt.checkpoint.typed_json import from_json
from tests.support.checkpoints import Cell, build, facts, save, train
from tests.support.ranks import Pool
from tests.support.training import raises


def small(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = ShardedAdamW(model, lr=0.1, **options)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


# -- bits --------------------------------------------------------------------------------------------------------------


def flipped(path: Path, bits: Callable[[int], list[int]]) -> int:
    """Flips bits of every file of a checkpoint, one at a time; how many of them were noticed by loading it."""
    model, optimizer = small(1)
    before = facts(model, optimizer)
    count = 0
    for name in sorted(os.listdir(path)):
        good = (path / name).read_bytes()
        for bit in bits(8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(bad)
            with raises(CheckpointError, name):
                shardopt.load_checkpoint(path, model, optimizer)
            count += 1
        (path / name).write_bytes(good)
    assert facts(model, optimizer) == before
    assert shardopt.load_checkpoint(path, model, optimizer).step == 1
    assert facts(model, optimizer) != before
    return count


def test_flipped_bits_are_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, *small())
    draw = random.Random(0)
    assert flipped(path, lambda count: sorted(draw.sample(range(count), min(count, 150)))) == 300


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "states", lambda device: {"torch": torch.arange(9, dtype=torch.uint8)})
    for name in ("check", "restore"):
        monkeypatch.setattr(rng, name, lambda saved, device: None)
    path = save(tmp_path, *small())
    assert flipped(path, lambda count: list(range(count))) > 40_000


def test_truncation_at_every_length_swaps_and_stale_files(tmp_path: Path) -> None:
    model, optimizer = small()
    train_more = (lambda: model(torch.randn(4, 3)).sum().backward(), optimizer.step)
    first = save(tmp_path / "a", model, optimizer)
    for each in train_more:
        each()
    second = save(tmp_path / "a", model, optimizer)
    before = facts(model, optimizer)
    file = second / "rank-00000.safetensors"
    good = file.read_bytes()
    for length in (*range(0, len(good), 101), len(good) - 1):
        file.write_bytes(good[:length])
        assert verify(second)
        with raises(CheckpointError, "rank-00000.safetensors", "truncated", "'0.weight' [0:6]"):
            shardopt.load_checkpoint(second, model, optimizer)
    file.write_bytes(good + b"\0")
    with raises(CheckpointError, "truncated or replaced", first.name):
        shardopt.load_checkpoint(second, model, optimizer)
    shutil.copy(first / file.name, file)  # of an older step, and otherwise alike
    with raises(CheckpointError, "another rank or checkpoint", "'0.weight' [0:6]"):
        shardopt.load_checkpoint(second, model, optimizer)
    file.unlink()
    for make in (lambda: None, lambda: os.mkfifo(file), lambda: file.symlink_to(first / file.name)):
        file.unlink(missing_ok=True)
        make()
        with raises(CheckpointError, file.name):
            shardopt.load_checkpoint(tmp_path / "a", model, optimizer)
    assert facts(model, optimizer) == before
    assert shardopt.load_checkpoint(first, model, optimizer).step == 1


def test_pointers_are_not_followed_out_of_the_directory(tmp_path: Path) -> None:
    path = save(tmp_path / "a", *small())
    for name in ("../b", "latest", path.name[:-1], "", path.name + "\n\n", "x" * 300):
        (tmp_path / "a" / "latest").write_text(name)
        with raises(CheckpointError, "latest"):
            shardopt.load_checkpoint(tmp_path / "a", *small(1))
    (tmp_path / "a" / "latest").unlink()
    assert shardopt.load_checkpoint(tmp_path / "a", *small(1)).path == path
    with raises(CheckpointError, "not a directory", "save_checkpoint"):
        shardopt.load_checkpoint(tmp_path / "none", *small(1))
    with raises(CheckpointError, "no checkpoint"):
        shardopt.load_checkpoint(tmp_path, *small(1))


def test_manifests_that_nobody_can_have_written(tmp_path: Path) -> None:
    """Their digest is right: only what they say is wrong."""
    path = save(tmp_path, *small())
    good = from_bytes((path / "manifest.json").read_bytes(), "")

    def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        content = json.loads(to_bytes(good))["manifest"]
        change(content)
        return to_bytes(from_json(Manifest, content))

    def weight(content: dict[str, Any]) -> Any:
        return content["tensors"]["params"]["0.weight"]["param"]

    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda c: weight(c)["ranges"].clear(),
        lambda c: weight(c)["ranges"][0].update(stop=5),
        lambda c: weight(c)["ranges"][0].update(start=1),
        lambda c: weight(c)["ranges"][0].update(offset=0),
        lambda c: weight(c)["ranges"][0].update(offset=1 << 40),
        lambda c: weight(c)["ranges"][0].update(crc32=""),
        lambda c: weight(c)["ranges"][0].update(file="rank-00001.safetensors"),
        lambda c: weight(c)["ranges"].append(weight(c)["ranges"][0]),
        lambda c: weight(c).update(shape=[1 << 40, 1 << 40]),
        lambda c: c["files"].update({"../rank-00000.safetensors": c["files"]["rank-00000.safetensors"]}),
        lambda c: weight(c)["ranges"][0].update(
            offset=c["tensors"]["params"]["0.weight"]["exp_avg"]["ranges"][0]["offset"]
        ),
    ]
    words = ["saved ranges of param of '0.weight' do not make up its"] * 9 + ["which no rank writes", "overlap"]
    for number, (change, told) in enumerate(zip(changes, words, strict=True)):
        (path / "manifest.json").write_bytes(changed(change))
        with raises(CheckpointError, told):
            shardopt.load_checkpoint(path, *small(1))
        assert verify(path), number
    (path / "manifest.json").write_bytes(changed(lambda c: None))
    assert shardopt.load_checkpoint(path, *small(1)).step == 1


# -- other models ------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, **cells: torch.Tensor):
        super().__init__()
        for name, weight in cells.items():
            setattr(self, name, Cell(weight))

    def forward(self, step: int) -> torch.Tensor:
        return torch.stack([cell(step) for cell in self.children()]).sum()


def two(make: Callable[[Any], Any] = ShardedAdamW, **cells: torch.Tensor) -> Any:
    model = Two(**cells)
    optimizer = make(model)
    model(0).backward()
    optimizer.step()
    return model, optimizer


def test_other_models_are_refused_by_name_and_loaded_in_part(tmp_path: Path) -> None:
    path = save(tmp_path, *two(a=torch.zeros(4), b=torch.zeros(2, 3)))
    fits, ones = {"a": torch.ones(4), "b": torch.ones(2, 3)}, torch.ones
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({**fits, "c": ones(5)}, ("'c.weight' [5] is missing",), "a"),
        ({"a": ones(4)}, ("'b.weight' [2, 3] is not in the model",), "a"),
        ({"a": ones(4), "z": ones(2, 3)}, ("'z.weight'", "renamed from 'b.weight'?"), "a"),
        ({"a": ones(4), "b": ones(3, 2)}, ("'b.weight' has shape [3, 2]", "[2, 3]"), "a"),
        ({"a": ones(4), "b": ones(2, 3).bfloat16()}, ("'b.weight' is of torch.bfloat16",), "a"),
        ({**fits, "make": lambda model: ShardedSGD(model, lr=0.1, momentum=0.9)}, ("'adam", "'sgd'"), "a"),
    ]
    for cells, words, loaded_name in cases:
        model, optimizer = two(**cells)
        before = facts(model, optimizer)
        with raises(CheckpointError, "Nothing was loaded", *words):
            shardopt.load_checkpoint(path, model, optimizer)
        assert facts(model, optimizer) == before
        found = shardopt.load_checkpoint(path, model, optimizer, strict=False)
        assert any(words[0] in each for each in found.mismatches), found.mismatches
        assert torch.equal(getattr(model, loaded_name).weight, two(a=torch.zeros(4))[0].a.weight)
        model(1).backward()
        optimizer.step()
    two_groups = lambda model: ShardedAdamW(  # noqa: E731
        [{"params": [model.a.weight]}, {"params": [model.b.weight]}], module=model
    )
    with raises(CheckpointError, "2 param groups", "group 0"):
        shardopt.load_checkpoint(path, *two(two_groups, **fits))
    model, _ = two(**fits)
    assert not shardopt.load_checkpoint(path, model).mismatches  # weights alone


def test_an_average_that_nobody_keeps_is_refused_with_the_keyword_that_keeps_it(tmp_path: Path) -> None:
    model, optimizer = two(lambda model: ShardedAdamW(model, ema=0.9), a=torch.zeros(4))
    path = save(tmp_path, model, optimizer)
    other, without = two(a=torch.ones(4))
    before = facts(other, without)
    with raises(CheckpointError, "found ['exp_avg', 'exp_avg_sq', 'ema'] (", "given ema=", "Nothing was loaded"):
        shardopt.load_checkpoint(path, other, without)
    with raises(StateError, "an average of the weights", "with ema=, or take 'ema' out", "nothing was loaded"):
        without.load_state_dict(optimizer.state_dict())
    assert facts(other, without) == before
    loaded = shardopt.load_checkpoint(path, other, without, strict=False)
    assert "'ema'" in loaded.mismatches[0]
    (state,), (saved,) = (list(dict(each.state).values()) for each in (without, optimizer))
    assert state["step"] == saved["step"] and torch.equal(state["exp_avg_sq"], saved["exp_avg_sq"])
    assert "ema" not in state


def test_what_else_does_not_fit_is_listed(tmp_path: Path) -> None:
    """A buffer of another shape or dtype, a param that nobody trains, another number of optimizers."""

    def of(model: nn.Module, *parts: nn.Module, buffer: torch.Tensor) -> Any:
        model.register_buffer("kept", buffer)
        made = [ShardedSGD(each.parameters(), lr=0.5, momentum=0.5) for each in parts]
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        for optimizer in made:
            optimizer.step()
        return model, made

    def one(**weights: torch.Tensor) -> Any:
        return Two(**weights)

    cells = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    model = one(**cells)
    path = save(tmp_path, *of(model, model.a, buffer=torch.zeros(3)))
    for buffer, both, words in (
        (torch.ones(2), False, ("buffer 'kept' is [2] of torch.float32, in the checkpoint [3] of torch.float32",)),
        (torch.ones(3).int(), False, ("buffer 'kept' is [3] of torch.int32, in the checkpoint [3] of torch.float32",)),
        (
            torch.ones(3),
            True,
            (
                "param 'b.weight' is in no optimizer in the checkpoint",
                "2 optimizers were given, the checkpoint holds 1",
            ),
        ),
    ):
        other = one(a=torch.ones(4), b=torch.ones(2, 3))
        parts = (other.a, other.b) if both else (other.a,)
        _, optimizers = of(other, *parts, buffer=buffer.clone())
        before = [param.detach().clone() for param in other.parameters()]
        with raises(CheckpointError, "Nothing was loaded", *words):
            shardopt.load_checkpoint(path, other, optimizers)
        assert all(torch.equal(*pair) for pair in zip(other.parameters(), before, strict=True))
        found = shardopt.load_checkpoint(path, other, optimizers, strict=False)
        assert all(word in found.mismatches for word in words), found.mismatches
        assert all(torch.equal(*pair) for pair in zip(other.parameters(), model.parameters(), strict=True))
        assert torch.equal(other.kept, torch.zeros(3) if both else buffer)
    reversed_ = one(**cells)
    saved = save(tmp_path / "both", *of(reversed_, reversed_, buffer=torch.zeros(3)))
    other = one(**cells)
    with raises(CheckpointError, "param 'b.weight' is in no optimizer here"):
        shardopt.load_checkpoint(saved, *of(other, other.a, buffer=torch.zeros(3)))


@pytest.mark.parametrize(("key", "value"), [("lr", 1e39), ("capturable", True), ("differentiable", True)])
def test_groups_that_no_step_can_use_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    """A number that is finite here and infinite in the kernel, and what a constructor refuses."""
    model, optimizer = two(a=torch.zeros(4))
    optimizer.param_groups[0][key] = value
    save(tmp_path, model, optimizer)
    other, fresh = two(a=torch.ones(4))
    before = facts(other, fresh)
    with raises(CheckpointError, "group 0 of optimizer 0 holds hyper-parameters that no step", key, "Nothing was"):
        shardopt.load_checkpoint(tmp_path, other, fresh)
    assert facts(other, fresh) == before


def test_what_has_no_values_no_name_or_no_dense_elements_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        meta = nn.Linear(3, 2)
    sparse = nn.Linear(3, 2)
    sparse.register_buffer("mask", torch.eye(3).to_sparse())
    for model, optimizer, words in (
        (meta, None, ("call bind() first", "'weight' is on the meta device")),
        (meta, ShardedAdamW(meta, stage=3), ("call bind() first", "'weight' is on the meta device")),
        (sparse, None, ("to a dense tensor of a common dtype", "mask", "Nothing was saved")),
        (nn.Linear(3, 2), ShardedAdamW(nn.Linear(3, 2).parameters()), ("give the module that holds all params",)),
    ):
        with raises(CheckpointError, *words):
            save(tmp_path, model, optimizer)
        assert not list(tmp_path.glob("*"))
    path = save(tmp_path, nn.Linear(3, 2), None)
    with raises(CheckpointError, "give the optimizer of 'weight' too", "no memory to load into"):
        shardopt.load_checkpoint(path, meta)


def test_gradients_that_nobody_would_add_to_are_not_lost(tmp_path: Path) -> None:
    """Those of a checkpoint in the middle of an accumulation need the module, as the one that was saved had it."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = ShardedSGD(model, lr=0.5, stage=2)
    model(torch.ones(1, 3)).sum().backward()
    save(tmp_path, model, optimizer)
    before = other.weight.detach().clone()
    for given in ({"params": other.parameters()}, {"params": other, "release_gradients": True}):
        alone = ShardedSGD(**given, lr=0.5)  # type: ignore[arg-type]
        with raises(CheckpointError, "hand the module over", "accumulated gradients of", "would be lost"):
            shardopt.load_checkpoint(tmp_path, other, alone)
        assert torch.equal(other.weight, before)
        alone.close()


def test_ties_buffers_and_unbound_optimizers(tmp_path: Path) -> None:
    path = save(tmp_path, *two(a=torch.zeros(4), b=torch.zeros(4)))
    tied = Two(a=torch.ones(4), b=torch.ones(4))
    tied.b.weight = tied.a.weight
    with raises(CheckpointError, "tied to 'b.weight'"):
        shardopt.load_checkpoint(path, tied, ShardedAdamW(tied))
    saved = save(tmp_path / "tied", tied, ShardedAdamW(tied))
    with raises(CheckpointError, "one tied param"):
        shardopt.load_checkpoint(saved, *two(a=torch.zeros(4), b=torch.zeros(4)))
    with raises(CheckpointError, "buffer '1.running_mean'"):
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
        shardopt.load_checkpoint(save(tmp_path / "norm", *small()), other, ShardedAdamW(other))


def test_a_buffer_that_was_expanded(tmp_path: Path) -> None:
    """It is saved; torch cannot write to it, so it is refused before anything is loaded. A clone of it loads."""
    (model, optimizer), (other, again) = small(), small(1)
    model.register_buffer("expanded", torch.ones(3, 1).expand(3, 2))
    other.register_buffer("expanded", torch.zeros(1).expand(3, 2))
    path = save(tmp_path, model, optimizer)
    before = facts(other, again)
    with raises(CheckpointError, "buffer 'expanded' was expanded", "clone()", "othing was loaded"):
        shardopt.load_checkpoint(path, other, again)
    assert facts(other, again) == before
    other.expanded = other.expanded.clone()
    shardopt.load_checkpoint(path, other, again)
    assert torch.equal(other.expanded, torch.ones(3, 2)) and torch.equal(other[0].weight, model[0].weight)


# -- one rank alone ----------------------------------------------------------------------------------------------------


def damaged_for_one(root: Path) -> None:
    """Rank 1 needs a range that is damaged, or cannot write: both ranks raise, nothing changes, and they can go on."""
    rank = torch.distributed.get_rank()
    model, optimizer = build(3)
    train(model, optimizer, range(2))
    path = save(root, model, optimizer)
    train(model, optimizer, range(2, 3))
    before = facts(model, optimizer)
    if rank == 1:
        file = path / "rank-00001.safetensors"
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    torch.distributed.barrier()
    with raises(CheckpointError, "rank-00001.safetensors", "rng '1'" if rank else "rank 1 failed"):
        shardopt.load_checkpoint(root, model, optimizer)
    with raises(CheckpointError, "extra" if rank == 1 else "rank 1 failed"):
        save(root, model, optimizer, extra={"bad": object()} if rank == 1 else {})
    with raises(CheckpointError, "ranks differ", "step", "0 on rank 0, 1 on rank 1"):
        save(root, model, optimizer, step=rank)
    with raises(CheckpointError, "not a directory"):
        shardopt.load_checkpoint(root / "none", model, optimizer)
    assert facts(model, optimizer) == before
    train(model, optimizer, range(3, 4))
    save(root, model, optimizer)
    shardopt.load_checkpoint(root, model, optimizer)
    assert sorted(each.name[:6] for each in root.iterdir()) == ["000001", "000002", "latest"]


def test_what_goes_wrong_on_one_rank_is_raised_on_all(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(damaged_for_one, tmp_path, world=2)


# -- what must not be saved --------------------------------------------------------------------------------------------


def poisoned(root: Path) -> None:
    """An Inf or NaN on one rank alone, in a state that nobody reads until it is too late."""
    model, optimizer = build(2)
    train(model, optimizer, range(2))
    save(root, model, optimizer)
    before = sorted(path.name for path in root.iterdir())
    (shard, *_) = optimizer.engine.domain.shards
    if dist.get_rank() == 1:
        for value in (float("nan"), float("inf")):
            exp_avg = shard.whole("exp_avg_sq")
            kept = exp_avg[5].clone()
            exp_avg[5] = value
            for asynchronous in (False, True):
                with raises(CheckpointError, "exp_avg_sq of", str(value), "allow_nonfinite"):
                    shardopt.save_checkpoint(root, model, optimizer, asynchronous=asynchronous).wait()
            exp_avg[5] = kept
    else:
        for _ in range(4):
            with raises(CheckpointError, "rank 1", "exp_avg_sq of"):
                shardopt.save_checkpoint(root, model, optimizer, asynchronous=bool(_ % 2)).wait()
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith("saving-")) == before
    if dist.get_rank() == 1:
        shard.whole("exp_avg_sq")[5] = float("nan")
    saving = shardopt.save_checkpoint(root, model, optimizer, allow_nonfinite=True)
    assert saving.path.is_dir()


def test_nothing_that_is_not_finite_is_saved(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(poisoned, tmp_path, world=2)
