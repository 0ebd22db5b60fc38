"""Experts with the module handed over: stages 1 to 3 train as torch.optim does in one process on the whole model."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardopt
from shardopt import DisagreementError, Tuning, load_checkpoint, save_checkpoint
from shardopt.errors import BindingError, CommunicationError, OffloadError, ShardoptError, StateError
from tests.support.composed import OPTIONS, STATES, Block, assert_close, batch, loss_of, whole
from tests.support.linear_moe import BATCHES, LinearMixture
from tests.support.moe import NUM, Expert, Mixture, WholeModel, close, groups_of, is_of, mixtures, name_of
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep_at_once
from tests.support.training import raises

STEPS, SAVED_AT = 4, 2
MAX_NORM = 0.05  # every step is clipped
SHARDED: dict[str, Any] = {"keep_below": 0, "live_bytes": 0}  # stage 3 shards all, and keeps nothing gathered
SMALL = Tuning(bucket_bytes=300, **SHARDED)


class Experts:
    """Four ranks, each with a batch of its own; two and two hold the same experts."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
        self.copies, self.group = mesh["copies"].get_group(), mesh["experts"].get_group()

    def make(self, kind: str, seed: int = 0, **options: Any) -> tuple[nn.Module, shardopt.ShardedOptimizer]:
        model = mixtures(self.group, seed)
        given = {**OPTIONS[kind], "max_grad_norm": MAX_NORM, "tuning": SMALL, "module": model, **options}
        return model, getattr(shardopt, f"Sharded{kind}")(groups_of(model, self.copies), **given)

    def values(self, kind: str, model: nn.Module, optimizer: shardopt.ShardedOptimizer) -> dict[str, torch.Tensor]:
        """Params and states, whole. Collective."""
        states = {
            f"{name_of(name, self.group)}.{each}": whole(optimizer.state[param][each])
            for name, param in model.named_parameters()
            for each in STATES[kind]
            if param in optimizer.state
        }
        with optimizer.unsharded():
            named = model.named_parameters()
            return states | {name_of(name, self.group): param.detach().clone() for name, param in named}


def closed(step: int, rank: int) -> int:
    """The expert that gets no token of a rank's batch: one copy of an expert is called, and the other is not."""
    return (step + rank // 2) % NUM


def trains(settings: list[tuple[str, dict[str, Any]]], folder: Path) -> None:
    experts, called = Experts(), set()
    for kind, options in settings:
        reference = WholeModel(mixtures(), dist.get_world_size(), MAX_NORM, kind, closed)
        model, optimizer = experts.make(kind, seed=dist.get_rank() // 2, **options)  # the first copy's values count
        for step in range(STEPS):
            if step == SAVED_AT:
                save_checkpoint(folder / kind, model, optimizer)
                optimizer.close()
                model, optimizer = experts.make(kind, seed=1, **options)
                load_checkpoint(folder / kind, model, optimizer)
            close(model, closed(step, dist.get_rank()))
            optimizer.zero_grad()
            loss_of(model(batch(step, dist.get_rank()))).backward()
            called |= {tuple(each.called) for each in model.modules() if isinstance(each, Mixture)}
            norm = reference.step(step)
            assert norm > 2 * MAX_NORM
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
            assert any("experts 1" in name for name in optimizer.units) == (options["stage"] == 3)
            found, expected = experts.values(kind, model, optimizer), reference.values()
            assert_close(found, expected)
            mine = {name for name in expected if is_of(name, experts.group)}
            assert mine == found.keys()  # an expert that no rank called has no state yet
        optimizer.close()
    assert any(len(each) < len(Mixture(experts.group).own) for each in called)  # experts without a token, step by step


def test_stages_with_the_module(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(trains, [("AdamW", {"stage": 1}), ("SGD", {"stage": 2})], tmp_path, world=4)


@pytest.mark.slow
def test_all_stages_with_the_module(ranks: Pool, tmp_path: Path) -> None:
    settings = [(kind, {"stage": stage}) for kind in ("AdamW", "SGD") for stage in (0, 1, 2, 3)]
    ranks.run(trains, settings, tmp_path, world=4)


def test_gathers_by_messages(ranks: Pool, tmp_path: Path) -> None:
    """A rank whose expert has no token, and units of two groups of ranks, keep nobody waiting."""
    tuning = Tuning(bucket_bytes=300, neighbours=False, units=[Block, Expert], **SHARDED)
    ranks.run(trains, [("AdamW", {"stage": 3, "tuning": tuning})], tmp_path, world=4)


def trains_experts_alone(stages: list[int]) -> None:
    """The rest is frozen and in no param group. Experts are those of one rank, or of two."""
    experts, everyone = Experts(), dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for stage in stages:
        for group, copies in ((everyone, alone), (experts.group, experts.copies)):
            reference = WholeModel(mixtures(), dist.get_world_size(), math.inf, "SGD", closed)
            model = mixtures(group)
            for each in (reference.model, model):
                for name, param in each.named_parameters():
                    param.requires_grad_("experts." in name)
            options = {**OPTIONS["SGD"], "module": model, "stage": stage, "tuning": SMALL}
            optimizer = shardopt.ShardedSGD(groups_of(model, copies)[1:], **options)
            for step in range(2):
                close(model, closed(step, dist.get_rank()))
                optimizer.zero_grad()
                loss_of(model(batch(step, dist.get_rank()))).backward()
                optimizer.step()
                reference.step(step)
            expected = dict(reference.model.named_parameters())
            with optimizer.unsharded():
                found = {name_of(name, group): param.detach().clone() for name, param in model.named_parameters()}
            assert_close(found, {name: expected[name].detach() for name in found})
            optimizer.close()


def test_experts_train_alone(ranks: Pool) -> None:
    ranks.run(trains_experts_alone, [1, 3], world=4)


def trains_by_two(stage: int) -> None:
    """The optimizer of the rest leaves the experts to the other, and does not give rank 0's to all ranks."""
    experts = Experts()
    model, alone = mixtures(experts.group), mixtures()
    rates = (0.01, 0.02)
    ours = [
        shardopt.ShardedSGD([group], module=model, stage=stage, lr=lr, tuning=SMALL)
        for group, lr in zip(groups_of(model, experts.copies), rates, strict=True)
    ]
    theirs = [torch.optim.SGD(group["params"], lr=lr) for group, lr in zip(groups_of(alone, None), rates, strict=True)]
    for step in range(2):
        for each in (*ours, *theirs):
            each.zero_grad()
        loss_of(model(batch(step, dist.get_rank()))).backward()
        for rank in range(dist.get_world_size()):
            (loss_of(alone(batch(step, rank))) / dist.get_world_size()).backward()
        for each in (*ours, *theirs):
            each.step()
        with ours[0].unsharded(), ours[1].unsharded():
            found = {name_of(name, experts.group): each.detach().clone() for name, each in model.named_parameters()}
        assert_close(found, {name: param.detach() for name, param in alone.named_parameters()})
    ours[0].close()
    ours[1].close()


def test_an_optimizer_for_experts_and_one_for_the_rest(ranks: Pool) -> None:
    ranks.run(trains_by_two, 2, world=4)


# -- the same bits at every mesh ---------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "stage": (1, 2, 3),
    "kept": ("fp32", "split24 and int8"),
    "offload": (None, "cpu", "disk"),
    "scale": (1.0, 1024.0),
    "is_hybrid": (False, True),
}


def bits(model: nn.Module, optimizer: shardopt.ShardedOptimizer, name_of: Callable[[str], str]) -> dict[str, bytes]:
    """Params and states, whole. Collective."""
    found = {}
    for name, param in model.named_parameters():
        found |= {f"{name_of(name)}.{kind}": whole(each) for kind, each in optimizer.state.get(param, {}).items()}
    with optimizer.unsharded():
        found |= {name_of(name): param.detach().clone() for name, param in model.named_parameters()}
    return {name: each.reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in found.items()}


def has_the_same_bits(rows: list[Row], folder: Path) -> None:
    experts = Experts()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for row in rows:
        stage, kept, offload, scale, is_hybrid = row
        dtype, formats = torch.float32, dict[str, Any]()
        if kept != "fp32":
            dtype, formats = torch.bfloat16, {"master": "split24", "state_format": "int8"}
        options = {"lr": 0.25, "weight_decay": 0.125, "max_grad_norm": 64.0, **formats}
        options["tuning"] = Tuning(bucket_bytes=700, compress_from=1, **SHARDED)
        model = LinearMixture(experts.group, dtype)
        optimizer = shardopt.ShardedAdamW(
            groups_of(model, experts.copies),
            module=model,
            stage=stage,
            process_group=hybrid if is_hybrid else None,
            offload=folder if offload == "disk" else offload,
            **options,
        )
        reference = LinearMixture(None, dtype)
        expected = shardopt.ShardedAdamW(reference.parameters(), process_group=alone, **options)
        scaler, beside = (torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) for _ in range(2))
        for step in range(NUM):
            for each, its, by, batches in ((model, optimizer, scaler, 1), (reference, expected, beside, BATCHES)):
                its.zero_grad()
                by.scale(each(step) / batches).backward()
                by.step(its)
                by.update()
            assert optimizer.grad_norm == expected.grad_norm
            theirs = bits(reference, expected, str)
            ours = bits(model, optimizer, lambda name: name_of(name, experts.group))
            assert ours == {name: theirs[name] for name in theirs if is_of(name, experts.group)}, (row, step)
        optimizer.close()
        expected.close()


@sweep_at_once(AXES)
def test_experts_have_the_bits_of_one_process(ranks: Pool, rows: list[Row], tmp_path: Path) -> None:
    ranks.run(has_the_same_bits, rows, tmp_path, world=4)


def rounds() -> None:
    """Stochastic rounding: experts that begin alike, and get the same gradients, are rounded each in its own way."""
    experts = Experts()
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    dense = nn.Linear(3, 3, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    groups = [{"params": dense.parameters()}, {"params": model.parameters(), "process_group": experts.copies}]
    both = nn.ModuleList([dense, model])
    optimizer = shardopt.ShardedSGD(groups, module=both, lr=2**-9, master="none", stage=2, tuning=SMALL)
    optimizer.bind()
    (both[1](torch.ones(1, 64, dtype=torch.bfloat16)).sum() + both[0](torch.ones(1, 3).bfloat16()).sum()).backward()
    optimizer.step()
    mine: list[bytes | None] = [None] * 4
    dist.all_gather_object(mine, model.weight.detach().float().numpy().tobytes())
    assert mine[0] == mine[2] != mine[1] == mine[3]


def test_other_experts_are_rounded_with_other_noise(ranks: Pool) -> None:
    ranks.run(rounds, world=4)


# -- decisions ---------------------------------------------------------------------------------------------------------


class Odd(RuntimeError):
    """Of one rank."""


class Decisions:
    """A training of which one rank differs."""

    def __init__(self, experts: Experts, options: dict[str, Any]) -> None:
        self.model, self.steps, self.is_odd = LinearMixture(experts.group), iter(range(100)), dist.get_rank() == 1
        groups = groups_of(self.model, experts.copies)
        self.optimizer = shardopt.ShardedAdamW(groups, lr=0.25, module=self.model, max_grad_norm=64.0, **options)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(next(self.steps)).backward()

    def closure(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(next(self.steps))
        if self.is_odd:
            raise Odd("between forward and backward")
        loss.backward()

    def bits(self) -> dict[str, bytes]:
        return bits(self.model, self.optimizer, str)

    def decide(self, has_closure: bool) -> None:
        self.backward()
        self.optimizer.step()
        before = self.bits()
        weight = cast(nn.Module, self.model.experts[1]).weight  # called by its ranks at steps 1 and 2
        overflows = weight.register_hook(lambda grad: grad * (torch.inf if self.is_odd else 1.0))
        self.backward()
        with pytest.warns(UserWarning, match="all ranks skipped this step"):
            self.optimizer.step()
        assert not math.isfinite(self.optimizer.grad_norm) and self.bits() == before
        # A GradScaler that skips by itself hears on all ranks what one expert's gradient holds.
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(self.optimizer)
        assert all(map(bool, scaler._found_inf_per_device(self.optimizer).values()))
        scaler.step(self.optimizer)
        scaler.update()
        assert scaler.get_scale() == 0.5 and self.bits() == before
        overflows.remove()

        # At the end of a backward, on the ranks of one expert: all others hear of it there, and none waits in step().
        experts, _ = self.optimizer.engine.takeover.rounds.parts
        fails = patch.object(experts._totals, "add_to", side_effect=Odd("of one expert"))
        told = raises(CommunicationError, "left this backward after an error of its own", "are unchanged")
        with raises(Odd, "of one expert") if self.is_odd else told, fails if self.is_odd else nullcontext():
            self.backward()
        with pytest.raises(ShardoptError, match="a part of a backward only"):
            self.optimizer.step()
        if has_closure:
            words = ("between forward and backward",)
            told = raises(DisagreementError, "rank 1 cannot take this step, so no rank does", *words)
            with raises(Odd, *words) if self.is_odd else told:
                self.optimizer.step(self.closure)
        self.optimizer.zero_grad()
        assert self.bits() == before
        self.backward()
        self.optimizer.step()
        assert self.bits() != before
        self.optimizer.close()


def decides_together(settings: list[tuple[dict[str, Any], bool]]) -> None:
    for options, has_closure in settings:
        Decisions(Experts(), options).decide(has_closure)


def test_all_ranks_decide_together(ranks: Pool) -> None:
    messages = {"stage": 2, "tuning": Tuning(bucket_bytes=700, neighbours=False, **SHARDED)}
    ranks.run(decides_together, [(messages, True), ({"stage": 3, "tuning": SMALL}, True)], world=4)


def writes_on_all_or_none(folder: Path) -> None:
    """A disk that is full on one rank, in the states of its expert, undoes the step on all ranks of the model."""
    training = Decisions(Experts(), {"stage": 2, "offload": folder, "tuning": SMALL})
    training.backward()
    training.optimizer.step()
    before = training.bits()
    training.backward()
    store = training.optimizer.engine.domains[1].store
    fails = patch.object(store, "flush", side_effect=OffloadError("No space left on device"))
    with fails if training.is_odd else nullcontext(), pytest.raises(OffloadError, match="No space left"):
        training.optimizer.step()
    assert training.bits() == before
    training.optimizer.step()
    assert training.bits() != before


def test_a_failed_write_undoes_the_step_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(writes_on_all_or_none, tmp_path, world=4)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refuses() -> None:
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def forward(model: nn.Module, groups: list[dict[str, Any]], **options: Any) -> None:
        optimizer = shardopt.ShardedAdamW(groups, module=model, **options)
        try:
            model(torch.ones(1, 3))
        finally:
            optimizer.close()

    def made(device: str = "cpu") -> tuple[nn.Module, list[dict[str, Any]]]:
        with torch.device(device):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return model, [{"params": model[0].parameters()}, {"params": model[1].parameters(), "process_group": own}]

    with pytest.raises(BindingError, match="omit release_gradients: param groups have their own"):
        forward(*made(), release_gradients=True)
    with pytest.raises(BindingError, match="build the model with values"):
        forward(*made("meta"), stage=3)
    with pytest.raises(BindingError, match="the number of batches"):
        model, groups = made()
        groups[1]["process_group"] = dist.group.WORLD
        forward(model, groups, process_group=own, norm_group=dist.group.WORLD)
    # The batch is that of all ranks, though the expert is this rank's alone.
    model, groups = made()
    model[0].requires_grad_(False)
    optimizer = shardopt.ShardedAdamW(groups[1:], module=model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ShardoptError, match="this rank's own, not the mean over ranks"):
        optimizer.step()
    optimizer.close()
    # States that no rank has all of are neither gathered on one rank nor moved.
    model, groups = made()
    optimizer = shardopt.ShardedAdamW(groups, module=model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    memory = optimizer.memory()
    with pytest.raises(StateError, match=r"state_dict\(\) on one rank of each process_group"):
        optimizer.consolidate_state_dict()
    with pytest.raises(ShardoptError, match=r"several process groups.*Give each its own optimizer"):
        optimizer.offload()
    assert optimizer.memory() == memory and memory["state"]["device"] > 0
    optimizer.close()


def test_what_cannot_be_right_is_refused(ranks: Pool) -> None:
    ranks.run(refuses, world=2)
