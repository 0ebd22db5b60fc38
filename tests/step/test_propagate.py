"""``Tuning(nonfinite="propagate")`` does as torch does, clipping included: the same elements become NaN, no others."""

import math

import pytest
import torch
from torch import nn

from shardopt import ShardedAdamW, Tuning
from tests.support.ranks import Pool
from tests.support.training import Net, ddp, loss_of


def spoil(model: nn.Module, value: float) -> None:
    """One element of one param's gradient, in every backward."""
    param = model.hidden.weight
    where = torch.zeros_like(param)
    where.view(-1)[1 + where.numel() // 2] = value
    param.register_hook(lambda grad: grad + where)


def as_torch(stage: int | None, value: float, limit: float) -> None:
    theirs, ours = ddp(Net()), Net()
    spoil(theirs.module, value)
    spoil(ours, value)
    torch_opt = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    wrapped = ddp(ours)
    options = {} if stage is None else {"module": wrapped, "stage": stage}
    tuning = Tuning(nonfinite="propagate", keep_below=0)
    opt = ShardedAdamW(wrapped.parameters(), lr=0.1, max_grad_norm=limit, tuning=tuning, **options)
    loss_of(theirs, 0).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit))
    torch_opt.step()
    loss_of(wrapped, 0).backward()
    opt.step()
    assert str(opt.grad_norm) == str(norm) == ("nan" if math.isnan(value) else "inf")
    with opt.unsharded():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.isnan(), other.isnan())
            assert torch.allclose(mine, other, equal_nan=True, atol=1e-6)
    spoiled = int(sum(param.isnan().sum() for param in theirs.parameters()))
    whole = sum(param.numel() for param in theirs.parameters())
    assert spoiled == (1 if math.isinf(value) and math.isfinite(limit) else whole)
    opt.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_clipped_step_with_a_nan_is_torchs(world: int, ranks: Pool) -> None:
    for stage in (None, 1, 2, 3):
        ranks.run(as_torch, stage, math.nan, 1.0, world=world)
    for stage in (None, 2):
        ranks.run(as_torch, stage, math.inf, 1.0, world=world)
        ranks.run(as_torch, stage, -math.inf, math.inf, world=world)


def skips_and_tells(stage: int | None) -> None:
    """A skipped step tells the norm that torch's clip_grad_norm_ would return."""
    for value in (math.nan, math.inf):
        model = Net()
        spoil(model, value)
        tuning = Tuning(keep_below=0)
        params = model if stage else model.parameters()
        opt = ShardedAdamW(params, max_grad_norm=1.0, stage=stage or 1, tuning=tuning)
        loss_of(model, 0).backward()
        with pytest.warns(UserWarning, match="skipped this step") as caught:
            opt.step()
        assert caught[0].filename == __file__  # the line of the script
        assert str(opt.grad_norm) == str(value) and opt.updates == 0
        assert bool(opt.units) == (stage == 3)


def test_a_skipped_step_tells_torchs_norm(ranks: Pool) -> None:
    for stage in (None, 2):
        ranks.run(skips_and_tells, stage, world=1)
    ranks.run(skips_and_tells, 3, world=2)
