"""Ranks that disagree: a typed error that names the difference on every rank, in time, and not a bit changed.

Each row of the two tables is one way in which a rank can differ from the others: before the optimizer binds, and in
mid-training. After the error the cause is removed and training goes on: at its end the bits are those of a run that was
never disturbed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardopt import (
    ShardedAdam,
    ShardedAdamW,
    ShardedLion,
    ShardedOptimizer,
    Tuning,
)
from shardopt.remote import peers
from tests.support.absence import Roll, given_up
from tests.support.cases import fill_gradients
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.training import digest


@dataclass
class Setup:
    """What an optimizer is made of on one rank."""

    kind: type[ShardedOptimizer] = ShardedAdamW
    params: list[Parameter] = field(default_factory=lambda: [])
    keywords: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    options: dict[str, Any] = field(default_factory=lambda: {})
    tuning: dict[str, Any] = field(default_factory=lambda: {})
    groups: Callable[[list[Parameter]], Any] = lambda params: [
        {"params": params[:2]},
        {"params": params[2:], "lr": 0.1},
    ]
    closure: Callable[[], Any] | None = None

    @staticmethod
    def usual(stage: int) -> "Setup":
        generator = torch.Generator().manual_seed(0)
        shapes = ((5, 300), (300, 5), (7,), (7,), (2, 3))
        params = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        params[-1].requires_grad_(False)
        return Setup(params=params, options={"stage": stage})

    def make(self) -> ShardedOptimizer:
        options = {**self.options, "tuning": Tuning(**self.tuning)}
        return self.kind(self.groups(self.params), **self.keywords, **options)


def set_gradients(params: list[Parameter], step: int) -> None:
    fill_gradients(params, "integers", step)


# -- before the first step ---------------------------------------------------------------------------------------------


def reversed_params(setup: Setup) -> None:
    setup.params.reverse()


def swapped_names(setup: Setup) -> None:
    setup.groups = lambda params: [(f"layer{which}", params[which]) for which in (0, 1, 3, 2, 4)]


def named(setup: Setup) -> None:
    setup.groups = lambda params: [(f"layer{which}", params[which]) for which in range(5)]


def one_param_less(setup: Setup) -> None:
    del setup.params[3]


def other_shape(setup: Setup) -> None:
    setup.params[0] = Parameter(torch.zeros(5, 301))


def other_dtype(setup: Setup) -> None:
    setup.params[0] = Parameter(setup.params[0].detach().bfloat16())


def other_strides(setup: Setup) -> None:
    setup.params[0] = Parameter(setup.params[0].detach().t().contiguous().t())


def not_frozen(setup: Setup) -> None:
    setup.params[-1].requires_grad_(True)


def one_group(setup: Setup) -> None:
    setup.groups = lambda params: params


def otherwise_grouped(setup: Setup) -> None:
    setup.groups = lambda params: [{"params": params[:3]}, {"params": params[3:], "lr": 0.1}]


def expanded(setup: Setup) -> None:
    setup.params[0] = Parameter(torch.zeros(300).expand(5, 300))


def keyword(**keywords: Any) -> Callable[[Setup], None]:
    return lambda setup: setup.keywords.update(keywords)


def option(**options: Any) -> Callable[[Setup], None]:
    return lambda setup: setup.options.update(options)


def tuned(**tuning: Any) -> Callable[[Setup], None]:
    return lambda setup: setup.tuning.update(tuning)


def kind(which: type[ShardedOptimizer]) -> Callable[[Setup], None]:
    return lambda setup: setattr(setup, "kind", which)


def with_closure(setup: Setup) -> None:
    setup.closure = lambda: 1.0


def other_stage(setup: Setup) -> None:
    setup.options["stage"] = 1 - setup.options["stage"]


# name -> (what the one rank does, what the error names, what all ranks do)
Change = Callable[[Setup], None]
BEFORE: dict[str, tuple[Change, str, Change | None]] = {
    "params in reverse": (reversed_params, r"params not yet bound|params\[0\]", None),
    "two params of one shape swapped": (swapped_names, "layer", named),
    "one param less": (one_param_less, "number of params", None),
    "shape": (other_shape, r"\(5, 30[01]\)|shape", None),
    "dtype": (other_dtype, "dtype", None),
    "strides": (other_strides, "strides", None),
    "requires_grad": (not_frozen, "requires_grad|params not yet bound", None),
    "number of groups": (one_group, "params of groups|number of|of group", None),
    "params of groups": (otherwise_grouped, "params of groups|of group", None),
    "lr": (keyword(lr=0.02), r"groups\[0\].lr: 0.0[12] ", None),
    "tensor lr": (keyword(lr=torch.tensor(0.02)), r"groups\[0\].lr: 0.01(99+\d*)?", None),
    "betas": (keyword(betas=(0.9, 0.98)), r"betas\[1\]", None),
    "weight_decay": (keyword(weight_decay=0.5), "weight_decay", None),
    "eps": (keyword(eps=1e-6), "eps", None),
    "amsgrad": (keyword(amsgrad=True), "amsgrad", None),
    "maximize": (keyword(maximize=True), "maximize", None),
    "fused": (keyword(fused=True), "fused", None),
    "rule": (kind(ShardedLion), "rule: '(adam|lion)'", None),
    "Adam and AdamW": (kind(ShardedAdam), "decoupled_weight_decay|weight_decay", None),
    "stage": (other_stage, "stage", None),
    "max_grad_norm": (option(max_grad_norm=1.0), "max_grad_norm", None),
    "bucket_bytes": (tuned(bucket_bytes=4096), "bucket_bytes", None),
    "nonfinite": (tuned(nonfinite="raise"), "nonfinite", None),
    "neighbours": (tuned(neighbours=False), "neighbours", None),
    "closure": (with_closure, "closure", None),
    "a param that cannot be bound": (expanded, "strides", None),
}


def disagree_before(stage: int, odd: int, rows: list[str]) -> dict[str, tuple[str, str, bool, bool]]:
    """For each row: (error, message, nothing changed, the same bits after the cause was removed)."""
    outcome = {}
    for name in rows:
        change, _, everywhere = BEFORE[name]
        undisturbed = Setup.usual(stage)
        setup = Setup.usual(stage)
        for each in (undisturbed, setup):
            if everywhere is not None:
                everywhere(each)
        if dist.get_rank() == odd:
            change(setup)
        set_gradients(setup.params, 1)
        optimizer = setup.make()
        before = digest(optimizer)
        kind_of_error, message = attempt(optimizer, setup.closure)
        unchanged = digest(optimizer) == before
        # Again, with what all ranks have: in fresh objects where the mistake was in the params.
        again = Setup.usual(stage)
        if everywhere is not None:
            everywhere(again)
        optimizers = []
        for each in (undisturbed, again):
            optimizers.append(each.make())
            for step in (1, 2):
                set_gradients(each.params, step)
                optimizers[-1].step()
        outcome[name] = (kind_of_error, message, unchanged, digest(optimizers[0]) == digest(optimizers[1]))
    return outcome


def attempt(optimizer: ShardedOptimizer, closure: Callable[[], Any] | None = None) -> tuple[str, str]:
    try:
        optimizer.step(closure)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


# world, stage, the rank that differs, every how many rows of a table: three ranks show that the others name one of them
WHERE = [(2, 1, 1, 1), (2, 0, 0, 1), (3, 1, 1, 3), pytest.param(3, 1, 1, 1, marks=pytest.mark.slow)]
EACH_WHERE = pytest.mark.parametrize(("world", "stage", "odd", "every"), WHERE)


@EACH_WHERE
def test_disagreement_at_domain(world: int, stage: int, odd: int, every: int, ranks: Pool) -> None:
    rows = list(BEFORE)[::every]
    by_rank = ranks.run(disagree_before, stage, odd, rows, world=world)
    check_outcomes({name: BEFORE[name][1] for name in rows}, by_rank, odd)


def check_outcomes(patterns: dict[str, str], by_rank: list[dict[str, tuple[str, str, bool, bool]]], odd: int) -> None:
    wrong = []
    for name, pattern in patterns.items():
        for rank, outcome in enumerate(by_rank):
            error, message, unchanged, goes_on = outcome[name]
            typed = error == "DisagreementError" or (
                rank == odd and error in ("BindingError", "ShardoptError", "TypeError", "ZeroDivisionError")
            )
            if by_rank[odd][name][0] != "DisagreementError" and rank != odd:
                typed = typed and f"rank {odd} cannot take this step" in message
            if not (typed and re.search(pattern, message) and unchanged and goes_on):
                wrong.append(f"{name} on rank {rank}: {error}: {message}; unchanged: {unchanged}; goes on: {goes_on}")
    assert not wrong, "\n".join(wrong)


# -- in mid-training ---------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """An optimizer after two steps, about to take the third."""

    params: list[Parameter]
    optimizer: ShardedOptimizer
    early: dict[str, Any]  # its state dict after the first step
    kept: Any = None
    closure: Callable[[], Any] | None = None


def lower_lr(training: Training) -> None:
    training.optimizer.param_groups[1]["lr"] = 0.05


def restore_lr(training: Training) -> None:
    training.optimizer.param_groups[1]["lr"] = 0.1


def no_gradient(training: Training) -> None:
    training.params[1].grad = None


def third_gradients(training: Training) -> None:
    set_gradients(training.params, 3)


def sparse_gradient(training: Training) -> None:
    training.params[0].grad = None
    training.params[0].grad = torch.zeros(5, 300).to_sparse()


def takes_closure(training: Training) -> None:
    training.closure = lambda: 1.0


def closure_fails(training: Training) -> None:
    training.closure = lambda: 1 // 0


def no_closure(training: Training) -> None:
    training.closure = None


def recast(training: Training) -> None:
    training.kept = training.params[2].data
    training.params[2].grad = None
    training.params[2].data = training.kept.bfloat16()


def cut_off(training: Training) -> None:
    training.kept = training.params[2].data
    training.params[2].grad = None
    training.params[2].data = training.kept[:-1].clone()


def moved_back(training: Training) -> None:
    training.params[2].grad = None
    training.params[2].data = training.kept
    third_gradients(training)


def loads_early_state(training: Training) -> None:
    training.kept = snapshot(training.optimizer)
    training.optimizer.load_state_dict(training.early)


def loads_back(training: Training) -> None:
    training.optimizer.load_state_dict(training.kept)


def adds_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], "lr": 0.3})


def removes_group(training: Training) -> None:
    training.optimizer.param_groups.pop()


def unfreezes(training: Training) -> None:
    training.params[-1].requires_grad_(True)


def freezes(training: Training) -> None:
    training.params[-1].requires_grad_(False)
    training.params[-1].grad = None


def other_loss_scale(training: Training) -> None:
    training.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]


def no_loss_scale(training: Training) -> None:
    del training.optimizer.grad_scale  # type: ignore[attr-defined]


def other_flag(training: Training) -> None:
    training.optimizer.param_groups[0]["maximize"] = True


def restored_flag(training: Training) -> None:
    training.optimizer.param_groups[0]["maximize"] = False


def no_gradients_at_all(training: Training) -> None:
    training.optimizer.zero_grad()


def two_element_lr(training: Training) -> None:
    training.optimizer.param_groups[1]["lr"] = torch.tensor([0.1, 0.2])


Spoil = Callable[[Training], None]
LATER: dict[str, tuple[Spoil, str, Spoil]] = {
    "lr": (lower_lr, r"lr: 0\.\d+ .*0\.\d+", restore_lr),
    "flag": (other_flag, "maximize", restored_flag),
    "gradient": (no_gradient, "gradients.*param 1 of group 0.*absent", third_gradients),
    "all gradients": (no_gradients_at_all, "gradients.*absent", third_gradients),
    "sparse gradient": (sparse_gradient, "sparse", third_gradients),
    "closure": (takes_closure, "closure", no_closure),
    "exception in a closure": (closure_fails, "division", no_closure),
    "recast": (recast, "param 0 of group 1.*moved", moved_back),
    "cut off": (cut_off, "param 0 of group 1.*moved", moved_back),
    "loaded state": (loads_early_state, "steps taken", loads_back),
    "added group": (adds_group, r"params not yet bound|number of", removes_group),
    "unfrozen": (unfreezes, "params not yet bound|requires_grad", freezes),
    "loss scale": (other_loss_scale, "loss scale .*: [12].0 .*[12].0", no_loss_scale),
}


EARLY_ERROR: dict[str, tuple[Spoil, str, Spoil]] = {
    "learning rate of two elements": (two_element_lr, "lr.*element", restore_lr),
}


def disagree_later(stage: int, odd: int, rows: list[str]) -> dict[str, tuple[str, str, bool, bool]]:
    outcome = {}
    for name in rows:
        spoil, _, mend = (LATER | EARLY_ERROR)[name]
        ends = []
        for disturbed in (False, True):
            setup = Setup.usual(stage)
            optimizer = setup.make()
            early: dict[str, Any] = {}
            for step in (1, 2):
                set_gradients(setup.params, step)
                optimizer.step()
                if step == 1:
                    early = snapshot(optimizer)
            training = Training(setup.params, optimizer, early)
            third_gradients(training)
            if disturbed:
                if dist.get_rank() == odd:
                    spoil(training)
                before = digest(optimizer)
                error, message = attempt(optimizer, training.closure)
                unchanged = digest(optimizer) == before
                if dist.get_rank() == odd:
                    mend(training)
            optimizer.step()
            ends.append(digest(optimizer))
        outcome[name] = (error, message, unchanged, ends[0] == ends[1])
    return outcome


def snapshot(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """A state dict that later steps do not change; of parts where there are several ranks."""
    saved = optimizer.state_dict()
    copied = {key: {name: value.clone() for name, value in state.items()} for key, state in saved["state"].items()}
    return {**saved, "state": copied}


@EACH_WHERE
def test_disagreement_in_mid_training(world: int, stage: int, odd: int, every: int, ranks: Pool) -> None:
    rows = list(LATER)[::every]
    by_rank = ranks.run(disagree_later, stage, odd, rows, world=world)
    check_outcomes({name: LATER[name][1] for name in rows}, by_rank, odd)


def test_error_before_the_step_begins(ranks: Pool) -> None:
    """What one rank meets before it looks at its params is raised on all, too."""
    by_rank = ranks.run(disagree_later, 1, 1, list(EARLY_ERROR), world=2)
    check_outcomes({name: row[1] for name, row in EARLY_ERROR.items()}, by_rank, 1)


def test_the_tables_are_long_enough() -> None:
    assert len(BEFORE) + len(LATER) + len(EARLY_ERROR) >= 40


# -- a rank that is not there ------------------------------------------------------------------------------------------


def steps_less(odd: int, closes: bool, folder: Path) -> tuple[str, str, bool]:
    setup, rank = Setup.usual(stage=1), dist.get_rank()
    optimizer = setup.make()
    set_gradients(setup.params, 1)
    optimizer.step()
    before, roll = digest(optimizer), Roll(Moments(folder), "step", rank, dist.get_world_size())
    error, message = "no error", ""
    if rank == odd and closes:
        with patch.object(peers, "SILENCE", 0.0):  # nobody else closes, and nobody reads
            optimizer.close()
    if rank != odd or closes:
        with given_up({odd} - {rank}, roll):
            error, message = attempt(optimizer)
    roll.say()
    roll.wait("is out")  # or the others would see the end of this rank's connections, and no deadline
    return error, message, closes or digest(optimizer) == before


@pytest.mark.parametrize("closes", [False, True])
def test_missing_step_ends_in_time(closes: bool, ranks: Pool, tmp_path: Path) -> None:
    """The others cannot know why a rank does not come: they say what they waited for."""
    by_rank = ranks.run(without_barrier, steps_less, 1, closes, tmp_path, world=3)
    for rank, (error, message, unchanged) in enumerate(by_rank):
        if rank != 1:
            assert (
                error == "CommunicationError" and "agreeing on the step" in message and f"rank {rank} of 3" in message
            )
            assert unchanged
    assert by_rank[1][0] == ("ShardoptError" if closes else "no error")


def without_barrier(function: Callable[..., Any], *arguments: Any) -> Any:
    """The group is broken afterwards: leave it here, so that the harness does not meet its ranks in it."""
    result = function(*arguments)
    dist.destroy_process_group()
    return result
