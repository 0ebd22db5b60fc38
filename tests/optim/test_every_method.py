"""Every argument of every public method of an optimizer, as ``test_every_argument.py`` has those of constructors."""

import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import ShardedOptimizer, ShardedSGD
from tests.optim.test_every_argument import EVERYTHING, NONE, NOTHING, WALK, is_clear

METHODS = {
    "add_param_group": {"param_group": NOTHING},
    "bind": {"state_dict": EVERYTHING},  # read only where params are on the meta device
    "close": {},
    "consolidate_state_dict": {"to": EVERYTHING},  # on one rank there is nothing to gather
    "join": {name: EVERYTHING for name in ("divide_by_initial_world_size", "enable", "throw_on_early_termination")},
    "join_hook": {"divide_by_initial_world_size": EVERYTHING, "keywords": EVERYTHING},
    "load_state_dict": {"state_dict": NOTHING},
    "memory": {},
    "no_sync": {},
    "offload": {"to": NOTHING},
    "refresh_masters": {},
    "reload": {},
    "state_dict": {},
    "step": {"closure": NONE},
    "timings": {},
    "unsharded": {"ema": EVERYTHING},  # a flag, by its truth
    "zero_grad": {"set_to_none": EVERYTHING},  # as torch's: what counts is whether it is true
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
    try:
        if argument == "keywords":
            return
        found = getattr(opt, method)(**{argument: value})
        if isinstance(found, AbstractContextManager):
            with found:
                pass
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
