"""The law of ``docs/what-you-hold.md``, walked: each way to write to what a script holds takes effect or is refused.

The ways are those of ``tests/support/writes.py``: what torch's schemas say that writes, indices, setters, views. By
default each stand-in gets a drawn sample of them, whose seed is in the message of a failure; ``--slow`` walks all.
"""

import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardopt import Part, ShardedAdamW, ShardoptError, Tuning
from shardopt.kernels import codecs
from shardopt.tensors import part as part_module
from tests.support.ranks import Pool
from tests.support.writes import Write, writes

ROWS, COLUMNS = 40, 33  # of five blocks, so that each rank holds some
ALL = 1_000_000
ALONE = "] += 1"  # reads first: of states, a rank that is ahead has written by then


class Held(NamedTuple):
    """What a script holds.

    Attributes:
        take: returns the tensor, with the values that it had at first.
        read: collective; what the optimizer or the model has in truth.
        stored: returns values as they are after they were stored.
    """

    take: Callable[[], Tensor]
    read: Callable[[], Tensor]
    stored: Callable[[Tensor], Tensor] = torch.clone


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(values.to(dtype))
        self.other = nn.Parameter(torch.ones(700, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + self.other.sum()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, Part) else value.detach().clone()


def trained(dtype: torch.dtype, handed: bool, **options: Any) -> tuple[Model, Any]:
    model = Model(dtype)
    options = {"tuning": Tuning(keep_below=0), **options}
    opt = ShardedAdamW(model if handed else model.parameters(), lr=1e-3, **options)
    backward(model)
    opt.step()
    opt.zero_grad()
    return model, opt


def backward(model: Model) -> None:
    model(torch.linspace(-1, 1, COLUMNS).to(model.other.dtype)).backward()


# -- what a script holds -----------------------------------------------------------------------------------------------


def params(stage: int, dtype: torch.dtype, master: str) -> Held:
    """A write shows in the master, from which the next step goes on."""
    model, opt = trained(dtype, False, stage=stage, master=master)
    first = model.weight.detach().clone()

    def take() -> Tensor:
        model.weight.data = first.clone()
        return model.weight

    def read() -> Tensor:
        state = opt.state[model.weight]
        return whole(state["master"]).to(dtype) if "master" in state else whole(model.weight)

    return Held(take, read)


def entries(dtype: torch.dtype) -> Held:
    model, _ = keep = trained(dtype, True, stage=3)
    first = model.state_dict()["weight"].full_tensor()

    def take() -> Tensor:
        assert keep
        entry: Tensor = model.state_dict()["weight"]
        entry.copy_(first)
        return entry

    return Held(take, lambda: model.state_dict()["weight"].full_tensor())


def gradients(stage: int, dtype: torch.dtype) -> Held:
    model, opt = trained(dtype, True, stage=stage)

    def take() -> Tensor:
        opt.zero_grad()
        backward(model)
        assert model.weight.grad is not None
        return model.weight.grad

    return Held(take, lambda: whole(model.weight.grad))  # type: ignore[arg-type]


def states(stage: int, handed: bool, kept: str = "fp32", offload: Any = None) -> Held:
    """A new kind of what is held: its class has to be in ``CLASSES``."""
    tuning = Tuning(keep_below=0, compress_from=1)
    model, opt = trained(torch.float32, handed, stage=stage, state_format=kept, offload=offload, tuning=tuning)
    first = {name: whole(value) for name, value in opt.state[model.weight].items()}

    def format_of() -> Any:
        (shard,) = {domain.entries[model.weight].shard for domain in opt.engine.domains}
        return shard.format_of("exp_avg")

    format, dtype = format_of(), {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[kept]
    assert format.dtype is dtype, format

    def stored(values: Tensor) -> Tensor:
        return codecs.decode(*codecs.encode(values.flatten(), format), format).view(values.shape).clone()

    def take() -> Tensor:
        opt.state[model.weight] = first
        value: Tensor = opt.state[model.weight]["exp_avg"]
        return value

    return Held(take, lambda: whole(opt.state[model.weight]["exp_avg"]), stored)


def stand_ins() -> Iterator[tuple[str, Callable[[], Held]]]:
    for stage in (0, 1):
        yield f"bf16 params, stage {stage}", lambda stage=stage: params(stage, torch.bfloat16, "fp32")  # type: ignore[misc]
        yield f"split params, stage {stage}", lambda stage=stage: params(stage, torch.bfloat16, "split")  # type: ignore[misc]
    for stage in (0, 1, 2, 3):
        for kept in ("fp32", "bf16", "int8"):
            kind = f"{kept} states, stage {stage}"
            yield kind, lambda stage=stage, kept=kept: states(stage, stage > 1, kept)  # type: ignore[misc]
    yield "states on the host", lambda: states(1, False, offload="cpu")
    yield "states on a disk", lambda: states(1, False, offload=tempfile.mkdtemp())
    yield "fp32 params", lambda: params(1, torch.float32, "fp32")
    for dtype in (torch.float32, torch.bfloat16):
        yield f"entries of {dtype}", lambda dtype=dtype: entries(dtype)  # type: ignore[misc]
        for stage in (0, 1, 2, 3):
            yield f"gradients of {dtype}, stage {stage}", lambda stage=stage, dtype=dtype: gradients(stage, dtype)  # type: ignore[misc]


# -- the walk ----------------------------------------------------------------------------------------------------------


def outcome(write: Write, held: Held) -> str:
    """Returns "took effect" or "refused"; anything else is what is wrong."""
    tensor, before = held.take(), held.read()
    try:
        with torch.no_grad():
            write.call(tensor)
    except ShardoptError:
        return "refused" if _same(held.read(), before) else "refused, and written"
    except Exception as error:
        held.read()
        return "refused" if _refused_by_torch(write, before) else f"raised {type(error).__name__}: {error}"
    after, expected = held.read(), before.clone()
    if write.is_random:
        return "took effect" if not _same(after, before) else "lost"
    write.call(expected)
    expected = held.stored(expected)
    return "took effect" if _same(after, expected) else "lost" if _same(after, before) else "other values"


def _refused_by_torch(write: Write, values: Tensor) -> bool:
    """True if a param of torch's own refuses it: some calls ask for a tensor that requires no gradient."""
    try:
        with torch.no_grad():
            write.call(nn.Parameter(values.clone()))
    except Exception:
        return True
    return False


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.nan_to_num(9.5), other.nan_to_num(9.5))


def walk(seed: int, count: int, only: str = "", with_schemas: bool = True) -> dict[str, Any]:
    """Walks writes over stand-ins. Returns what was wrong, how many cells were how, and the classes of all stand-ins.

    Args:
        count: the number of writes that are drawn for each stand-in; below ``ALL`` over some of them, drawn too.
    """
    warnings.simplefilter("ignore")  # of torch, about functions that it would rather not be asked for
    wrong, cells, classes = [], Counter[str](), set()
    kinds = [(name, make) for name, make in stand_ins() if only in name]
    drawn = {name for name, _ in (kinds if count == ALL or only else random.Random(seed).sample(kinds, 8))}
    for name, make in kinds:
        held = make()
        first = held.take()
        classes.add(type(first).__name__)
        like = torch.linspace(-0.9, 0.9, ROWS * COLUMNS).view(ROWS, COLUMNS).to(first.dtype)
        draw = random.Random(f"{seed} {name}")
        is_state_part = "states" in name and isinstance(first, Part)
        for write in writes(like, count, draw, with_schemas) if name in drawn else ():
            if is_state_part and ALONE in write.name:
                cells["left out"] += 1
                continue
            found = outcome(write, held)
            is_right = found in ("took effect", "refused")
            cells[found if is_right else "wrong"] += 1
            if not is_right:
                wrong.append(f"{write.name} of {name}: {found}")
    return {"wrong": wrong, "cells": dict(cells), "classes": classes}


# What no script holds in place of a tensor to write to, and who tests it.
APART = {
    "Mask": "the result of a function of a gradient: a write to it reaches nothing, as to any result",
    "PartResult": "the result of an expression of states: a write to it reaches no record, as to any result",
    "FetchedView": "what a view of a part is: the walk writes through it",
    "ArrivingParameter": "a param while its values are under way: tests/module/test_arriving.py",
    "ArrivingDTensor": "the same of a DTensor",
    "ReleasedParameter": "a param at stage 3 outside of forward and backward: tests/module/test_unsharded.py",
    "ReleasedDTensor": "the same of a DTensor",
    "ReleasedExact": "the same with compute_dtype: tests/module/test_precision.py",
    "ExactParameter": "a param in unsharded() with compute_dtype: tests/module/test_precision.py",
    "ReleasedGradient": "a gradient that was used in backward: tests/module/test_snapshots.py",
}


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


@pytest.mark.parametrize("count", [6, pytest.param(ALL, marks=pytest.mark.slow)], ids=["drawn", "whole"])
def test_a_write_takes_effect_or_is_refused(ranks: Pool, count: int) -> None:
    """Also: a new class of tensors has a row in :func:`stand_ins`, or a reason. Default runs draw the same cells."""
    seed = 0
    for world in (1, 2):
        for rank, found in enumerate(ranks.run(walk, seed, count, world=world)):
            wrong, cells = found["wrong"], found["cells"]
            assert not wrong, f"rank {rank} of {world}, seed {seed}: {len(wrong)} of {cells}: {wrong[:20]}"
            assert sum(cells.values()) >= 8 * 6, cells
    here = {each.__name__ for each in _subclasses(Tensor) if each.__module__.startswith("shardopt.")}
    assert here <= found["classes"] | {*APART}, here - found["classes"] - {*APART}


# -- the walk finds holes ----------------------------------------------------------------------------------------------


def holes() -> None:
    """Each as it was once: a view that is a copy, a setter that is torch's, a write that no step sees."""
    seed = 1
    with patch.object(part_module, "as_views", lambda function, found: found):
        found = walk(seed, 30, "entries of torch.float32", with_schemas=False)["wrong"]
        assert any("foreach" in each and "lost" in each for each in found), found
    with patch.object(Part, "data", torch.Tensor.data):
        found = walk(seed, ALL, "entries of torch.bfloat16", with_schemas=False)["wrong"]
        assert any(each.startswith(".data = tensor of entries") for each in found), found
    with patch.object(part_module, "writes_to", lambda *_: False):
        found = walk(seed, 30, "entries of torch.float32")["wrong"]
        assert any(each.startswith("aten.") and "lost" in each for each in found), found
    with patch("shardopt.domain.shard.codecs.follow", lambda master, param, ties: master):
        found = walk(seed, 30, "bf16 params, stage 0")["wrong"]
        assert any("lost" in each for each in found), found


def test_the_walk_finds_planted_holes(ranks: Pool) -> None:
    ranks.run(holes, world=1)
