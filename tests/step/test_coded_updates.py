"""Params that travel in 8 bits after an update, at stages 1 and 2: ranks show the oracle's values, owners keep theirs.

Gradients are given, so that a training without the option has the exact values of each step.
"""

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from shardopt import ShardedAdamW, ShardedSGD, Tuning
from shardopt.domain import exact_slice
from shardopt.domain.exact_slice import ExactSlice
from shardopt.kernels.tables import BLOCK
from shardopt.plan import Way, plan
from shardopt.step import update as update_module
from tests.step.test_quantized_traffic import Given, arrived, own_gradients, wire
from tests.support.compiled import nothing_compiled
from tests.support.ranks import Pool
from tests.support.training import raw

BF16 = torch.bfloat16


def bits_of(values: Any) -> list[bytes]:
    """Zeros of both signs are one value: codes have one."""
    return [raw(each.detach().flatten() + 0.0) for each in values]


def shown_of(exact: list[Tensor]) -> list[bytes]:
    """What all ranks show of these values."""
    return bits_of(torch.from_numpy(arrived(each)).to(each.dtype) for each in exact)


def exact_of(model: Given, optimizer: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """What ``unsharded()`` shows, in the dtype that params have in forward: with ``compute_dtype`` it may show fp32."""
    with optimizer.unsharded():
        return [each.detach().to(dtype, copy=True) for each in model.weights]


def step_of(model: Given, optimizer: Any, step: int, dtype: torch.dtype = torch.float32) -> None:
    optimizer.zero_grad()
    if optimizer.engine.options.module is not None:
        model(own_gradients(dist.get_rank(), step, dtype)).backward()
    else:  # the caller reduces
        for each, own in zip(model.weights, own_gradients(0, step, dtype), strict=True):
            each.grad = own
    optimizer.step()


WAYS: tuple[dict[str, Any], ...] = (
    {"stage": 1, "wire": "messages"},
    {"stage": 2, "wire": "collectives", "dtype": BF16},
    {"stage": 2, "wire": "memory"},
    {"stage": 2, "wire": "messages", "dtype": BF16, "master": "none"},
    {"stage": 1, "wire": "messages", "dtype": BF16, "master": "split"},
    {"stage": 1, "wire": "messages", "release_gradients": True},
    {"stage": 1, "wire": "memory", "handed_over": False},
    {"stage": 2, "wire": "messages", "ema": 0.5, "offload": "disk"},
    {"stage": 2, "wire": "messages", "compute_dtype": BF16},
    {"stage": 2, "wire": "messages", "overlaps": True},
    {"stage": 1, "wire": "collectives", "overlaps": True, "dtype": BF16},
)


def follows(way: dict[str, Any], directory: str) -> None:
    given = dict(way)
    name, dtype, handed_over = given.pop("wire"), given.pop("dtype", torch.float32), given.pop("handed_over", True)
    seen = given.get("compute_dtype", dtype)
    if "offload" in given:
        given["offload"] = f"{directory}/{dist.get_rank()}"
    looked_at = patch.object(exact_slice, "_LOOKED_AT", BLOCK)  # a write may be in any piece of a slice
    with nothing_compiled(), wire(name) as tuning, looked_at:
        overlaps = given.pop("overlaps", False)
        tuning = replace(tuning, overlap_gather=overlaps)
        made = []
        for asked in (None, "int8"):
            model = Given(dtype)
            of = model if handed_over else model.parameters()
            made.append((model, ShardedAdamW(of, lr=0.1, gather_dtype=asked, tuning=tuning, **given)))
        (twin, of_twin), (model, opt) = made
        for step in range(4):
            for each, its in made:
                step_of(each, its, step, dtype)
            assert overlaps == (type(model.weights[6]) is not Parameter)  # it is on its way
            exact = exact_of(twin, of_twin, seen)
            assert {each.dtype for each in model.weights} == {seen}
            assert bits_of(model.weights) == shown_of(exact), (way, step)
            assert bits_of(exact_of(model, opt, seen)) == bits_of(exact), (way, step)
            assert bits_of(model.weights) == shown_of(exact), (way, step)  # again, after the context
            if step == 1:  # a write counts, also where no version tells of it: nothing else of the param changes
                for each in (twin, model):
                    each.weights[4].data[3, 5:9] = 0.75
                    with torch.no_grad():
                        each.weights[6][:300].fill_(-0.5)
            if handed_over:
                mine, theirs = model.state_dict(), twin.state_dict()
                whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in mine.values()]
                others = [getattr(each, "full_tensor", lambda each=each: each)() for each in theirs.values()]
                assert bits_of(whole) == bits_of(others), way
            if "ema" in given:
                averages = []
                for each, its in made:
                    with its.unsharded(ema=True):
                        averages.append(bits_of(each.weights))
                assert averages[0] == averages[1]
        if step != 1 and "offload" not in given:
            states = [its.state_dict()["state"] for _, its in made]
            for one, other in zip(*(states[at].values() for at in (0, 1)), strict=True):
                assert {key: raw(each) for key, each in one.items()} == {key: raw(each) for key, each in other.items()}
        for _, its in made:
            its.close()
        assert bits_of(model.weights) == bits_of(twin.weights), way


def all_follow(directory: str, ways: tuple[dict[str, Any], ...]) -> None:
    for way in ways:
        follows(way, directory)


def test_ranks_show_what_arrives_and_owners_keep_theirs(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(all_follow, str(tmp_path), WAYS, world=2)
    ranks.run(all_follow, str(tmp_path), WAYS[1:3], world=3)


def resumes(directory: str) -> None:
    """A resumed run has the bits of the one that goes on; files hold the exact values, whatever params show."""
    ways: tuple[dict[str, Any], ...] = ({"stage": 1, "compute_dtype": BF16}, {"stage": 2})
    for options in ways:
        given: dict[str, Any] = {"lr": 0.1, "gather_dtype": "int8", "tuning": Tuning(neighbours=False), **options}
        stage = options["stage"]
        model, again = Given(), Given()
        opt = ShardedAdamW(model, **given)
        for step in range(2):
            step_of(model, opt, step)
        path = f"{directory}/{stage}"
        shardopt.save_checkpoint(path, model, opt)
        saved = bits_of(each.full_tensor() for each in model.state_dict().values())
        resumed = ShardedAdamW(again, **given)
        step_of(again, resumed, 5)
        shardopt.load_checkpoint(path, again, resumed)
        assert bits_of(again.weights) == bits_of(model.weights), stage
        assert bits_of(each.full_tensor() for each in again.state_dict().values()) == saved
        for step in (2, 3):
            step_of(model, opt, step)
            step_of(again, resumed, step)
            assert bits_of(again.weights) == bits_of(model.weights), (stage, step)
        # What is loaded counts, also where params show the same already.
        other = Given()
        its = ShardedAdamW(other, **given)
        step_of(other, its, 5)
        model.weights[6].data.copy_(other.weights[6].data)
        shardopt.save_checkpoint(f"{path}-again", model, opt)
        shardopt.load_checkpoint(f"{path}-again", other, its)
        saved_again = bits_of(each.full_tensor() for each in model.state_dict().values())
        assert bits_of(each.full_tensor() for each in other.state_dict().values()) == saved_again
        its.close()
        plain = Given()
        unrounded = ShardedAdamW(plain, lr=0.1)
        shardopt.load_checkpoint(path, plain, unrounded)
        assert bits_of(plain.weights) == saved, stage  # as they were saved first
        # A tensor assigned to ``param.data`` is taken by the read itself, each of them.
        one, two = (torch.full_like(model.weights[4], each) for each in (0.75, -1.5))
        name = next(of for of, each in model.named_parameters() if each is model.weights[4])
        model.weights[4].data = one.clone()
        assert torch.equal(model.state_dict()[name].full_tensor(), one.float()), stage
        model.weights[4].data = two.clone()
        assert torch.equal(dict(opt.weights(dtype=torch.float32))[name], two.float()), stage
        # A state dict of the module goes back with all its bits, also where params show the same already.
        kept = copy.deepcopy(model.state_dict())
        before = bits_of(each.full_tensor() for each in kept.values())
        model.load_state_dict(kept)
        assert bits_of(each.full_tensor() for each in model.state_dict().values()) == before
        assert bits_of(whole for _, whole in opt.weights(dtype=torch.float32)) == before
        for each in (opt, resumed, unrounded):
            each.close()


def test_a_resume_has_the_same_bits(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(resumes, str(tmp_path), world=2)


def looks_one_by_one(directory: str) -> None:
    """A shard is looked at right before its update, while those before it travel; all at once if all may be undone."""
    seen: list[str] = []
    looked, updated, encoded = ExactSlice.begin_update, update_module.update_chunks, ExactSlice.encode

    def look(self: ExactSlice) -> None:
        seen.append("look")
        looked(self)

    def update(*arguments: Any) -> None:
        seen.append("update")
        updated(*arguments)

    def encode(self: ExactSlice, shard: Tensor) -> Tensor:
        seen.append("encode")
        return encoded(self, shard)

    ways: tuple[tuple[dict[str, Any], list[str]], ...] = (
        ({}, ["look", "update", "encode"] * 3),
        ({"offload": f"{directory}/{dist.get_rank()}"}, ["look"] * 3),
    )
    for given, expected in ways:
        model, seen[:] = Given(), []
        with wire("messages") as tuning:
            opt = ShardedAdamW(model, lr=0.1, stage=2, gather_dtype="int8", tuning=tuning, **given)
        of_slices = patch.multiple(ExactSlice, begin_update=look, encode=encode)
        with of_slices, patch.object(update_module, "update_chunks", update):
            step_of(model, opt, 0)
        assert seen[: len(expected)] == expected, (given, seen)
        assert [seen.count(each) for each in ("look", "encode")] == [3, 3], (given, seen)  # of three buckets
        opt.close()


def test_the_first_shard_travels_before_the_second_is_read(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(looks_one_by_one, str(tmp_path), world=2)


def counts() -> None:
    """Slices and messages are counted as they are planned."""
    for dtype in (torch.float32, BF16):
        made, needs = [], []
        for asked in (None, "int8"):
            model = Given(dtype)
            opt = ShardedAdamW(model, stage=2, gather_dtype=asked, tuning=Tuning(neighbours=False))
            step_of(model, opt, 0, dtype)
            made.append(opt.memory()["param"]["device"])
            way = Way(2, True, dtype)
            needs.append(plan(model, opt, dist.get_world_size(), way, opt.options).bytes["param"]["device"])
            opt.close()
        numel = sum(param.numel() for param in model.parameters())
        assert made[1] - made[0] == needs[1] - needs[0] > (dtype.itemsize + 1) * numel / dist.get_world_size()


def test_memory_is_as_planned(ranks: Pool) -> None:
    ranks.run(counts, world=2)


def test_stage_0_gathers_nothing() -> None:
    with pytest.raises(ValueError, match="give stage=1, 2 or 3, or omit gather_dtype='int8'"):
        ShardedSGD(nn.Linear(2, 2), lr=1.0, stage=0, gather_dtype="int8")
