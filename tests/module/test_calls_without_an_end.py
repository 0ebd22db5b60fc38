"""Stage 3: calls whose end no hook tells hold their units until the next step, and disturb none after it."""

import pytest
import torch
from torch import Tensor, nn

from shardopt import ShardedSGD
from tests.support.comparing import snapshot
from tests.support.modules import RATES, W, data, small
from tests.support.ranks import Pool


class Reader(nn.Module):
    """An embedding, whose call has no differentiable input, and layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.last = nn.Embedding(9, W), nn.Linear(W, W), nn.Linear(W, W)
        self.interrupts = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed((x.abs() * 3).long().clamp(max=8)))
        if self.interrupts:
            raise KeyboardInterrupt
        return self.last(x)


def trained(stage: int) -> list[bytes]:
    model = Reader()
    opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
    for step in range(5):
        opt.zero_grad()
        model(data(step, 4, 2)).square().mean().backward()
        torch.autograd.grad(model(data(step + 9, 4, 2)).sum(), list(model.parameters()))  # no hook tells when it ends
        if step % 2:
            model.interrupts = True
            with pytest.raises(KeyboardInterrupt):  # it is no Exception: torch calls no hooks
                model(data(step, 4, 2))
            model.interrupts = False
        opt.step()
    if stage == 3:
        gatherer = opt.engine.domain.gatherer
        model(data(0, 4, 2))
        assert gatherer.passes.direction is None, "the forward did not end"
        assert gatherer.gathered == sorted(opt.schedule().kept)
        assert not any(unit.users for unit in gatherer.units.values())
    bits = snapshot(model, opt)
    opt.close()
    return bits


def as_at_stage_1() -> None:
    assert trained(3) == trained(1)


def test_no_call_is_left_over(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(as_at_stage_1, world=world)
