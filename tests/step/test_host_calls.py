"""Promise: a param costs the host as many calls in each phase of a training step as this table says, no more.

A call is one of a Python or a C function, counted by the profiler: the same number on each machine. What a param costs
is the difference between two models; what DDP's own clipping costs is taken away.
"""

import cProfile
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardopt import ShardedAdamW

FEW, MANY, PARAMS = 4, 12, 4  # blocks, and params in each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).add(x)  # type: ignore[no-any-return]


def calls(function: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(function)
    profile.create_stats()
    return sum(each[1] for each in profile.stats.values())


def step_of(blocks: int, ours: bool) -> dict[str, int]:
    """The calls of the phases of the third step, in which all that is made once is there."""
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    params = list(model.parameters())
    opt = ShardedAdamW(model, lr=1e-3, stage=2) if ours else torch.optim.AdamW(params, lr=1e-3, foreach=True)
    for _ in range(3):
        loss = model(torch.ones(2, 8)).sum()
        found = {"backward": calls(loss.backward), "clip": calls(lambda: clip_grad_norm_(params, 1.0))}
        found["step"] = calls(opt.step)
        opt.zero_grad()
    return found


def test_calls_of_a_param() -> None:
    few, many = step_of(FEW, ours=True), step_of(MANY, ours=True)
    plain_few, plain_many = step_of(FEW, ours=False), step_of(MANY, ours=False)
    num_params = (MANY - FEW) * PARAMS
    of_a_param = {phase: (many[phase] - few[phase]) / num_params for phase in few}
    of_a_param["clip"] -= (plain_many["clip"] - plain_few["clip"]) / num_params
    assert of_a_param["backward"] <= 3, of_a_param  # the hook, and the part that is shown again
    assert of_a_param["clip"] <= 0, of_a_param
    assert of_a_param["step"] <= 0.1, of_a_param  # the plan is replayed
