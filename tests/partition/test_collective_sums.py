"""Sums of fp16 gradients by the backend's own collectives, as over NCCL: they overflow no sooner than their mean.

Nor do they lose what is small sooner than that asks for.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardopt import ShardedSGD, Tuning
from tests.partition.test_collective_wire import collectives
from tests.support.ranks import Pool
from tests.support.training import raw

LARGE = 40_000.0  # two of them are more than fp16 can hold
LEAST = 2.0**-22  # a quarter of it, as three ranks send it, is the least that fp16 can hold
NUMEL = 300


class Scaled(nn.Module):
    """Its params' gradients are what it is called with. The last one has a bucket of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, numel in (("first", NUMEL), ("second", NUMEL), ("last", 4 * NUMEL)):
            self.register_parameter(name, nn.Parameter(torch.zeros(numel, dtype=dtype)))

    def forward(self, factors: Tensor) -> Tensor:
        first, second, last = ((param * 1).float() for param in (self.first, self.second, self.last))
        return (first * factors[0]).sum() + (second * factors[1]).sum() + (last * factors[2]).sum()


def summed(dtype: torch.dtype, backwards: int, is_collective: bool, **options: Any) -> list[bytes]:
    model = Scaled(dtype)
    tuning = Tuning(neighbours=False, bucket_bytes=5 * NUMEL, keep_below=1)
    optimizer = ShardedSGD(model, lr=0.25, tuning=tuning, **options)
    for _ in range(backwards):
        model(torch.tensor([LARGE, LEAST, -LARGE])).backward()
    if not options.get("release_gradients"):
        optimizer.step()
    with optimizer.unsharded():
        found = [param.detach().float() for param in model.parameters()]
    optimizer.close()
    assert all(each.isfinite().all() and each.any() for each in found), (options, is_collective)
    return [raw(each) for each in found]


def sums_are_those_of_messages() -> None:
    """Those are fp32: of these numbers, every sum is exact in either way."""
    for dtype, backwards, options in (
        (torch.float16, 1, {"stage": 2}),
        (torch.float16, 2, {"stage": 3}),  # the second adds to the first
        (torch.float16, 1, {"stage": 0}),
        (torch.float16, 1, {"stage": 1, "release_gradients": True}),
        (torch.float32, 1, {"stage": 2, "reduce_dtype": torch.float16}),
    ):
        expected = summed(dtype, backwards, False, **options)
        with collectives():
            assert summed(dtype, backwards, True, **options) == expected, (dtype, options)


def test_sums_in_fp16_overflow_no_sooner_than_their_mean(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(sums_are_those_of_messages, world=world)
