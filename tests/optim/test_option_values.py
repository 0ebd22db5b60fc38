"""Values of options: read in one place, in Python's own types, or refused by name before anything is bound."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardopt import Offload, ShardedAdamW, Tuning
from tests.support.ranks import Pool

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_bytes": NAN},
        {"bucket_bytes": INF},
        {"bucket_bytes": 1.5},
        {"bucket_bytes": True},
        {"bucket_bytes": 1e30},
        {"keep_below": -5},
        {"keep_below": "many"},
        {"live_bytes": NAN},
        {"live_bytes": -1},
        {"chunk_bytes": NAN},
        {"chunk_bytes": 1e30},
        {"compress_from": -1},
        {"compress_from": "many"},
        {"neighbours": "no"},
        {"overlap_gather": "no"},
        {"broadcast_buffers": "no"},
        {"timeout": NAN},
        {"timeout": "60"},
        {"nonfinite": ["skip"]},
        {"seed": 2**63},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_tuning_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^Tuning\.{next(iter(given))} .*found"):
        Tuning(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"pin_memory": "no"},
        {"step": ["cpu"]},
        {"gradients": "gpu"},
        {"states": b"x"},
        {"fraction": 0},
        {"fraction": 1.5},
        {"fraction": "half"},
        {"early_bytes": -1},
        {"early_bytes": "1"},
    ],
    ids=str,
)
def test_offload_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^Offload\.{next(iter(given))} .*found"):
        Offload(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"stage": True},
        {"stage": 1.5},
        {"stage": "2"},
        {"max_grad_norm": True},
        {"max_grad_norm": NAN},
        {"max_grad_norm": "1"},
        {"ema": NAN},
        {"ema": "0.9"},
        {"master": ["fp32"]},
        {"state_format": {"exp_avg": torch.ones(2)}},
        {"gradient_format": np.zeros(2)},
        {"reduce_dtype": np.zeros(2)},
        {"compute_dtype": np.zeros(2)},
        {"output_dtype": np.zeros(2)},
        {"release_gradients": "no"},
    ],
    ids=str,
)
def test_options_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{next(iter(given))}\b.*found"):
        ShardedAdamW(nn.Linear(2, 2), **given)


def test_no_limit_is_a_limit_of_years() -> None:
    """Deadlines are kept in nanoseconds of 64 bits, into which infinity does not fit."""
    for timeout in (INF, 1e30, np.float64(INF)):
        deadline = Tuning(timeout=timeout).deadline
        assert deadline is not None and 365 < deadline.days < 40_000


def trains_with_numbers_of_others(directory: str) -> None:
    """Ranks compare options as JSON, which has no NumPy numbers and no tensors."""
    model = nn.Linear(300, 40)
    opt = ShardedAdamW(
        model,
        stage=np.int64(2),
        max_grad_norm=torch.tensor(1.0),
        ema=np.float32(0.5),
        release_gradients=np.False_,
        offload=Offload(Path(directory), pin_memory=np.True_),
        tuning=Tuning(bucket_bytes=np.int64(4096), chunk_bytes=4e4, seed=torch.tensor(7), timeout=np.float32(60)),
    )
    for _ in range(2):
        opt.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        opt.step()
    kinds = {type(each) for each in (opt.options.stage, opt.options.tuning.bucket_bytes, opt.options.tuning.seed)}
    assert kinds == {int} and type(opt.options.ema) is float and opt.updates == 2
    opt.close()


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_of_others_train(world: int, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(trains_with_numbers_of_others, str(tmp_path), world=world)
