"""Every argument of every public method of an optimizer, as ``test_every_argument.py`` has those of constructors."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import DisagreementError, ShardedOptimizer, ShardedSGD, Tuning
from tests.optim.test_every_argument import COUNT, EVERYTHING, FLAG, FROM_0, NONE, NOTHING, ONE, WALK, is_clear
from tests.support.ranks import Pool
from tests.support.training import raises

METHODS = {
    "add_param_group": {"param_group": NOTHING},
    "bind": {"state_dict": NONE, "init_fn": NONE},  # what else there is to give waits for params on the meta device
    "close": {},
    "consolidate_state_dict": {"to": {"0"}},  # of one rank
    "gradient_weight": {"tokens": COUNT, "average": FLAG},
    "gradient_statistics": {"names": NOTHING},
    "join": {name: FLAG for name in ("divide_by_initial_world_size", "enable", "throw_on_early_termination")},
    "join_hook": {"divide_by_initial_world_size": FLAG, "keywords": EVERYTHING},
    "load_state_dict": {"state_dict": NOTHING},
    "log": {"writer": NOTHING, "every": ONE},
    "memory": {},
    "monitor": {"path": {"text"}, "every": FROM_0 | {"inf"}},
    "no_sync": {},
    "offload": {"to": NOTHING, "params": FLAG},
    "program": {},
    "rebind": {},
    "reduce_gradients": {},
    "refresh_masters": {},
    "reload": {"states": FLAG},
    "state_dict": {},
    "step": {"closure": NONE},
    "sum_tied": {"param": NOTHING, "group": NOTHING},  # params of the optimizer, and groups, alone
    "timings": {},
    "schedule": {},
    "unsharded": {"ema": FLAG, "alone": FLAG},
    "weights": {"bucket_bytes": ONE, "dtype": NONE, "names": NONE, "merge": NONE},
    "weights_metadata": {"dtype": NONE, "names": NONE, "merge": NONE},
    "zero_grad": {"set_to_none": EVERYTHING},  # as torch's: what counts is whether it is true
}

# Of arguments without a default, while another one is tried.
GIVEN: dict[str, dict[str, Any]] = {
    "log": {"writer": print},
    "monitor": {"path": "reports"},
    "gradient_weight": {"tokens": 1},
    "sum_tied": {"param": nn.Parameter(torch.ones(1)), "group": None},
}


def methods() -> dict[str, list[str]]:
    found = {}
    for name, method in inspect.getmembers(ShardedOptimizer, inspect.isfunction):
        if not name.startswith("_") and method.__module__.startswith("shardopt"):
            found[name] = [each for each in inspect.signature(method).parameters if each != "self"]
    return found


def test_the_table_knows_every_method() -> None:
    assert methods() == {name: list(arguments) for name, arguments in METHODS.items()}


def called(method: str, argument: str, value: Any) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    opt = ShardedSGD(module, momentum=0.9, ema=0.5)
    module(torch.ones(1, 4)).sum().backward()
    opt.step()
    if argument == "keywords":
        argument = "nobody"  # torch's Join hands its keywords to all that take part: those of others are let alone
    try:
        if method == "gradient_statistics":  # of any number of names
            found = opt.gradient_statistics(value)
        else:
            found = getattr(opt, method)(**{**GIVEN.get(method, {}), argument: value})
        if isinstance(found, AbstractContextManager):
            with found:
                pass
        if isinstance(found, Iterator):
            list(found)
        opt.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        opt.step()
    finally:
        opt.close()


@pytest.mark.parametrize("method", [name for name, arguments in METHODS.items() if arguments])
def test_every_argument_of_a_method(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for argument, accepted in METHODS[method].items():
        for label, value in WALK.items():
            try:
                called(method, argument, value)
            except Exception as error:
                if label in accepted:
                    found.append(f"{argument}={label}: refused: {type(error).__name__}: {error}")
                elif why := is_clear(error, argument):
                    found.append(f"{argument}={label}: {why}: {type(error).__name__}: {error}")
            else:
                if label not in accepted:
                    found.append(f"{argument}={label}: accepted")
    assert not found, "\n".join(found)


def enter(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def on_several_ranks(stage: int) -> None:
    """What is wrong is an error on all ranks, before any of them waits for another one, and nothing came of it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    opt = ShardedSGD(module, stage=stage, momentum=0.9, ema=0.5, tuning=Tuning(keep_below=0, timeout=60))

    def train() -> None:
        opt.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        opt.step()

    # Before there is anything to gather.
    for wrong in (2, -1, 0.5):
        with raises(ValueError, "consolidate_state_dict(to=)", "2 ranks", f"found {wrong}"):
            opt.consolidate_state_dict(to=wrong)  # type: ignore[arg-type]
    with raises(TypeError, "consolidate_state_dict(to=)", "'1'"):
        opt.consolidate_state_dict(to="1")  # type: ignore[arg-type]
    train()
    calls: list[tuple[Callable[[Any], None], str, list[tuple[Any, type[Exception]]], Any]] = [
        (
            lambda to: opt.consolidate_state_dict(to=to),
            "consolidate_state_dict(to=)",
            [(True, TypeError), ("1", TypeError), (0.5, ValueError), (2, ValueError), (-1, ValueError)],
            1,
        ),
        (lambda ema: enter(opt.unsharded(ema=ema)), "unsharded(ema=)", [("no", TypeError), (2, TypeError)], True),
    ]
    if stage < 3:
        calls += [
            (
                lambda value, name=name: enter(opt.join(**{name: value})),
                f"join({name}=)",
                [("no", TypeError), (None, TypeError), (0.5, TypeError)],
                False,
            )
            for name in ("divide_by_initial_world_size", "enable", "throw_on_early_termination")
        ]
    for call, words, all_wrong, right in calls:
        for wrong, kind in all_wrong:
            with raises(kind, words):
                call(wrong)
            with raises(kind if rank == 1 else DisagreementError, words):
                call(wrong if rank == 1 else right)
        call(right)
    for ours, theirs, words in (
        (0, 1, "rank to gather on"),
        (np.int64(1), torch.tensor(0), "rank to gather on"),
    ):
        with raises(DisagreementError, words):
            opt.consolidate_state_dict(to=theirs if rank else ours)
    opt.consolidate_state_dict(to=torch.tensor(1))  # type: ignore[arg-type]
    assert all(type(state["momentum_buffer"]) is torch.Tensor for state in opt.state_dict()["state"].values()) == rank
    if stage < 3:
        with raises(DisagreementError, "throw_on_early_termination", "join() did nothing"):
            enter(opt.join(throw_on_early_termination=rank == 1))
        with raises(DisagreementError, "enable"):
            enter(opt.join(enable=rank == 1))
    else:
        with raises(DisagreementError, "ema", "unsharded() did nothing"):
            enter(opt.unsharded(ema=rank == 1))
    train()
    assert opt.updates == 2
    opt.close()


def test_arguments_on_several_ranks(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(on_several_ranks, stage, world=2)
