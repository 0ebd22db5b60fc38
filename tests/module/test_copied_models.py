"""``copy.deepcopy(model)``, as an average of one's own takes it: refused by name while params lie in slices, in
``unsharded()`` a plain model like torch's."""

import copy

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
