"""``optimizer.state`` and ``state_dict()`` as torch's: what a look costs, keys of one's own, params listed twice."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from shardopt import ShardedAdamW, ShardedSGD, StateError, Tuning
from shardopt.domain.shard import Shard
from shardopt.offload.disk.store import DiskStorage
from tests.states.test_one_rank_alone import same, saved
from tests.support.training import raises


def stepped(**options: Any) -> tuple[list[Parameter], ShardedAdamW]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(40, 32)) for _ in range(24)]
    opt = ShardedAdamW(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    return params, opt


def size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def test_a_param_brings_no_other_one_along(tmp_path: Path) -> None:
    """On one rank, and at stage 0: each state holds the param's own elements, wherever and however they are kept."""
    _, plain = stepped()
    for options in ({"state_format": "bf16"}, {"state_format": "int8"}, {"offload": str(tmp_path)}, {"stage": 0}):
        _, opt = stepped(tuning=Tuning(compress_from=1), **options)
        states = opt.state_dict()["state"]
        assert size(opt.state_dict()) < 1.05 * size(plain.state_dict()), options
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in states.values() for t in s.values()
        }
        assert sum(held.values()) < 2.2 * 24 * 40 * 32 * 4, options
        if "state_format" not in options:
            assert same(saved(opt.state_dict()), saved(plain.state_dict()))
        opt.close()


def test_counting_reads_nothing(tmp_path: Path) -> None:
    """``len()``, ``in``, iteration and a lookup read no state; what looks at a tensor reads that one."""
    params, opt = stepped(offload=str(tmp_path))
    reads: list[str] = []
    read_into, read_chunk = DiskStorage.read_into, Shard.read_chunk

    def noted(self: Any, name: str, *arguments: Any) -> Any:
        reads.append(name)
        return read_into(self, name, *arguments)

    def chunk(self: Any, name: str, *arguments: Any) -> Any:
        reads.append(name)
        return read_chunk(self, name, *arguments)

    with patch.object(DiskStorage, "read_into", noted), patch.object(Shard, "read_chunk", chunk):
        assert len(opt.state) == 24 and all(param in opt.state for param in params) and list(opt.state) == params
        assert Parameter(torch.ones(2)) not in opt.state and opt.state
        assert not reads
        state = opt.state[params[3]]
        assert state["step"] == 1 and not reads
        state["exp_avg"].sum()
        assert set(reads) == {"exp_avg"} and len(reads) == 2  # in the shard, in the file
    opt.close()


def test_groups_that_change_are_followed() -> None:
    params, opt = stepped()
    assert params[5] in opt.state
    moved = opt.param_groups[0]["params"].pop(5)
    assert moved not in opt.state and params[6] in opt.state and len(opt.state) == 23
    assert opt.state[moved]["step"] == 1  # until a step frees it with its bucket
    opt.add_param_group({"params": [moved], "lr": 0.5})
    assert moved in opt.state and opt.state[moved]["step"] == 1 and list(opt.state)[-1] is moved


def test_keys_of_ones_own() -> None:
    """As torch's: hooks put them there, and they go with state dicts."""
    for kind, make in ((torch.optim.AdamW, torch.optim.AdamW), (ShardedAdamW, ShardedAdamW)):
        params = list(nn.Linear(3, 2).parameters())
        opt: Any = make(params)
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()

        def before(optimizer: Any) -> None:
            optimizer.state["test"] = {"ran": 1}

        def after(optimizer: Any) -> None:
            optimizer.state["loaded"] = True

        opt.register_state_dict_pre_hook(before)
        opt.register_load_state_dict_post_hook(after)
        found = opt.state_dict()
        assert list(found["state"]) == [0, 1, "test"] and found["state"]["test"] == {"ran": 1}, kind
        other: Any = make(params)
        other.register_load_state_dict_post_hook(after)
        other.load_state_dict(saved(found))
        assert other.state["test"] == {"ran": 1} and other.state["loaded"] is True and len(other.state) == 4, kind
        assert list(other.state) == [*params, "test", "loaded"] and "test" in other.state and "x" not in other.state
        assert copy.deepcopy(other).state["test"] == {"ran": 1}
        assert other.state.pop("test") == {"ran": 1} and other.state.setdefault("new", 3) == 3
        del other.state["loaded"]
        assert list(other.state_dict()["state"]) == [0, 1, "new"], kind
        with pytest.raises(KeyError, match="test"):
            del other.state["test"]
        other.load_state_dict(saved({**found, "state": {k: v for k, v in found["state"].items() if k != "test"}}))
        assert list(other.state) == [*params, "loaded"], kind


def test_keys_of_params_are_not_ones_own() -> None:
    params, opt = stepped()
    found = opt.state_dict()
    with raises(StateError, "99"):
        opt.load_state_dict({**found, "state": {**found["state"], 99: found["state"][0]}})
    named = ShardedAdamW([(f"p{index}", param) for index, param in enumerate(params)])
    by_name = {**found["param_groups"][0], "params": [f"p{index}" for index in range(24)]}
    state = {f"p{index}": each for index, each in found["state"].items()}
    named.load_state_dict({"state": state, "param_groups": [by_name]})
    assert len(named.state) == 24 and named.state[params[2]]["step"] == 1
    with raises(StateError, "typing"):
        named.load_state_dict({"state": {**state, "typing": state["p0"]}, "param_groups": [by_name]})
    with raises(StateError, "view of shards"):
        opt.state.setdefault(params[0], {})
    assert len(opt.state) == 24 and repr(opt.state).startswith("StateView({Parameter containing")


def test_names_stay_where_a_dict_has_none() -> None:
    for make in (torch.optim.AdamW, ShardedAdamW):
        module = nn.Linear(3, 2)
        unnamed: Any = make(module.parameters(), lr=0.5)
        named: Any = make(module.named_parameters(), lr=0.25)
        named.load_state_dict(unnamed.state_dict())
        (group,) = named.param_groups
        assert (group["param_names"], group["lr"]) == (["weight", "bias"], 0.5), make


def test_a_param_listed_twice_has_its_first_number() -> None:
    for make in (torch.optim.SGD, ShardedSGD):
        a, b = Parameter(torch.ones(2)), Parameter(torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt: Any = make([a, b], lr=0.1, momentum=0.9)
        opt.param_groups.extend(opt.param_groups)
        assert [group["params"] for group in opt.state_dict()["param_groups"]] == [[0, 1], [0, 1]], make
