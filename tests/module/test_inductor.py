"""Models compiled by inductor, torch's real compiler, train with the numbers of the eager model at every stage.

Inductor writes C++ for CPUs and calls the system's compiler. What it made is kept below ``.test_cache/``: the first run
in a checkout takes 18 seconds of a core, most of them in that compiler, and later ones 8.
"""

import os
import shutil
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shardopt import ShardedAdamW, Tuning
from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.training import batch, close_to, ddp

STEPS = 4
# Buckets of their own for the two layers; at stage 3 nothing is kept.
SMALL = Tuning(bucket_bytes=1000, keep_below=0, live_bytes=0, timeout=60)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 40), nn.Linear(40, 7)

    def forward(self, data: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(data)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    data, targets = (each.float() / 8 for each in batch(step))
    return (model(data) - targets).square().mean()


def trains_as_eager(stage: int, by_layer: bool = False) -> None:
    """Compiled within DDP at stage 1, around a module that was handed over at stage 2, before it is at stage 3.

    Args:
        by_layer: each layer is compiled, as one graph.
    """
    from torch._inductor import config

    warnings.simplefilter("ignore")  # what Dynamo and inductor say of their own doing
    torch._dynamo.reset()
    counters.clear()
    expected, model = Layers(), Layers()
    if by_layer:
        for each in model.children():
            each.compile(fullgraph=True)
    compiled = model if by_layer else torch.compile(model)
    run = ddp(compiled) if stage == 1 else compiled
    opts = [
        torch.optim.AdamW(expected.parameters(), lr=1e-2),
        ShardedAdamW({1: run, 2: model, 3: compiled}[stage], lr=1e-2, stage=stage, tuning=SMALL),
    ]
    folder = str(ROOT / ".test_cache" / "inductor")
    # A pool of processes that compile, and trials of what the processor can do, would make the first run twice as long.
    settings = config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True})
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), settings:
        for step in range(STEPS):
            losses = []
            for each, opt in zip((ddp(expected), run), opts, strict=True):
                opt.zero_grad()
                loss = loss_of(each, step)
                loss.backward()
                opt.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    # Forward and backward of each graph were compiled, or found. At stage 3 graphs break where layers are gathered.
    made = counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
    assert made == (4 if by_layer else {1: 2, 2: 2, 3: 6}[stage])
    ours = opts[1]
    assert isinstance(ours, ShardedAdamW)
    with ours.unsharded():
        close_to(model, expected)
    ours.close()
    torch._dynamo.reset()


def all_stages() -> None:
    for stage in (1, 2, 3):
        trains_as_eager(stage)
    trains_as_eager(3, by_layer=True)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler for CPUs")
def test_inductor(ranks: Pool) -> None:
    ranks.run(all_stages, world=2, deadline=500)
