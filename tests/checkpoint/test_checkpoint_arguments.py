"""Arguments of checkpoints: what is taken for granted elsewhere is refused by name, on all ranks; nothing is left."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from shardopt import CheckpointError, ShardedAdamW
from tests.support.ranks import Pool
from tests.support.training import Net, raises


def endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("directory", {"directory": ""}),
    ("directory", {"directory": None}),
    ("directory", {"directory": b"bytes"}),
    ("module", {"module": None}),
    ("module", {"module": "swapped"}),
    ("optimizer", {"optimizer": {}}),
    ("optimizer", {"optimizer": []}),
    ("optimizer", {"optimizer": 7}),
    ("optimizer", {"optimizer": "twice"}),
    ("torch's|shardopt's", {"optimizer": "torch's"}),
    ("names takes a dict", {"names": ["layers.0"]}),
    ("names takes a dict", {"names": {"0": "layers.0"}}),
    ("names takes a dict", {"names": {nn.Linear(1, 1): 3}}),
    ("names takes submodules of", {"names": {nn.Linear(1, 1): "layers.0"}}),
]
ONLY_SAVED: list[tuple[str, dict[str, Any]]] = [
    ("keep", {"keep": math.nan}),
    ("keep", {"keep": True}),
    ("keep", {"keep": 0}),
    ("keep", {"keep": 1.5}),
    ("step", {"step": 1.5}),
    ("step", {"step": 10**30}),
    ("step", {"step": -1}),
    ("step", {"step": "3"}),
    ("asynchronous", {"asynchronous": "no"}),
    ("allow_nonfinite", {"allow_nonfinite": "no"}),
    ("full_precision", {"full_precision": None}),
    ("extra", {"extra": [1]}),
    ("extra", {"extra": 7}),
    ("hold itself", {"extra": endless()}),
    ("hold itself", {"extra": {"deep": deep(5000)}}),
]


def trained() -> tuple[nn.Module, ShardedAdamW]:
    model = Net()
    optimizer = ShardedAdamW(model)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return model, optimizer


def call(function: Callable[..., Any], directory: Path, given: dict[str, Any]) -> Any:
    model, optimizer = trained()
    keywords = {"directory": directory, "module": model, "optimizer": optimizer, **given}
    if given.get("optimizer") == "twice":
        keywords["optimizer"] = [optimizer, optimizer]
    if given.get("optimizer") == "torch's":
        keywords["optimizer"] = torch.optim.AdamW(Net().parameters())
    if given.get("module") == "swapped":
        keywords["module"], keywords["optimizer"] = optimizer, model
    return function(**keywords)


@pytest.mark.parametrize(("words", "given"), [*WRONG, *ONLY_SAVED])
def test_saving_refuses(words: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError, CheckpointError), match=words):
        call(shardopt.save_checkpoint, tmp_path / "saved", given)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("words", "given"), [*WRONG, ("strict", {"strict": "no"})])
def test_loading_refuses(words: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained()
    shardopt.save_checkpoint(tmp_path, model, optimizer).wait()
    with pytest.raises((TypeError, ValueError), match=words):
        call(shardopt.load_checkpoint, tmp_path, given)


def test_numbers_of_others(tmp_path: Path) -> None:
    model, optimizer = trained()
    given = {"step": np.int64(7), "keep": torch.tensor(1), "full_precision": np.True_, "extra": {"levels": deep(90)}}
    shardopt.save_checkpoint(str(tmp_path), model, optimizer, **given).wait()
    loaded = shardopt.load_checkpoint(tmp_path, model, [optimizer], strict=np.True_)  # type: ignore[arg-type]
    assert loaded.step == 7 and loaded["levels"] == deep(90)


@pytest.mark.parametrize("wrong", [None, "", 3])
def test_preparing_refuses(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"prepare_states\(\) takes"):
        shardopt.prepare_states(wrong)


def on_one_rank(directory: Path) -> None:
    """All ranks are told, none waits, and the next call is met by all."""
    model, optimizer = trained()
    mine = dist.get_rank() == 1
    for given in ({"step": -1}, {"keep": "all"}, {"asynchronous": "no"}):
        with raises((TypeError, ValueError) if mine else CheckpointError, *given):  # type: ignore[arg-type]
            shardopt.save_checkpoint(directory, model, optimizer, **(given if mine else {}))
    shardopt.save_checkpoint(directory, model, optimizer).wait()
    for name, given in (("directory", {"directory": ""}), ("strict", {"strict": "no"})):
        with raises((TypeError, ValueError) if mine else CheckpointError, name):  # type: ignore[arg-type]
            keywords = {"directory": directory, **(given if mine else {})}
            shardopt.load_checkpoint(module=model, optimizer=optimizer, **keywords)
    assert shardopt.load_checkpoint(directory, model, optimizer).step == 1
    # Ranks that save other things, or otherwise, would publish a checkpoint of which nobody knows what it holds.
    there = sorted(os.listdir(directory))
    for option, other in (("keep", 2), ("asynchronous", True), ("allow_nonfinite", True), ("full_precision", True)):
        dist.barrier()
        with raises(CheckpointError, "ranks differ", option):
            shardopt.save_checkpoint(directory, model, optimizer, **({option: other} if mine else {}))
        assert sorted(os.listdir(directory)) == there


def test_what_is_wrong_on_one_rank(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(on_one_rank, tmp_path, world=2)
