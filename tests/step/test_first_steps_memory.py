"""The first two steps need no more memory than later ones, whatever masters and states are kept in.

A run that dies of its first step never shows what its later ones would need.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import ShardedAdamW
from tests.support.memory import resident
from tests.support.ranks import Pool

WIDTH, LAYERS, STEPS = 2048, 4, 4
NUMEL = WIDTH * WIDTH * LAYERS
FORMATS = [
    pytest.param({"master": "fp32"}),
    pytest.param({"master": "split"}),
    pytest.param({"master": "split", "state_format": "int8"}, marks=pytest.mark.slow),
    pytest.param({"master": "split24", "state_format": "int8"}),
    pytest.param({"master": "split24", "state_format": "bf16"}, marks=pytest.mark.slow),
    pytest.param({"master": "split24", "state_format": "int8", "ema": 0.9}, marks=pytest.mark.slow),
    pytest.param({"master": "none", "state_format": "int8"}, marks=pytest.mark.slow),
    pytest.param({"master": "split", "state_format": "int8", "release_gradients": True}),
]


def peak() -> int:
    """Bytes that this process held at most since :func:`forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peaks_of_steps(width: int, layers: int, formats: dict[str, Any]) -> list[int]:
    """Bytes of each step from its forward on, beyond what was there before the model."""
    before = resident()
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).bfloat16()
    optimizer = ShardedAdamW(model, stage=1, **formats)
    found = []
    for _ in range(STEPS):
        resident()
        forget_peak()
        model(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(peak() - before)
    optimizer.close()
    return found


def measured(formats: dict[str, Any]) -> list[int]:
    torch.use_deterministic_algorithms(False)  # else torch.empty fills what nobody may ever touch
    peaks_of_steps(64, 1, formats)  # what is loaded and compiled once
    try:
        return peaks_of_steps(WIDTH, LAYERS, formats)
    finally:
        torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: "-".join(map(str, formats.values())))
def test_the_first_steps_need_no_more_than_later_ones(formats: dict[str, Any], ranks: Pool) -> None:
    ((first, second, *later),) = ranks.run(measured, formats, world=1, group=False)
    assert min(later) > 4 * NUMEL  # at the least param, gradient and 8 bits each of two states: it was measured at all
    assert max(first, second) <= 1.1 * max(later), [round(each / NUMEL, 2) for each in (first, second, *later)]
