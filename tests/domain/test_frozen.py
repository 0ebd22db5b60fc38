"""Frozen params at stage 3: models of which nothing trains are sharded, and what stays whole is named once."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import Offload, ShardedAdamW, Tuning, load_checkpoint, save_checkpoint
from shardopt.tensors.unsharded_guard import is_sharded
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import raises


def references() -> None:
    """A reference model of an RL loop: all of its forwards are without gradients, until it is thawed."""
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
        x = torch.ones(2, 64)
        expected = model(x)
        optimizer = ShardedAdamW(model, stage=3, tuning=Tuning(keep_below=0))
        with mode():
            found = [model(x) for _ in range(2)]
        assert all(torch.equal(each, expected) for each in found), mode
        assert all(map(is_sharded, model.parameters())), mode
        whole = sum(param.nbytes for param in model.parameters())
        optimizer.step()  # takes back what the forward gathered
        assert optimizer.memory()["param"]["device"] < 0.6 * whole, mode  # half, and padding
        model.requires_grad_(True)
        model(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(model(x), expected), mode
        optimizer.close()


def evaluated_alone() -> None:
    """Where something trains, an evaluation before training binds nothing: ranks may do it on their own."""
    model = nn.Linear(16, 16)
    optimizer = ShardedAdamW(model, stage=3, tuning=Tuning(keep_below=0))
    if torch.distributed.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 16))
    assert optimizer.engine.domain is None
    optimizer.close()


def test_a_model_of_which_nothing_trains_is_sharded_at_its_first_forward(ranks: Pool) -> None:
    ranks.run(references, world=2)
    ranks.run(evaluated_alone, world=2)


KINDS = [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float64, torch.float32]


class Packed(nn.Module):
    """A layer over a frozen base of packed numbers, of each dtype that torch computes with."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(-768, 768).view(24, 64) % 7
        self.base = nn.ParameterList(nn.Parameter(numbers.to(kind), requires_grad=False) for kind in KINDS)
        self.turned = nn.Parameter(numbers.t().to(torch.int8), requires_grad=False)  # in another order of storage
        self.top = nn.Linear(24, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x @ self.turned.to(x.dtype))
        for each in self.base:
            x = torch.tanh(self.top(x) @ each.to(x.dtype).t())
        return self.top(x)


def packed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Packed() for _ in range(3)))


def trained_packed(**options: Any) -> tuple[list[Tensor], dict[str, Tensor], ShardedAdamW, nn.Module]:
    model, found = packed(), []
    optimizer = ShardedAdamW(model, lr=1e-2, **options)
    for step in range(4):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank()))
        y = model(x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
    with optimizer.unsharded():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return found, weights, optimizer, model


def alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, raw(one)) == (other.shape, other.dtype, raw(other))


def packed_numbers(path: str) -> None:
    """Sharded in their own dtypes, gathered with their unit, as they are: in bits, in a part, in files."""
    outputs, weights, optimizer, model = trained_packed(stage=1)
    assert alike(outputs[0], packed()(torch.randn(5, 64, generator=torch.Generator().manual_seed(dist.get_rank()))))
    save_checkpoint(f"{path}/whole", model, optimizer)
    optimizer.close()
    frozen = {name: param for name, param in packed().named_parameters() if not param.requires_grad}
    ways: list[dict[str, Any]] = [{}, {"gather_dtype": "int8"}, {"offload": Offload(path, params=path)}]
    for more, neighbours in ((ways[0], True), *((each, False) for each in ways)):
        tuning = Tuning(keep_below=0, live_bytes=0, neighbours=neighbours)
        found, now, optimizer, model = trained_packed(stage=3, tuning=tuning, **more)
        assert all(is_sharded(param) for param in model.parameters())
        assert all(alike(now[name], param) for name, param in frozen.items())
        if "gather_dtype" not in more:
            assert all(map(alike, found, outputs)) and all(alike(now[name], weights[name]) for name in weights)
        if "gather_dtype" not in more:
            check_packed(f"{path}/whole", model, optimizer, frozen)
        optimizer.close()
        assert all(alike(dict(model.named_parameters())[name], param) for name, param in frozen.items())


def check_packed(path: str, model: nn.Module, optimizer: ShardedAdamW, frozen: dict[str, Tensor]) -> None:
    parts: Any = {name: model.state_dict()[name] for name in frozen}
    assert all(alike(part.full_tensor(), frozen[name]) for name, part in parts.items())
    streamed = dict(optimizer.weights(dtype=torch.bfloat16))
    assert all(alike(streamed[name], frozen[name]) for name in KEPT_AS_IS)
    own = sum(param.nbytes for param in frozen.values()) / dist.get_world_size()
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    optimizer.step()  # reshards
    held = optimizer.memory()["param"]
    assert own <= held.get("disk", held["device"]) < 1.2 * own + trained
    copies = {name: part.full_tensor() for name, part in parts.items()}
    with optimizer.unsharded(), torch.no_grad():
        for param in copies:
            model.get_parameter(param).zero_()
    assert not any(part.full_tensor().to(torch.int32).any() for part in parts.values())
    load_checkpoint(path, model, optimizer)
    assert all(alike(part.full_tensor(), copies[name]) for name, part in parts.items())


KEPT_AS_IS = [f"1.base.{at}" for at, kind in enumerate(KINDS) if not kind.is_floating_point] + ["2.turned"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_packed_numbers_are_sharded_as_they_are(ranks: Pool, world: int, tmp_path: Path) -> None:
    ranks.run(packed_numbers, str(tmp_path), world=world)


class Quantized(nn.Module):
    """A trained layer over a frozen base that no bucket can hold."""

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.base, self.small = (
            nn.Parameter(each, requires_grad=False) for each in (base, torch.ones(2, dtype=torch.int8))
        )
        self.top = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.top(x)
        return found


BASES: list[tuple[Tensor, str, int]] = [
    (torch.eye(64, 64).to_sparse(), "torch.sparse_coo", 1280),
]


@pytest.mark.parametrize(("base", "kind", "nbytes"), BASES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_frozen_base_that_stays_whole_is_named_once(base: Tensor, kind: str, nbytes: int) -> None:
    def train(**options: Any) -> list[str]:
        model = Quantized(base)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = ShardedAdamW(model, **options)
            for _ in range(2):
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
        optimizer.close()
        return [str(each.message) for each in caught]

    (said,) = train(stage=3, tuning=Tuning(keep_below=16))
    assert all(each in said for each in ("Tuning(keep=...): base (", kind, f"whole on every rank, {nbytes} bytes")), (
        said
    )
    assert "small" not in said
    for options in ({"stage": 2}, {"stage": 3}, {"stage": 3, "tuning": Tuning(keep_below=16, keep=["base"])}):
        assert not train(**options), options


def test_a_model_that_stays_whole_alone_is_named_at_its_first_forward() -> None:
    model = Quantized(torch.eye(64, 64).to_sparse()).requires_grad_(False)
    optimizer = ShardedAdamW(model, stage=3, tuning=Tuning(keep_below=300))
    with torch.no_grad():
        with raises(UserWarning, "base (torch.sparse_coo) stay whole"):
            model(torch.ones(2, 16))
        model(torch.ones(2, 16))
    optimizer.close()
