"""Frozen params at stage 3: models of which nothing trains are sharded, and what stays whole is named once."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from shardopt import ShardedAdamW, Tuning
from shardopt.tensors.unsharded_guard import is_sharded
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
    (torch.ones(64, 16, dtype=torch.int8), "torch.int8", 1024),
    (TwoTensor(torch.ones(64, 16), torch.ones(64, 16)), "TwoTensor", 8192),
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


def test_a_model_of_integers_alone_is_named_at_its_first_forward() -> None:
    model = Quantized(torch.ones(64, 16, dtype=torch.int8)).requires_grad_(False)
    optimizer = ShardedAdamW(model, stage=3, tuning=Tuning(keep_below=300))
    with torch.no_grad():
        with raises(UserWarning, "base (torch.int8) stay whole"):
            model(torch.ones(2, 16))
        model(torch.ones(2, 16))
    optimizer.close()
