"""``copy.deepcopy(model)``, as an average of one's own takes it: refused by name while params lie in slices, in
``unsharded()`` a plain model like torch's."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardopt import ReleasedError, ShardedAdamW
from tests.support.comparing import raw
from tests.support.modules import Stack, W, data, small
from tests.support.ranks import Pool
from tests.support.training import raises

DECAY = 0.9


def averaged(stage: int) -> list[bytes]:
    torch.manual_seed(0)
    model = Stack()
    opt = ShardedAdamW(model, lr=0.01, stage=stage, ema=DECAY, tuning=small(timeout=60))
    with opt.unsharded():
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # copies the model
    for step in range(3):
        opt.zero_grad()
        model(data(step, 4, W)).square().mean().backward()
        opt.step()
        if stage == 3:
            for make in (copy.deepcopy, AveragedModel):
                with raises(ReleasedError, "copy the model in `with optimizer.unsharded():`", "ema=", "first.weight"):
                    make(model)
        with opt.unsharded():
            mean.update_parameters(model)
    with opt.unsharded():
        copied = copy.deepcopy(model)
        expected = [raw(param) for param in model.parameters()]
    assert [type(param) for param in copied.parameters()] == [nn.Parameter] * len(expected)
    plain = torch.optim.AdamW(copied.parameters(), lr=0.01)
    copied(torch.ones(2, W)).sum().backward()  # on its own: no hook of the model's, no exchange
    assert [raw(param) for param in copied.parameters()] == expected
    plain.step()
    opt.zero_grad()
    model(data(3, 4, W)).square().mean().backward()  # and nothing of it reaches the model
    opt.step()
    found = [raw(param) for param in mean.module.parameters()]
    with opt.unsharded():
        found += [raw(param) for param in model.parameters()]
    opt.close()
    return found


def alike() -> None:
    assert averaged(3) == averaged(1) == averaged(2)


def test_copied_models(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(alike, world=world)


def goes_on_frozen(stage: int) -> None:
    """After the next step nothing of a frozen param needs the original, which is closed: its states are the copy's."""
    torch.manual_seed(0)
    model = Stack()
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=small(timeout=60))
    train(model, opt, 0)
    name, frozen = next(iter(model.named_parameters()))
    frozen.requires_grad_(False)
    expected = copies(opt.state[frozen])
    with opt.unsharded():
        copied, other = copy.deepcopy((model, opt))
    again = copied.get_parameter(name)
    train(copied, other, 1)
    opt.close()
    assert copies(other.state[again]) == expected
    again.requires_grad_(True)
    train(copied, other, 2)
    assert float(other.state[again]["step"]) == 2.0 and copies(other.state[again]) != expected
    other.close()


def copies(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: raw(each + 0) for name, each in state.items()}


def train(model: nn.Module, opt: ShardedAdamW, step: int) -> None:
    opt.zero_grad()
    model(data(step, 4, W)).square().mean().backward()
    opt.step()


def test_a_frozen_param_of_a_copy_keeps_its_states(ranks: Pool) -> None:
    for stage in (1, 2, 3):
        ranks.run(goes_on_frozen, stage, world=2)
