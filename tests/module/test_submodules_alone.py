"""A module that is trained through its submodules or other methods only: ``bind()`` or the first call takes it over."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import ShardedSGD
from tests.support.modules import RATES, W, data, small
from tests.support.ranks import Pool
from tests.support.training import close_to


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.decoder = nn.Linear(W, W)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).square()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))


def by_torch() -> nn.Module:
    model = Coder()
    opt = torch.optim.SGD(model.parameters(), **RATES)
    for step in range(4):
        opt.zero_grad()
        trained_part(model, step).square().mean().backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        opt.step()
    return model


def trained_part(model: Coder, step: int) -> Tensor:
    x = data(step, 4, W)
    return model.decoder(x) if step == 3 else model.encode(x) if step % 2 else model.encoder(x)


def trains_without_its_forward() -> None:
    expected = by_torch()
    for stage in (0, 1, 2, 3):
        for wrap in (False, True):
            for evaluates in (False, True):
                model = Coder()
                whole = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
                opt = ShardedSGD(whole, **RATES, stage=stage, tuning=small(), release_gradients=stage == 0)
                if stage % 2:
                    opt.bind()
                if evaluates:
                    with torch.no_grad():
                        model(data(9, 2, W))
                for step in range(4):
                    opt.zero_grad()
                    trained_part(model, step).square().mean().backward()
                    opt.step()
                with opt.unsharded():
                    close_to(model, expected)
                opt.close()


def test_submodules_alone(ranks: Pool) -> None:
    ranks.run(trains_without_its_forward, world=2)
