"""Gradients that travel in 8 bits: the bits of an oracle in NumPy, on every connection and at every stage."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from shardopt import BindingError, CommunicationError, ShardedSGD, Tuning
from tests.partition.test_collective_wire import collectives
from tests.support.ranks import Pool
from tests.support.training import raw

SHAPES = ((300,), (1,), (), (0, 3), (16, 33), (257,), (12 * 256,))
BLOCK = 256
APART = Tuning(neighbours=False, bucket_bytes=4096, keep_below=1)


# -- the oracle: codes of 7 bits and a sign, in straight pieces, and a scale of 16 bits a block ------------------------


def bits(values: Any) -> Any:
    return np.asarray(values, np.float32).view(np.int32)


def decoded(values: Any) -> Any:
    """What another rank makes of one block."""
    offset, step = np.float32(2.0**-7), 1 << 19
    top = (bits(offset) + 127 * step).astype(np.int32).view(np.float32) - offset
    largest = np.abs(values).max()
    if not np.isfinite(largest):
        return np.full_like(values, np.nan)
    if largest == 0:
        return np.zeros_like(values)
    scale = ((bits(largest * np.float32(1 / float(top))) + 128) & -256).astype(np.int32).view(np.float32)
    scale = np.maximum(scale, np.float32(2.0**-126))
    inverse = np.float32(1) / scale
    codes = np.minimum((bits(np.abs(values) * inverse + offset) - bits(offset) + step // 2) // step, 127)
    fractions = (bits(offset) + codes * step).astype(np.int32).view(np.float32) - offset
    return np.copysign(fractions * scale, values)


def arrived(gradient: Tensor) -> Any:
    flat = gradient.float().flatten().numpy()
    return np.concatenate(
        [np.zeros(0, np.float32), *(decoded(flat[at : at + BLOCK]) for at in range(0, len(flat), BLOCK))]
    )


# -- what is trained ---------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Params whose gradients are given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        terms = [(weight * each).sum() for weight, each in zip(self.weights, gradients, strict=True)]
        return torch.stack(terms).float().sum()


def own_gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) * 10.0**index for index, shape in enumerate(SHAPES)]


@contextmanager
def wire(name: str) -> Iterator[Tuning]:
    with collectives() if name == "collectives" else nullcontext():
        yield Tuning(bucket_bytes=4096, keep_below=1, neighbours=name == "memory")


def values_of(model: Given, optimizer: Any) -> list[Tensor]:
    with optimizer.unsharded():
        return [each.detach().clone() for each in model.weights]


def sums_are_the_oracles() -> None:
    world = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        expected = []
        for each in zip(*(own_gradients(rank, 0, dtype) for rank in range(world)), strict=True):
            total = arrived(each[0])
            for other in each[1:]:
                total = total + arrived(other)
            expected.append(torch.from_numpy(-(total / np.float32(world))).to(dtype))
        for stage in range(4):
            for name in ("messages", "collectives", "memory"):
                with wire(name) as tuning:
                    model = Given(dtype)
                    opt = ShardedSGD(model, lr=1.0, stage=stage, reduce_dtype="int8", tuning=tuning)
                    model(own_gradients(dist.get_rank(), 0, dtype)).backward()
                    opt.step()
                    found = values_of(model, opt)
                    opt.close()
                for mine, theirs in zip(found, expected, strict=True):
                    assert raw(mine) == raw(theirs.view(mine.shape) + 0.0), (dtype, stage, name)


def test_sums_are_the_oracles(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(sums_are_the_oracles, world=world)


def nonfinite_travel() -> None:
    for value in (np.inf, -np.inf, np.nan):
        model = Given()
        opt = ShardedSGD(model, lr=1.0, stage=2, reduce_dtype="int8", tuning=APART)
        gradients = own_gradients(dist.get_rank(), 0)
        if dist.get_rank() == 1:
            gradients[4][3, 3] = value
        model(gradients).backward()
        with pytest.warns(UserWarning, match="256 elements .* all ranks skipped this step"):  # all of its block
            opt.step()
        assert not any(each.any() for each in values_of(model, opt)), value
        opt.close()


def test_nonfinite_gradients_travel(ranks: Pool) -> None:
    """The step is skipped on every rank, as without quantization."""
    ranks.run(nonfinite_travel, world=2)


class Fails(torch.autograd.Function):
    """Raises in backward on rank 1."""

    @staticmethod
    def forward(_: Any, x: Tensor, fails: bool) -> Tensor:
        Fails.fails = fails
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        if Fails.fails:
            raise ArithmeticError("of this rank")
        return gradient, None

    fails = False


def a_rank_leaves() -> None:
    rank = dist.get_rank()
    with collectives():
        model = Given()
        opt = ShardedSGD(model, lr=1.0, stage=2, reduce_dtype="int8", tuning=APART)
        for step, fails in enumerate((False, True, False)):
            gradients = own_gradients(rank, step)
            opt.zero_grad()
            if fails:
                weights = [*model.weights]
                terms = [
                    (Fails.apply(each, rank == 1) if index == 2 else each) * gradients[index]
                    for index, each in enumerate(weights)
                ]
                with pytest.raises(
                    ArithmeticError if rank == 1 else CommunicationError, match=r"of this rank|rank 1 left"
                ):
                    torch.stack([each.sum() for each in terms]).sum().backward()
            else:
                model(gradients).backward()
                opt.step()
        opt.close()


def test_a_rank_that_leaves_is_named_and_all_go_on(ranks: Pool) -> None:
    ranks.run(a_rank_leaves, world=2)


def refuses_copies() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    opt = ShardedSGD(Given(), lr=1.0, stage=2, reduce_dtype="int8", process_group=mesh)
    with pytest.raises(BindingError, match="omit reduce_dtype='int8'"):
        opt.bind()


def test_copies_of_the_states_are_refused(ranks: Pool) -> None:
    ranks.run(refuses_copies, world=4)
