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


class Adapted(torch.nn.Module):
    """A frozen layer with an adapter, as PEFT's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(24, 24).requires_grad_(False)
        self.a, self.b = (torch.nn.Linear(*shape, bias=False) for shape in ((24, 3), (3, 24)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.base(x) + self.b(self.a(x)))
        return found


def merge(module: torch.nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor] | None:
    if not isinstance(module, Adapted):
        return None
    return {"weight": own["base.weight"] + own["b.weight"] @ own["a.weight"], "bias": own["base.bias"]}


def wrong(module: torch.nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor] | None:
    found = merge(module, own)
    is_last = dist.get_rank() == dist.get_world_size() - 1 and not any(each.is_meta for each in own.values())
    return found if found is None or not is_last else {**found, "more": found["weight"]}


def merges(root: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 24), *(Adapted() for _ in range(3)), torch.nn.Linear(24, 24))
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small())
    train_step_of(model, opt)
    with opt.unsharded():
        own = {name: each.detach().clone() for name, each in model.named_parameters()}
    expected = {f"{at}.{kind}": own[f"{at}.{kind}"] for at in (0, 4) for kind in ("weight", "bias")}
    for at in (1, 2, 3):
        expected[f"{at}.weight"] = own[f"{at}.base.weight"] + own[f"{at}.b.weight"] @ own[f"{at}.a.weight"]
        expected[f"{at}.bias"] = own[f"{at}.base.bias"]
    for dtype in (None, torch.bfloat16):
        wanted = {name: each.to(dtype or each.dtype) for name, each in expected.items()}  # rounded once, merged
        found, metadata = dict(opt.weights(2000, dtype, merge=merge)), opt.weights_metadata(dtype, merge=merge)
        assert found.keys() == wanted.keys() and list(metadata) == list(found)
        assert all(torch.equal(found[name], each) and found[name].dtype is each.dtype for name, each in wanted.items())
        assert all(
            (each.shape, each.dtype) == (found[name].shape, found[name].dtype) for name, each in metadata.items()
        )
    shardopt.save_weights(root, opt, merge=merge, prefix="1.", bytes_per_file=6000)
    dist.barrier()
    saved = {name: each for file in Path(root).glob("*.safetensors") for name, each in load_file(file).items()}
    assert saved.keys() == {name.removeprefix("1.") for name in expected} and saved["weight"].equal(
        expected["1.weight"]
    )
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with raises(ValueError if is_last else StateError, "meta device" if is_last else "left its loop"):
        for _ in opt.weights(2000, merge=wrong):
            pass
    assert dict(opt.weights()).keys() == own.keys()  # that loop has ended on all ranks
    for at_meta in (True, False):

        def fails(module: torch.nn.Module, own: dict[str, Tensor], at_meta: bool = at_meta) -> dict[str, Tensor] | None:
            if isinstance(module, Adapted) and dist.get_rank() == 0 and at_meta is own["base.bias"].is_meta:
                raise RuntimeError("says the test")
            return merge(module, own)

        theirs = DisagreementError if at_meta else StateError
        for read in (
            lambda: list(opt.weights(2000, merge=fails)),
            lambda: shardopt.save_weights(root, opt, merge=fails),
        ):
            with raises(theirs if dist.get_rank() else RuntimeError, "rank 0" if dist.get_rank() else "says the test"):
                read()
    assert dict(opt.weights()).keys() == own.keys()
    with raises(ValueError, "omit names="):
        opt.weights(merge=merge, names=["0.weight"])
    with raises(TypeError, "return a dict of tensors by name", "returned 3"):
        opt.weights(merge=lambda module, own: 3)  # type: ignore[arg-type, return-value]
    opt.close()


def merges_exactly() -> None:
    """Of params that ``compute_dtype`` rounds, the function gets all bits where fp32 is asked for."""
    for stage in (1, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Adapted(), torch.nn.Linear(24, 24))
        opt = ShardedSGD(model, **RATES, stage=stage, tuning=small(), compute_dtype=torch.bfloat16)
        train_step_of(model, opt)
        with opt.unsharded():
            own = {name: each.detach().clone() for name, each in model.named_parameters()}
        found = dict(opt.weights(2000, torch.float32, merge=merge))
        assert own["0.a.weight"].dtype is own["0.b.weight"].dtype is torch.float32
        assert torch.equal(found["0.weight"], own["0.base.weight"] + own["0.b.weight"] @ own["0.a.weight"])
        assert opt.weights_metadata(torch.float32, merge=merge)["0.weight"].dtype is torch.float32
        opt.close()


def train_step_of(model: torch.nn.Module, opt: ShardedSGD) -> None:
    model(torch.ones(2, 24)).square().sum().backward()
    opt.step()


@pytest.mark.parametrize("world", [1, 3])
def test_adapters_are_merged_as_they_go_out(ranks: Pool, world: int, tmp_path: Path) -> None:
    ranks.run(merges, str(tmp_path), world=world)
    ranks.run(merges_exactly, world=world)
