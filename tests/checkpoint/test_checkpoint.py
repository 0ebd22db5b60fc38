"""Checkpoints: every bit back at any number of ranks, stage and bucket size; whatever does not fit is named."""

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import CheckpointError
from shardopt.checkpoint.records import CHUNK_BYTES
from tests.support.checkpoints import build, draws, facts, save, train
from tests.support.cuts import small_chunks
from tests.support.ranks import Pool
from tests.support.training import Net, digest, loss_of, raises

STAGES = (0, 1, 2, 3)

# -- the same bits everywhere ------------------------------------------------------------------------------------------


def uninterrupted(kind: str) -> dict[int, dict[str, str]]:
    model, optimizer = build(0, kind=kind)
    found = {}
    for steps in (range(2), range(2, 4), range(4, 6)):
        train(model, optimizer, steps)
        found[steps.stop] = facts(model, optimizer)
    return found


def begun(root: Path, kind: str) -> list[Any]:
    found = []
    for stage in STAGES:
        model, optimizer = build(stage, kind=kind)
        train(model, optimizer, range(2))
        save(root / str(stage), model, optimizer, extra={"stage": stage, "pair": (1.5, torch.arange(3))})
        found.append(facts(model, optimizer))
    return found


def gone_on(root: Path, kind: str, pairs: list[tuple[int, int]], steps: range) -> list[Any]:
    found = []
    for number, (before, stage) in enumerate(pairs):
        # Other weights, other bucket sizes, and in every other case states, and gathered params, of another training.
        model, optimizer = build(stage, 5, kind, bucket_bytes=1500 + 700 * stage, live_bytes=number % 2 << 20)
        if number % 2:
            train(model, optimizer, range(50, 52))
        loaded = shardopt.load_checkpoint(root / str(before), model, optimizer)
        assert loaded["stage"] == before % 10 and loaded["pair"][0] == 1.5 and loaded.step == steps.start
        assert torch.equal(loaded["pair"][1], torch.arange(3)) and not loaded.mismatches
        just_loaded = facts(model, optimizer)
        train(model, optimizer, steps)
        save(root / str(100 + 10 * before + stage), model, optimizer, extra=dict(loaded, stage=stage))
        found.append((just_loaded, facts(model, optimizer)))
    return found


def two_then_three_then_one(ranks: Pool, root: Path, kind: str, shifts: dict[int, int]) -> None:
    """From each stage to one so many further, on three ranks; from there to one further by the other number, on one."""
    (expected,) = ranks.run(uninterrupted, kind, world=1)
    for whole, found in enumerate(zip(*ranks.run(begun, root, kind, world=2), strict=True)):
        assert same_on_all(found, expected[2]), f"stage {whole}"
    pairs = [(before, (before + shift) % 4) for before in STAGES for shift in shifts]
    last = [(100 + 10 * before + stage, (stage + shifts[(stage - before) % 4]) % 4) for before, stage in pairs]
    for its_pairs, world, steps in ((pairs, 3, range(2, 4)), (last, 1, range(4, 6))):
        results = ranks.run(gone_on, root, kind, its_pairs, steps, world=world)
        for pair, by_rank in zip(its_pairs, zip(*results, strict=True), strict=True):
            assert same_on_all([loaded for loaded, _ in by_rank], expected[steps.start]), f"{pair} when loaded"
            assert same_on_all([after for _, after in by_rank], expected[steps.stop]), f"{pair} later"


def test_two_then_three_ranks_then_one_and_every_pair_of_stages(ranks: Pool, tmp_path: Path) -> None:
    """Half of the pairs on three ranks, the other half on one."""
    two_then_three_then_one(ranks, tmp_path, "AdamW", {0: 1, 2: 3})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_every_pair_of_stages_on_three_ranks_and_on_one(ranks: Pool, tmp_path: Path, kind: str) -> None:
    two_then_three_then_one(ranks, tmp_path, kind, {0: 1, 1: 2, 2: 3, 3: 0})


def accumulate(model: nn.Module, optimizer: shardopt.ShardedOptimizer, turn: int, stage: int) -> None:
    """Three backwards to a step; at stage 1 the second one is not reduced."""
    if turn == 0:
        optimizer.zero_grad()
    with optimizer.no_sync() if turn == 1 and stage == 1 else nullcontext():
        model(10 + turn).backward()
    if turn == 2:
        optimizer.step()


def cut_short(root: Path, stage: int, turns: int, gradient_format: str) -> None:
    model, optimizer = build(stage, gradient_format=gradient_format)
    train(model, optimizer, range(2))
    for turn in range(turns):
        accumulate(model, optimizer, turn, stage)
    save(root, model, optimizer)


def goes_on(root: Path, stage: int, before: int, turns: int, gradient_format: str) -> dict[str, str]:
    model, optimizer = build(stage, 5, bucket_bytes=1200, gradient_format=gradient_format)
    model(3).backward()  # what is there already is dropped
    shardopt.load_checkpoint(root, model, optimizer)
    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None] if before != 1 else []
    assert all(norm.isfinite() for norm in norms)
    for turn in range(turns, 3):
        accumulate(model, optimizer, turn, before)
    return facts(model, optimizer)


def does_not_go_on(root: Path, stage: int) -> None:
    model, optimizer = build(stage, 5)
    with raises(CheckpointError, "no_sync()", "as many ranks"):
        shardopt.load_checkpoint(root, model, optimizer)
    train(model, optimizer, range(1))


def test_in_the_middle_of_an_accumulation(ranks: Pool, tmp_path: Path) -> None:
    (expected,) = ranks.run(whole_accumulation, world=1)
    for stage in STAGES[1:]:
        for turns in (1, 2):
            root = tmp_path / f"{stage}-{turns}"
            ranks.run(cut_short, root, stage, turns, ("fp32", "bf16")[turns % 2], world=2)
            for other, world in ((stage, 2), (1 + stage % 3, 3), (0, 1)):
                if stage == 1 and turns == 2 and world != 2:  # each rank's own: they are not for others
                    ranks.run(does_not_go_on, root, other, world=world)
                    continue
                found = ranks.run(goes_on, root, other, stage, turns, ("fp32", "bf16")[world % 2], world=world)
                assert same_on_all(found, expected), f"stage {stage} after {turns} to {other} on {world}"


def test_gradients_are_saved_until_a_step_has_used_them(tmp_path: Path) -> None:
    """A step that was refused leaves them for the next attempt."""
    for factor, is_kept in ((torch.inf, True), (1.0, False)):
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer = shardopt.ShardedSGD(model, lr=0.1, stage=2, tuning=shardopt.Tuning(nonfinite="raise"))
        (model(torch.ones(1, 3)).sum() * factor).backward()
        with raises(shardopt.ShardoptError, "Inf or NaN") if is_kept else nullcontext():
            optimizer.step()
        shardopt.save_checkpoint(tmp_path, model, optimizer)
        again = shardopt.ShardedSGD(other, lr=0.1, stage=2)
        shardopt.load_checkpoint(tmp_path, other, again)
        assert all((param.grad is not None) == is_kept for param in other.parameters())


def test_gradients_that_were_loaded_are_saved_again(tmp_path: Path) -> None:
    """Also by an optimizer whose last step had used its own."""
    models = [nn.Linear(3, 2) for _ in range(3)]
    first, second, third = (shardopt.ShardedSGD(model, lr=0.5, stage=2) for model in models)
    models[0](torch.ones(1, 3)).sum().backward()
    shardopt.save_checkpoint(tmp_path, models[0], first)
    models[1](torch.ones(1, 3)).sum().backward()
    second.step()
    shardopt.load_checkpoint(tmp_path, models[1], second)
    shardopt.save_checkpoint(tmp_path, models[1], second)
    shardopt.load_checkpoint(tmp_path, models[2], third)
    third.step()
    assert torch.equal(models[2].weight, models[0].weight - 0.5)


def rolled_back(root: Path) -> None:
    """A gradient that a step has used is gone with a checkpoint, and stays with a state dict, as in torch.

    What is absent is no zero: a param that the next backward does not reach is skipped, and has no decay.
    """
    for stage in STAGES:
        found = []
        for is_new in (False, True):
            torch.manual_seed(1)
            model = nn.ModuleList((nn.Linear(40, 30), nn.Linear(40, 30)))
            optimizer = shardopt.ShardedSGD(model, lr=0.5, momentum=0.5, weight_decay=0.1, stage=stage)
            optimizer.bind()
            if not is_new:
                sum(each(torch.ones(1, 40)).sum() for each in model).backward()
                optimizer.step()
                shardopt.save_checkpoint(root / str(stage), model, optimizer)
                optimizer.load_state_dict(optimizer.state_dict())
                assert all(param.grad is not None for param in model.parameters())
                optimizer.step()
            shardopt.load_checkpoint(root / str(stage), model, optimizer)
            assert all(param.grad is None for param in model.parameters())
            optimizer.zero_grad(set_to_none=False)
            model[0](torch.ones(1, 40)).sum().backward()
            optimizer.step()
            with optimizer.unsharded():
                found.append([param.detach().numpy().tobytes() for param in model.parameters()])
            optimizer.close()
        assert found[0] == found[1], f"stage {stage}"


def test_a_load_goes_on_as_one_in_a_new_process(ranks: Pool, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks.run(rolled_back, tmp_path / str(world), world=world)


def whole_accumulation() -> dict[str, str]:
    model, optimizer = build(0)
    train(model, optimizer, range(2))
    for turn in range(3):
        accumulate(model, optimizer, turn, 0)
    return facts(model, optimizer)


def from_tier_to_tier(root: Path, disk: str) -> list[dict[str, str]]:
    found = []
    for number, (stage, offload) in enumerate([(2, disk), (3, None), (1, disk), (3, disk), (0, "cpu"), (2, disk)]):
        model, optimizer = build(stage, number, bucket_bytes=1500 + 700 * number, offload=offload)
        if number % 3 == 2:  # over states that rest there already
            train(model, optimizer, range(50, 52))
        if number:
            shardopt.load_checkpoint(root, model, optimizer)
        train(model, optimizer, range(2 * number, 2 * number + 2))
        save(root, model, optimizer)
        found.append(facts(model, optimizer))
        optimizer.close()
    return found


def test_every_tier(ranks: Pool, tmp_path: Path) -> None:
    """On disk, in memory and back: bit for bit."""
    for world in (1, 2):
        (root, disk), expected = (tmp_path / f"{name}{world}" for name in ("runs", "disk")), []
        model, optimizer = build(0)
        for number in range(6):
            train(model, optimizer, range(2 * number, 2 * number + 2))
            expected.append(facts(model, optimizer))
        disk.mkdir()
        for found in zip(*ranks.run(from_tier_to_tier, root, str(disk), world=world), strict=True):
            assert same_on_all(found, expected.pop(0))
        assert not list(disk.iterdir())


def same_on_all(found: Sequence[dict[str, str]], expected: dict[str, str]) -> bool:
    """Rank 0 knows all, the others know the values of the module."""
    return found[0] == expected and all(each.items() <= expected.items() for each in found)


def hybrid(root: Path, stage: int, **formats: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(stage, group=mesh, **formats)
    train(model, optimizer, range(2))
    path = save(root, model, optimizer)
    sizes = [each.stat().st_size for each in sorted(path.glob("*.safetensors"))]
    return facts(model, optimizer), sizes


def loaded_alone(root: Path, **options: Any) -> dict[str, str]:
    model, optimizer = build(1, seed=4, **options)
    shardopt.load_checkpoint(root, model, optimizer)
    return facts(model, optimizer)


@pytest.mark.parametrize("stage, formats", [(0, {}), (3, {"state_format": "int8", "master": "split"})])
def test_ranks_that_hold_copies_share_the_writing(
    ranks: Pool, tmp_path: Path, stage: int, formats: dict[str, str]
) -> None:
    expected, sizes = ranks.run(functools.partial(hybrid, **formats), tmp_path, stage, world=4)[0]
    assert max(sizes) < 0.5 * sum(sizes)
    assert ranks.run(functools.partial(loaded_alone, **formats), tmp_path, world=1) == [expected]


def test_another_storage_order_is_the_same_tensor(ranks: Pool, tmp_path: Path) -> None:
    """A transposed param, and its states, loaded into one that is not; the numbers are the same, their order is not."""
    ranks.run(hybrid, tmp_path, 2, world=4)
    assert ranks.run(loaded_alone, tmp_path, world=1) == ranks.run(loaded_in_order, tmp_path, world=2)[:1]


def loaded_in_order(root: Path) -> dict[str, str]:
    model, optimizer = build(3, seed=4, transposed=False)
    shardopt.load_checkpoint(root, model, optimizer)
    return facts(model, optimizer)


# -- everything else that a script has ---------------------------------------------------------------------------------


def a_whole_script(root: Path, is_resumed: bool) -> Any:
    """DDP, two optimizers that know nothing of the module, a scheduler, dropout, a step that goes on from a file."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(Net(), nn.Dropout(0.3)))
    params = list(model.parameters())
    optimizers = [shardopt.ShardedAdamW(params[:5], lr=0.1), shardopt.ShardedLion(params[5:], lr=0.01)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3) for optimizer in optimizers]
    for _ in range(1 if is_resumed else 3):  # every generator has gone on when the checkpoint is made
        draws()
    found: list[Any] = []
    first = 0
    if is_resumed:
        extra = shardopt.load_checkpoint(root, model, optimizers)
        for scheduler, state in zip(schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        first = extra.step
    for step in range(first, 6):
        if step == 3 and not is_resumed:
            states = [scheduler.state_dict() for scheduler in schedulers]
            save(root, model, optimizers, extra={"schedulers": states})
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        if step >= 3:
            found.append((loss.item(), draws(), [digest(optimizer) for optimizer in optimizers]))
    return found


def test_a_skipped_step_has_used_its_gradients(tmp_path: Path) -> None:
    """They are not saved: an Inf that was skipped would come back with the checkpoint."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = shardopt.ShardedSGD(model, lr=0.1, stage=2)
    (model(torch.ones(1, 3)).sum() * torch.inf).backward()
    with pytest.warns(UserWarning, match="all ranks skipped this step"):
        optimizer.step()
    shardopt.save_checkpoint(tmp_path, model, optimizer)
    again = shardopt.ShardedSGD(other, lr=0.1, stage=2)
    shardopt.load_checkpoint(tmp_path, other, again)
    assert all(param.grad is None for param in other.parameters())


def test_a_compiled_module_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model, other = Net(1), Net(2)
    optimizer = shardopt.ShardedAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    compiled = torch.compile(model, backend="eager")
    saving = shardopt.save_checkpoint(tmp_path, compiled, optimizer, asynchronous=True)
    shardopt.save_checkpoint(tmp_path, model, optimizer)  # of one module: it waits for the save before
    assert saving.done
    again = shardopt.ShardedAdamW(other)
    shardopt.load_checkpoint(saving.wait(), torch.compile(other, backend="eager"), again)
    assert digest(again) == digest(optimizer)


def test_tensors_with_gaps_in_memory(tmp_path: Path) -> None:
    """Buffers that are views of every other column, which have no view in one dimension."""

    def module_with(values: torch.Tensor) -> nn.Module:
        module = Net()
        module.register_buffer("gaps", values[1:, ::2])
        return module

    saved, other = torch.arange(120.0).view(6, 4, 5), torch.full((6, 4, 5), -1.0)
    with small_chunks(16):
        shardopt.save_checkpoint(tmp_path, module_with(saved))
        shardopt.load_checkpoint(tmp_path, module_with(other))
    expected = torch.full((6, 4, 5), -1.0)
    expected[1:, ::2] = saved[1:, ::2]
    assert torch.equal(other, expected)


def test_a_script_goes_on_as_if_it_had_not_stopped(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks.run(a_whole_script, tmp_path, False, world=2)
    assert whole[0][0][1] != whole[1][0][1], "ranks draw other random numbers"
    assert ranks.run(a_whole_script, tmp_path, True, world=2) == whole


def frozen_and_unfrozen(root: Path) -> None:
    """States of params that nothing trains at the moment, and what a model has before its first step."""
    model, optimizer = build(1)
    save(root / "new", model, optimizer)
    train(model, optimizer, range(2))
    model.cells[5].weight.requires_grad_(False)
    expected = facts(model, optimizer)
    save(root / "frozen", model, optimizer)
    other, fresh = build(1, seed=3)
    other.cells[5].weight.requires_grad_(False)
    shardopt.load_checkpoint(root / "frozen", other, fresh)
    save(root / "again", other, fresh)
    for each in (other, model):
        each.cells[5].weight.requires_grad_(True)
    train(other, fresh, range(2, 3))
    train(model, optimizer, range(2, 3))
    assert facts(other, fresh) == facts(model, optimizer)
    shardopt.load_checkpoint(root / "again", model, optimizer)
    assert facts(model, optimizer) == expected
    shardopt.load_checkpoint(root / "new", model, optimizer)
    train(model, optimizer, range(3))
    new, newer = build(1)
    train(new, newer, range(3))
    assert facts(model, optimizer) == facts(new, newer)


def test_params_that_are_frozen_and_models_that_are_new(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(frozen_and_unfrozen, tmp_path, world=2)


class Plain(nn.Module):
    """Of modules that know how to initialise themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return self.layers(torch.randn(8, 30, generator=generator)).square().sum()


def on_meta(root: Path) -> None:
    """A model without memory is loaded as well as one that has some."""
    torch.manual_seed(1)
    tuning = shardopt.Tuning(keep_below=100, bucket_bytes=3000, live_bytes=0)
    model = Plain()
    optimizer = shardopt.ShardedAdamW(model, stage=3, tuning=tuning)
    for step in range(4):
        if step == 2:
            save(root, model, optimizer)
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    with torch.device("meta"):
        other = Plain()
    fresh = shardopt.ShardedAdamW(other, stage=3, tuning=tuning)
    shardopt.load_checkpoint(root, other, fresh)
    for step in range(2, 4):
        fresh.zero_grad()
        other(step).backward()
        fresh.step()
    assert facts(other, fresh) == facts(model, optimizer)


def test_a_model_on_the_meta_device(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(on_meta, tmp_path, world=2)


def peak(action: Callable[[], object]) -> int:
    """Bytes of memory that were in use above those before."""

    def read(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


def memory_needed(root: Path) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = shardopt.ShardedAdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save(root, model, optimizer, keep=1)  # what is loaded and compiled at first
    shardopt.load_checkpoint(root, model, optimizer)
    return [
        peak(lambda: save(root, model, optimizer, keep=1)),
        peak(lambda: shardopt.load_checkpoint(root, model, optimizer)),
    ]


def test_memory_is_that_of_four_chunks(ranks: Pool, tmp_path: Path) -> None:
    """Of 96 MiB that are saved; DDP would say the ranks' gradients are equal, and here they are."""
    for needed in (*ranks.run(memory_needed, tmp_path / "1", world=1), *ranks.run(memory_needed, tmp_path, world=2)):
        assert max(needed) <= 4 * CHUNK_BYTES, needed


def inside_unsharded(root: Path) -> None:
    model, optimizer = build(3)
    train(model, optimizer, range(1))
    for call in (lambda: save(root, model, optimizer), lambda: shardopt.load_checkpoint(root, model, optimizer)):
        with optimizer.unsharded(), raises(CheckpointError, "outside of"):
            call()
        save(root, model, optimizer)
    with raises(CheckpointError, "by an optimizer that was not given"):
        save(root, model, None)
    optimizer.close()


def test_half_written_params_are_not_saved(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(inside_unsharded, tmp_path, world=2)
