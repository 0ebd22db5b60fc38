"""What one rank's closure raises reaches all ranks at once, wherever they wait for it; and all go on together."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import DisagreementError, ShardedSGD, ShardoptError, Tuning
from tests.support.beside_a_device import beside_a_device, for_gpus
from tests.support.ranks import Pool
from tests.support.training import raises, raw

SGD = {"lr": 0.5, "momentum": 0.5}
MOMENTS = ("before forward", "before backward", "in backward", "between two backwards", "behind backward")
SPOILT = "a batch that cannot be read"


class Net(nn.Module):
    """Its gradients are whole numbers, and do not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(90, 7), nn.Linear(60, 5)
        for param in self.parameters():
            nn.init.ones_(param)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        loss = self.second(x[:, :60]).sum()
        if loss.requires_grad:
            loss.register_hook(lambda _: self.between())
        return self.first(x).sum() + 2 * loss


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(-9, 9, (4, 90), generator=generator).float()


def fail() -> None:
    raise ValueError(SPOILT)


def closure_of(model: Net, opt: ShardedSGD, step: int, moment: str | None) -> Callable[[], Tensor]:
    """Two micro-batches, both reduced; fails at the moment."""

    def closure() -> Tensor:
        opt.zero_grad()
        if moment == "before forward":
            fail()
        loss = model(batch(step))
        if moment == "before backward":
            fail()
        model.between = fail if moment == "in backward" else lambda: None
        loss.backward()
        model.between = lambda: None
        if moment == "between two backwards":
            fail()
        model(batch(10 + step)).backward()
        if moment == "behind backward":
            fail()
        return loss

    return closure


def failing_closures(stage: int, neighbours: bool, group: dist.ProcessGroup | None = None) -> None:
    """At every moment, on the first rank and on the last, at the first step and later."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tuning = Tuning(neighbours=neighbours, bucket_bytes=300, keep_below=100, timeout=120)
    reference, expected = Net(), []
    theirs = ShardedSGD(reference, stage=1, **SGD)
    for step in range(2):
        theirs.step(closure_of(reference, theirs, step, None))
        expected.append([raw(param) for param in reference.parameters()])
    for first, moments in ((0, MOMENTS[:2]), (1, MOMENTS)):
        model = Net()
        opt: Any = ShardedSGD(model, stage=stage, process_group=group, tuning=tuning, **SGD)
        for step in range(first):
            opt.step(closure_of(model, opt, step, None))
        for number, moment in enumerate(moments):
            odd = number % size
            with raises(ValueError if rank == odd else DisagreementError, SPOILT):
                opt.step(closure_of(model, opt, first, moment if rank == odd else None))
            if moment == "in backward":  # what has come is a part of the gradients, on every rank
                with raises(ShardoptError, "call zero_grad() on every rank"):
                    opt.step()
            assert opt.updates == first, moment
        opt.step(closure_of(model, opt, first, None))
        with opt.unsharded():
            found = [raw(param) for param in model.parameters()]
        assert found == expected[first], (first, stage, neighbours)
        opt.close()


def failing_closures_beside_a_device() -> None:
    """Over collectives of the device, of which hosts hear nothing."""
    group = for_gpus()
    with beside_a_device(group, lambda: False):
        failing_closures(2, False, group)


def test_all_ranks_hear_of_it(ranks: Pool) -> None:
    for stage, neighbours in ((1, False), (2, True), (3, True), (0, False)):
        ranks.run(failing_closures, stage, neighbours, world=3)
    ranks.run(failing_closures_beside_a_device, world=3)
