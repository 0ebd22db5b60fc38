"""How far a training whose states are kept in fewer bits ends from one with fp32 states.

AdamW on noisy gradients of a quadratic: magnitudes differ ten times within a block and ten thousand times between
blocks, and 300 steps are far more than the first moments remember. Bounds are a tenth above what was found. With either
moment kept one bit shorter, or rounded to nearest where it is dithered, the weights end at least a fifth further away.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shardopt import ShardedAdamW

NUMEL, STEPS = 6000, 300


def trained(**formats: Any) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    param = Parameter(torch.zeros(NUMEL))
    optimum, curvature = torch.randn(NUMEL, generator=draws), torch.rand(NUMEL, generator=draws)
    blocks = torch.arange(NUMEL) // 256
    size = 10 ** (torch.rand(NUMEL, generator=draws) - 1 - blocks % 5)
    optimizer = ShardedAdamW([param], lr=3e-3, weight_decay=0.01, **formats)
    for _ in range(STEPS):
        noise = torch.randn(NUMEL, generator=draws)
        param.grad = size * (curvature * (param.detach() - optimum) + noise)
        optimizer.step()
    return param.detach()


@functools.cache
def in_fp32() -> Tensor:
    return trained()


@pytest.mark.parametrize(("state_format", "distance", "shrinks"), [("int8", 0.0175, 1e-3), ("bf16", 0.0036, 3e-4)])
def test_how_far_it_ends_from_fp32(state_format: str, distance: float, shrinks: float) -> None:
    expected, found = in_fp32(), trained(state_format=state_format)
    assert float(expected.square().mean().sqrt()) > 0.2  # it went somewhere
    error = found - expected
    assert 0 < float(error.norm() / expected.norm()) < distance
    assert abs(float((error @ expected) / (expected @ expected))) < shrinks
