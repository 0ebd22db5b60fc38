"""Groups of published Muon scripts take the rules that they name, and keep every hyper-parameter that they give."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import (
    CheckpointError,
    RuleError,
    ShardedMuon,
    ShardoptError,
    StateError,
    load_checkpoint,
    save_checkpoint,
)
from tests.support import comparing
from tests.support.training import one_thread, raises

OF_MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "ns_steps": 4, "adamw_betas": (0.9, 0.95)}
OF_ADAMW: dict[str, Any] = {"lr": 0.6, "eps": 1e-3, "weight_decay": 0.3, "betas": (0.8, 0.9)}
SPELLINGS: dict[str, tuple[Any, Any]] = {
    "rule": ("muon", "adamw"),
    "use_muon": (True, False),
    "use_adamw": (False, True),
    "kind": ("muon", "adamw"),
    "algorithm": ("Muon", "AdamW"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.up(self.embed(tokens)))
        return found


def groups_of(model: Model, key: str) -> list[dict[str, Any]]:
    of_muon, of_adamw = SPELLINGS[key]
    others = [param for param in model.parameters() if param is not model.up.weight]
    return [
        {"params": [model.up.weight], key: of_muon, **OF_MUON},
        {"params": others, key: of_adamw, **OF_ADAMW},
    ]


def train(model: Model, optimizer: ShardedMuon, steps: int = 2) -> list[bytes]:
    with one_thread():
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.arange(9)).square().mean().backward()
            optimizer.step()
    return [comparing.raw(param) for param in model.parameters()]


@pytest.mark.parametrize("with_module", [True, False])
def test_every_spelling_is_honoured(with_module: bool, tmp_path: Path) -> None:
    """The bits of ``rule=``, also after a checkpoint; and the numbers are those of the group."""
    ends = []
    for key in SPELLINGS:
        model = Model()
        options = {"module": model, "stage": 3} if with_module else {}
        optimizer = ShardedMuon(groups_of(model, key), **options)
        muon, adamw = optimizer.param_groups
        assert [each["rule"] for each in (muon, adamw)] == ["muon", "adamw"]
        assert OF_MUON.items() <= muon.items() and OF_ADAMW.items() <= adamw.items()
        train(model, optimizer)
        save_checkpoint(tmp_path / key, model, optimizer)
        optimizer.close()
        again = Model()
        loaded = ShardedMuon(groups_of(again, key), **({**options, "module": again} if with_module else {}))
        load_checkpoint(tmp_path / key, again, loaded)
        ends.append(train(again, loaded))
        loaded.close()
    assert all(each == ends[0] for each in ends)


def test_groups_that_name_other_rules_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    model = Model()
    optimizer = ShardedMuon(groups_of(model, "use_muon"))
    train(model, optimizer)
    saved = optimizer.state_dict()
    foreign = copy.deepcopy(saved)
    for group in foreign["param_groups"]:  # as a class saves it that knows no "rule"
        del group["rule"]
    optimizer.load_state_dict(foreign)
    assert [each["rule"] for each in optimizer.param_groups] == ["muon", "adamw"]
    foreign["param_groups"][0]["use_muon"] = False
    with raises(StateError, "group 0 of the dict takes the rule 'adamw', here it takes 'muon'"):
        optimizer.load_state_dict(foreign)

    matrices = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first, second = matrices.parameters()
    save_checkpoint(tmp_path, matrices, of_both(first, second))
    with raises(CheckpointError, "takes the rule 'muon' in the checkpoint, here 'adamw'"):
        load_checkpoint(tmp_path, matrices, of_both(second, first, reverse=True))


def of_both(hidden: nn.Parameter, other: nn.Parameter, reverse: bool = False) -> ShardedMuon:
    groups = [{"params": [hidden], "use_muon": True}, {"params": [other], "use_muon": False}]
    return ShardedMuon(groups[::-1] if reverse else groups)


def test_a_group_that_is_split_loses_nothing() -> None:
    model = Model()
    given = {"weight_decay": 0.6, "eps": 1e-3, "momentum": 0.7, "betas": (0.8, 0.9), "name": "all"}
    optimizer = ShardedMuon([{"params": model.parameters(), **given}], module=model, lr=0.02, adamw={"lr": 3e-4})
    assert [each["lr"] for each in optimizer.param_groups] == [0.02, 3e-4]
    for group in optimizer.param_groups:
        assert given.items() <= group.items()
    with raises(ShardoptError, "rule='muon' or rule='adamw'", "lr=0.6", "1 matrices", "4 other params"):
        ShardedMuon([{"params": model.parameters(), "lr": 0.6}], module=model)
    for each in (model.up.weight, model.up.bias):  # nothing is split: there is one rule that the number is for
        other = ShardedMuon([{"params": [each], "lr": 0.6}], module=model)
        assert [group["lr"] for group in other.param_groups] == [0.6]


def test_a_key_that_looks_like_a_choice_is_warned_of_once() -> None:
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = ShardedMuon([{"params": [each], "is_hidden": True, "optimizer": "AdamW"} for each in weights[:2]])
        optimizer.add_param_group({"params": weights[2:3], "is_hidden": False})
        named = {"name": "decay", "kind": "matrix", "scale": 2, "amsgrad": False, "nesterov": True}  # as torch allows
        optimizer.add_param_group({"params": weights[3:], **named})
    assert [str(each.message).partition(":")[0] for each in caught] == [
        "write rule='muon' or rule='adamw' if is_hidden=True was to choose the rule of its param group",
        "write rule='muon' or rule='adamw' if optimizer='AdamW' was to choose the rule of its param group",
    ]
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ({"rule": "muon", "use_muon": False}, RuleError, "name one rule in a param group"),
        ({"kind": "muon", "algorithm": "adamw"}, RuleError, "its keys name ['muon', 'adamw']"),
        ({"algorithm": "Lion"}, RuleError, "algorithm='Lion' to an optimizer of that class"),
        ({"use_muon": "yes"}, TypeError, "use_muon takes True or False, found 'yes'"),
    ],
    ids=str,
)
def test_keys_that_name_no_rule_of_this_optimizer(keys: dict[str, Any], kind: type[Exception], words: str) -> None:
    optimizer = ShardedMuon([torch.ones(2, 2)])
    with raises(kind, words):
        optimizer.add_param_group({"params": [torch.ones(2, 2)], **keys})
    assert len(optimizer.param_groups) == 1
