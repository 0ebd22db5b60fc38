"""A load replaces what the optimizer had: masters, averages, rates in tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from tests.support.training import digest


def of_bf16(seed: int, **keywords: Any) -> tuple[nn.Module, shardopt.ShardedOptimizer]:
    """A model whose gradients are ones, after a step that moves masters and, as the rate is small, no weight."""
    torch.manual_seed(seed)
    model = nn.Linear(40, 30, bias=False).bfloat16()
    optimizer = shardopt.ShardedSGD(model, lr=2.0**-30, momentum=0.5, **keywords)
    model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_master_that_was_not_saved_is_the_weight_itself(tmp_path: Path) -> None:
    """The low bits of the present master belong to another training, even where it has the same weights."""
    model, saved = of_bf16(0, master="none")
    other, optimizer = of_bf16(0)
    assert torch.equal(other.weight, model.weight)
    assert not torch.equal(optimizer.state[other.weight]["master"], other.weight.float())
    shardopt.save_checkpoint(tmp_path, model, saved)
    shardopt.load_checkpoint(tmp_path, other, optimizer)
    assert torch.equal(optimizer.state[other.weight]["master"], model.weight.float())


def test_a_checkpoint_replaces_masters_that_waited_for_weights(tmp_path: Path) -> None:
    """Of a state dict whose weights never came: a step from the checkpoint is that of the run that was saved."""
    model, optimizer = of_bf16(0, master="split")
    other, foreign = of_bf16(1, master="split")
    shardopt.save_checkpoint(tmp_path, model, optimizer)
    twin, resumed = of_bf16(0, master="split")
    resumed.load_state_dict(foreign.state_dict())  # other.weight is not loaded
    shardopt.load_checkpoint(tmp_path, twin, resumed)
    assert digest(resumed) == digest(optimizer)
    for each, its in ((model, optimizer), (twin, resumed)):
        each(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
        its.step()
    assert digest(resumed) == digest(optimizer) and not torch.equal(other.weight, twin.weight)


def test_a_rate_in_a_tensor_is_loaded_into_that_tensor(tmp_path: Path) -> None:
    """Schedulers hold the group, and compiled code the tensor."""
    model = nn.Linear(3, 2)
    optimizer = shardopt.ShardedSGD(model, lr=torch.tensor(0.5))
    shardopt.save_checkpoint(tmp_path, model, optimizer)
    (group,) = optimizer.param_groups
    rate = group["lr"]
    rate.fill_(0.125)
    shardopt.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0] is group and group["lr"] is rate and float(rate) == 0.5


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_an_average_that_was_not_saved_begins_with_the_weights(master: str, tmp_path: Path) -> None:
    """Whatever average was kept before the load; so does that of a state dict."""

    def step(model: nn.Module, optimizer: shardopt.ShardedOptimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 40, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    made = []
    for seed, ema in enumerate((None, 0.5)):
        torch.manual_seed(seed)
        model = nn.Linear(40, 30).bfloat16()
        made.append((model, shardopt.ShardedSGD(model, lr=0.5, momentum=0.5, ema=ema, master=master)))
        for _ in range(2):
            step(*made[-1])
    (model, saved), (other, averaging) = made
    shardopt.save_checkpoint(tmp_path, model, saved)
    assert not shardopt.load_checkpoint(tmp_path, other, averaging).mismatches
    with averaging.unsharded(ema=True):
        assert all(torch.equal(*both) for both in zip(other.parameters(), model.parameters(), strict=True))
    begun = [param.detach().float() for param in model.parameters()]
    step(other, averaging)
    for start, param in zip(begun, other.parameters(), strict=True):
        average, now = averaging.state[param]["ema"], averaging.state[param]["master"]
        torch.testing.assert_close(average, (start + now) / 2, rtol=0, atol=2**-8 * float(start.abs().max()))
        assert not torch.equal(average, now)
