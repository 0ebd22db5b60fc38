"""The two passes of Muon, which multiply and add with one rounding: Triton's kernels, the native ones and NumPy's."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shardopt import ShardedMuon
from shardopt.kernels.formats import BF16, FP32, Format
from shardopt.kernels.spec import Spec
from shardopt.optim import recipe
from shardopt.rules import Rule, fma
from shardopt.rules.muon import accumulate, apply
from shardopt.rules.passes import passes_of
from shardopt.tools.optimizers import named
from shardopt.tools.twins import compare, fma_rounds_once
from tests.kernels.test_kernels import NASTY, check
from tests.support.ptx.process import Compiling
from tests.support.ptx.shards import check_step

GROUP = {**ShardedMuon([torch.zeros(1, 1)]).defaults, "lr": 0.02, "shape": (30, 20)}
PASSES: dict[str, tuple[Rule, Format, Format]] = {"accumulate": (accumulate, BF16, FP32), "apply": (apply, FP32, BF16)}


@pytest.fixture
def fused() -> Iterator[None]:
    """Triton's interpreter rounds twice, and no GPU does."""
    with fma_rounds_once():
        yield


@pytest.mark.parametrize("name", PASSES)
def test_passes_of_muon(name: str, fused: None) -> None:
    of, param, grad = PASSES[name]
    for seed, grads in enumerate(("log_uniform", "special")):
        check(dataclasses.replace(NASTY, grads=grads, seed=seed), of, GROUP, param, grad, None)


@pytest.mark.parametrize("name", ["Muon", pytest.param("LAMB", marks=pytest.mark.slow)])
def test_twins_of_rules_of_several_passes(name: str) -> None:
    rule, group = recipe(named(name))
    taken: list[int] = []
    found = compare(rule, [group, {**group, "lr": 0.5}], torch.bfloat16, steps=1, advance=taken.append)
    assert taken == [1]
    states = {"Muon": {"update", "momentum_buffer"}, "LAMB": {"exp_avg", "exp_avg_sq"}}[name]
    assert set(found) == {"param", "master"} | states
    assert all(elements and not different for elements, different in found.values()), found


def in_passes() -> None:
    for of, param, grad in PASSES.values():
        spec = Spec(passes_of(of.variant(GROUP)), param, grad, None)
        check_step(dataclasses.replace(NASTY, grads="log_uniform"), spec, GROUP, of)


def test_passes_as_compiled(compiling: Compiling) -> None:
    compiling(in_passes)


def test_fma_rounds_once() -> None:
    """Products that lie in the middle of two fp32 numbers, and a term that float64 loses beside them: it decides."""
    generator = np.random.default_rng(0)
    x, y = ((1 << 12) + 2 * generator.integers(0, 512, 1000) + 1 for _ in range(2))  # a product is odd, of 25 bits
    z = np.where(generator.integers(0, 2, 1000), 1, -1)
    exact = [int(one) * int(other) + int(third) for one, other, third in zip(x, y, z, strict=True)]  # even: of 24 bits
    found = fma(x.astype(np.float32), y.astype(np.float32), (z * 2.0**-40).astype(np.float32))
    assert [int(each) for each in found] == exact
    twice = (x.astype(np.float64) * y + z * 2.0**-40).astype(np.float32)
    assert 400 < np.sum(found != twice) < 600
