"""A module that is changed after binding: a param that came into it is trained, or named on every rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from shardopt import BindingError, DisagreementError, ShardedSGD
from tests.support.comparing import raw, snapshot
from tests.support.modules import W, data, loss_of, made, train_step
from tests.support.ranks import Pool
from tests.support.training import raises


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))


def head() -> nn.Linear:
    torch.manual_seed(9)
    return nn.Linear(W, W)


def by_index(model: nn.Module, new: nn.Linear) -> None:
    model[1] = new


def by_attribute(model: nn.Module, new: nn.Linear) -> None:
    model[1].weight, model[1].bias = new.weight, new.bias


def behind_all_hooks(model: nn.Module, new: nn.Linear) -> None:
    """As ``Module.to()`` may."""
    model[1]._parameters.update(new._parameters)


def added(model: nn.Module, new: nn.Linear) -> None:
    model.append(new)


Exchange = Callable[[nn.Module, nn.Linear], None]


def exchanged(exchange: Exchange, stage: int) -> None:
    for alone in (False, True):
        model, opt = made(stage, two_layers)
        train_step(model, opt, 0)
        new = head()
        if not alone or dist.get_rank() == 1:
            exchange(model, new)
        before, kept = snapshot(model, opt), raw(new.weight)
        for step in (1, 2):  # said again until it is mended
            opt.zero_grad()
            loss_of(model(data(step, 4, 3, W))).backward()
            here = not alone or dist.get_rank() == 1
            with raises(
                BindingError if here else DisagreementError, "is trainable but in no param group", "add_param_"
            ):
                opt.step()
        assert snapshot(model, opt) == before and raw(new.weight) == kept
        opt.close()


def goes_on(stage: int) -> list[list[bytes]]:
    """With the new params in a group, and with frozen ones."""
    model, opt = made(stage, two_layers)
    train_step(model, opt, 0)
    new = head()
    by_index(model, new)
    opt.add_param_group({"params": list(new.parameters())})
    for step in (1, 2):
        train_step(model, opt, step)
    assert raw(new.bias) != raw(head().bias)
    found = [snapshot(model, opt)]
    model.append(head().requires_grad_(False))
    for step in (3, 4):
        train_step(model, opt, step)
    found.append(snapshot(model, opt))
    del model[1]  # what is no more there has no gradient
    train_step(model, opt, 5)
    found.append(snapshot(model, opt))
    opt.close()
    return found


def all_of_it() -> None:
    for number, exchange in enumerate((by_index, by_attribute, behind_all_hooks, added)):
        exchanged(exchange, 1 + number % 3)
    results = [goes_on(stage) for stage in (1, 2, 3)]
    assert results[0] == results[1] == results[2]


def test_exchanged(ranks: Pool) -> None:
    ranks.run(all_of_it, world=2)


def test_one_rank_trains_a_new_head() -> None:
    model = two_layers()
    opt = ShardedSGD(model, lr=0.1, stage=2)
    x = torch.ones(2, W)
    model(x).sum().backward()
    opt.step()
    model[1] = head()
    model(x).sum().backward()
    with raises(BindingError, "1.weight", "nobody train it"):
        opt.step()
