"""``save_weights()``: safetensors files that other libraries load, and nothing of them if a rank fails."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardopt
from shardopt import CheckpointError, DisagreementError, ShardedSGD, StateError
from tests.support.modules import RATES, Tied, small, train_step
from tests.support.ranks import Pool
from tests.support.training import raises

load_file = pytest.importorskip("safetensors.torch").load_file


def whole(model: torch.nn.Module, opt: shardopt.ShardedOptimizer, dtype: torch.dtype | None) -> dict[str, Tensor]:
    with opt.unsharded():
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        cast = {name: each.detach().clone() for name, each in named.items()}
    return {name: each.to(dtype) if dtype and each.is_floating_point() else each for name, each in cast.items()}


def saves(root: str, stage: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    model.register_buffer("seen", torch.arange(3))
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
    train_step(model, opt, 0)
    for dtype, size in ((None, 1 << 30), (torch.bfloat16, 1200)):
        folder = Path(root) / f"{stage} {dtype}"
        shardopt.save_weights(folder, opt, dtype=dtype, bytes_per_file=size)
        expected = whole(model, opt, dtype)
        files = sorted(each for each in os.listdir(folder) if each.endswith(".safetensors"))
        found = [load_file(folder / each) for each in files]
        assert {name: each for own in found for name, each in own.items()}.keys() == expected.keys()
        for own in found:
            for name, each in own.items():
                assert each.dtype is expected[name].dtype and each.equal(expected[name])
        if size == 1200:
            assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert index["weight_map"] == {name: file for file, own in zip(files, found, strict=True) for name in own}
            assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
        else:
            assert os.listdir(folder) == ["model.safetensors"]
        before = {each: (folder / each).stat().st_ino for each in os.listdir(folder)}
        kind: tuple[type[Exception], ...] = (OSError,) if dist.get_rank() == 0 else (DisagreementError, StateError)
        with (
            patch("shardopt.checkpoint.files.sync", side_effect=OSError("the disk is full, says the test")),
            pytest.raises(kind),
        ):
            shardopt.save_weights(folder, opt, dtype=dtype, bytes_per_file=size)
        assert {each: (folder / each).stat().st_ino for each in os.listdir(folder)} == before
        train_step(model, opt, 1)
    with raises(ValueError if dist.get_rank() else DisagreementError, "bytes_per_file"):
        shardopt.save_weights(root, opt, bytes_per_file=1 - dist.get_rank())
    model.register_buffer("odd", torch.ones(2, dtype=torch.complex128))
    with raises(CheckpointError, "'odd'", "complex128"):
        shardopt.save_weights(root, opt)


def test_saved_as_others_load_it(ranks: Pool, tmp_path: Path) -> None:
    for stage in (1, 3):
        ranks.run(saves, str(tmp_path), stage, world=2)
