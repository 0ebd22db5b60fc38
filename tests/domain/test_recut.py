"""Promise: each rank's own ``state_dict()`` is enough to go on, whatever buckets a new optimizer has."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardopt import Part, ShardedAdamW, ShardedOptimizer, StateError, Tuning
from tests.support.ranks import Pool
from tests.support.training import load_bytes, raises, raw, saved_bytes

TUNING = Tuning(keep_below=10)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 40), nn.Tanh(), nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 3))
    model[2].weight.data = model[2].weight.data.t().contiguous().t()  # strides of its own
    return model


def optimizer_of(model: nn.Sequential, stage: int, tuning: Tuning = TUNING) -> ShardedAdamW:
    """With the first layer in a group of its own, if it trains."""
    groups: list[dict[str, Any]] = [{"params": list(model[2:].parameters())}]
    if model[0].weight.requires_grad:
        groups.append({"params": list(model[0].parameters()), "lr": 1e-3})
    return ShardedAdamW(groups, lr=0.01, module=model, stage=stage, tuning=tuning)


def train_step(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    x = torch.randn(4, 17, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    model(x).square().mean().backward()
    opt.step()


def thawed() -> ShardedAdamW:
    """After two steps without the first layer and two with it: its states lie in buckets of their own."""
    model = network()
    model[0].requires_grad_(False)
    opt = optimizer_of(model, 2)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        train_step(model, opt, step)
    return opt


def states_of(opt: ShardedOptimizer) -> dict[tuple[int, str], Any]:
    """Of all params, whole."""
    state = load_bytes(saved_bytes(opt))["state"]
    return {(number, name): raw(value) for number, each in state.items() for name, value in each.items()}


def goes_on_from_own_slices() -> None:
    first = thawed()
    live = first.state_dict()
    kept, whole = copy.deepcopy(live), states_of(first)
    # Before it is bound a new optimizer takes slices of a run that is gone, at any stage, and with any buckets.
    for other, tuning in ((2, TUNING), (0, TUNING), (3, TUNING), (1, Tuning(bucket_bytes=3000))):
        opt = optimizer_of(network(), other, tuning)
        opt.load_state_dict(kept)
        opt.bind()
        assert states_of(opt) == whole, (other, tuning)
        opt.close()
    # Once it is bound it fetches what it lacks.
    model = network()
    bound = optimizer_of(model, 1)
    train_step(model, bound, 0)
    bound.load_state_dict(live)
    assert states_of(bound) == whole
    # What is nowhere any more is an error on every rank that lacks something, and changes nothing.
    train_step(model, bound, 1)
    before = states_of(bound)
    with raises(StateError, "load this dict before the first forward or step", "Nothing was loaded"):
        bound.load_state_dict(kept)
    assert states_of(bound) == before
    if dist.get_rank() == 1:
        for number, state in kept["state"].items():
            kept["state"][number] = {
                name: Part(value.local[:0], 0, value) if isinstance(value, Part) else value
                for name, value in state.items()
            }
    opt = optimizer_of(network(), 1)
    opt.load_state_dict(kept)
    with raises(StateError, "load a dict of whole tensors", "none holds those from"):
        opt.bind()
    bound.close()
    first.close()


def test_goes_on_from_own_slices(ranks: Pool) -> None:
    ranks.run(goes_on_from_own_slices, world=3)
