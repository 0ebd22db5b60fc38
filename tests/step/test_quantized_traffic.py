"""Gradients and params that travel in 8 or 4 bits: the bits of an oracle in NumPy, on every connection and stage."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from shardopt import BindingError, CommunicationError, ShardedSGD, Tuning
from shardopt.plan import Way, plan
from tests.partition.test_collective_wire import collectives
from tests.support.ranks import Pool
from tests.support.training import raw

SHAPES = ((300,), (1,), (), (0, 3), (16, 33), (257,), (12 * 256,))
BLOCK = 256
APART = Tuning(neighbours=False, bucket_bytes=4096, keep_below=1)


# -- the oracle: codes of 7 bits and a sign, in straight pieces, and a scale of 16 bits a block ------------------------


def bits(values: Any) -> Any:
    return np.asarray(values, np.float32).view(np.int32)


def decoded(values: Any, form: str = "int8") -> Any:
    """What another rank makes of one block."""
    most, offset, step = {"int8": (127, np.float32(2.0**-7), 1 << 19), "int4": (7, np.float32(0.125), 1 << 22)}[form]
    top = (bits(offset) + most * step).astype(np.int32).view(np.float32) - offset
    largest = np.abs(values).max()
    if not np.isfinite(largest):
        return np.full_like(values, np.nan)
    if largest == 0:
        return np.zeros_like(values)
    scale = ((bits(largest * np.float32(1 / float(top))) + 128) & -256).astype(np.int32).view(np.float32)
    scale = np.maximum(scale, np.float32(2.0**-126))
    inverse = np.float32(1) / scale
    codes = np.minimum((bits(np.abs(values) * inverse + offset) - bits(offset) + step // 2) // step, most)
    fractions = (bits(offset) + codes * step).astype(np.int32).view(np.float32) - offset
    return np.copysign(fractions * scale, values)


def arrived(gradient: Tensor, form: str = "int8") -> Any:
    flat = gradient.float().flatten().numpy()
    blocks = (decoded(flat[at : at + BLOCK], form) for at in range(0, len(flat), BLOCK))
    return np.concatenate([np.zeros(0, np.float32), *blocks])


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
    """On three ranks every two of stage, connection and form meet; on two every three."""
    world = dist.get_world_size()
    for turn, (dtype, form) in enumerate(((torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float32, "int4"))):
        expected = []
        for each in zip(*(own_gradients(rank, 0, dtype) for rank in range(world)), strict=True):
            total = arrived(each[0], form)
            for other in each[1:]:
                total = total + arrived(other, form)
            expected.append(torch.from_numpy(-(total / np.float32(world))).to(dtype))
        for stage in range(4):
            for number, name in enumerate(("messages", "collectives", "memory")):
                if world > 2 and (stage + number + turn) % 3:
                    continue
                with wire(name) as tuning:
                    model = Given(dtype)
                    opt = ShardedSGD(model, lr=1.0, stage=stage, reduce_dtype=form, tuning=tuning)
                    model(own_gradients(dist.get_rank(), 0, dtype)).backward()
                    opt.step()
                    found = values_of(model, opt)
                    opt.close()
                for mine, theirs in zip(found, expected, strict=True):
                    assert raw(mine) == raw(theirs.view(mine.shape) + 0.0), (dtype, form, stage, name)


def test_sums_are_the_oracles(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(sums_are_the_oracles, world=world)


class Owed:
    """What one rank sends of one param, by the oracle, and what it keeps."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.kept = np.zeros(math.prod(shape), np.float32)

    def sends(self, gradient: Tensor, form: str) -> Any:
        value = gradient.flatten().numpy() + self.kept
        sent = arrived(torch.from_numpy(value), form)
        self.kept = torch.from_numpy(value - sent).bfloat16().float().numpy()
        return sent


def everything_arrives() -> None:
    """Params and residuals have the bits of the oracle; what was applied and what is owed are all gradients."""
    rank, world, steps = dist.get_rank(), dist.get_world_size(), 4
    for stage, form, released, name in (
        (0, "int4", True, "messages"),
        (1, "int8", True, "messages"),
        (2, "int4", False, "messages"),
        (2, "int8", False, "collectives"),
        (3, "int8", False, "messages"),
    ):
        options = {"lr": 1.0, "stage": stage, "reduce_dtype": form, "release_gradients": released}
        with wire(name) as tuning:
            model = Given()
            opt = ShardedSGD(model, error_feedback=True, tuning=tuning, **options)
            owed = [[Owed(shape) for shape in SHAPES] for _ in range(world)]
            expected = [np.zeros(math.prod(shape), np.float32) for shape in SHAPES]
            everything = [np.zeros(math.prod(shape)) for shape in SHAPES]
            for step in range(steps):
                opt.zero_grad()
                model(own_gradients(rank, step)).backward()
                opt.step()
                for index, each in enumerate(zip(*(own_gradients(other, step) for other in range(world)), strict=True)):
                    sent = [owed[other][index].sends(one, form) for other, one in enumerate(each)]
                    expected[index] = expected[index] - functools.reduce(np.add, sent) / np.float32(world)
                    everything[index] += sum(one.double().flatten().numpy() for one in each)
            where = (stage, form, name)
            kept, values = residuals_of(opt), values_of(model, opt)
            for index, (mine, theirs) in enumerate(zip(values, expected, strict=True)):
                assert raw(mine.flatten() + 0.0) == raw(torch.from_numpy(theirs) + 0.0), (*where, index)
                own = torch.from_numpy(owed[rank][index].kept).bfloat16()
                assert raw(kept[index] + 0.0) == raw(own + 0.0), (*where, index)
                due = sum(each[index].kept.astype(np.float64) for each in owed)
                rest = everything[index] + theirs.astype(np.float64) * world - due
                assert np.abs(rest).max(initial=0) <= 10.0**index * world * steps * 2e-3, (*where, index)
            without = ShardedSGD(Given(), error_feedback=False, tuning=tuning, **options)
            without.bind()
            more = opt.memory()["gradient"]["device"] - without.memory()["gradient"]["device"]
            way = Way(stage, True, torch.float32, release_gradients=released)
            planned = [
                plan(model, each, world, way, each.options).bytes["gradient"]["device"] for each in (opt, without)
            ]
            assert more == planned[0] - planned[1] >= sum(each.nbytes for each in kept), where
            opt.close()
            without.close()


def residuals_of(optimizer: Any) -> list[Tensor]:
    """This rank's, by param, 1D."""
    (domain,) = optimizer.engine.domains
    found: list[Tensor] = []
    for param in optimizer.engine.options.module.weights:
        entry = domain.entries[domain.locals.of(param)]
        bucket = domain.reducer.buckets[entry.shard.number]
        start = bucket.offsets[entry.index]
        found.append(bucket.code.residual.values[start : start + param.numel()].clone())
    return found


def test_error_feedback_loses_nothing(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(everything_arrives, world=world)


def resumes(directory: str) -> None:
    """At as many ranks with the bits of the run that was saved and went on; nothing is lost at another number."""
    world = dist.get_world_size()
    everyone = dist.group.WORLD if world == 2 else None
    for stage in (0, 2):
        given = {"lr": 1.0, "stage": stage, "reduce_dtype": "int4", "tuning": APART, "error_feedback": True}
        path, model = f"{directory}/{stage}", Given()
        opt = ShardedSGD(model, **given)
        if everyone is not None:
            for step in range(3):
                train(model, opt, step)
            shardopt.save_checkpoint(path, model, opt)
        else:
            shardopt.load_checkpoint(path, model, opt)
        kept = residuals_of(opt)
        for index, each in enumerate(kept):
            total = each.float()
            dist.all_reduce(total)
            file = f"{path}/owed{index}.pt"
            if everyone is None:
                assert torch.equal(total, torch.load(file)), (stage, index)  # one rank has what is not zero
            elif dist.get_rank() == 0:
                torch.save(total, file)
        if everyone is not None:
            again = Given()
            resumed = ShardedSGD(again, **given)
            assert not shardopt.load_checkpoint(path, again, resumed).losses
            for step in range(3, 6):
                train(model, opt, step)
                train(again, resumed, step)
            assert [*map(raw, values_of(model, opt))] == [*map(raw, values_of(again, resumed))]
            assert [*map(raw, residuals_of(opt))] == [*map(raw, residuals_of(resumed))]
            plain = Given()
            loaded = shardopt.load_checkpoint(path, plain, ShardedSGD(plain, lr=1.0, stage=stage))
            assert any("what quantized gradients owe" in each for each in loaded.losses)
        opt.close()


def train(model: Given, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(own_gradients(dist.get_rank(), step)).backward()
    optimizer.step()


def test_what_is_owed_resumes(ranks: Pool, tmp_path: Path) -> None:
    for world in (2, 3):
        ranks.run(resumes, str(tmp_path), world=world)


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


class Watched(Given):
    """Keeps the weights that its forward sees."""

    def forward(self, gradients: list[Tensor]) -> Tensor:
        self.seen = [each.detach().clone() for each in self.weights]
        return super().forward(gradients)


def params_arrive() -> None:
    """Forwards see the oracle's values, the same on all ranks; slices stay exact, so that steps add up no error."""
    rank = dist.get_rank()
    for dtype, name in ((torch.float32, "messages"), (torch.bfloat16, "collectives"), (torch.float32, "memory")):
        with wire(name) as tuning:
            kept = {}
            for asked in (None, "int8"):
                model = Watched(dtype)
                opt = ShardedSGD(model, lr=1.0, stage=3, gather_dtype=asked, tuning=tuning)
                for step in range(3):
                    before = values_of(model, opt)
                    opt.zero_grad()
                    loss = model(own_gradients(rank, step, dtype))
                    for seen, exact in zip(model.seen, before, strict=True):
                        expected = exact if asked is None else torch.from_numpy(arrived(exact)).to(dtype)
                        assert raw(seen.flatten() + 0.0) == raw(expected.flatten() + 0.0), (dtype, name, step)
                    if step == 1:  # between forward and backward, where units may be here already
                        assert [*map(raw, values_of(model, opt))] == [*map(raw, before)]
                    loss.backward()
                    opt.step()
                with torch.no_grad():  # what is evaluated is what would be saved
                    model(own_gradients(rank, 0, dtype))
                assert [*map(raw, model.seen)] == [*map(raw, values_of(model, opt))]
                with opt.join():  # ranks without a batch join gathers and sums
                    for step in range(1 + rank):
                        train(model, opt, step)
                if asked and opt.units:
                    (unit,) = opt.units.values()
                    unit.unshard()
                    by_hand = [each.detach().clone() for each in model.weights]
                    unit.reshard()
                    assert [*map(raw, by_hand)] == [*map(raw, values_of(model, opt))]
                kept[asked] = [*map(raw, values_of(model, opt))]
                opt.close()
            assert kept[None] == kept["int8"], (dtype, name)


def test_params_arrive_and_slices_stay_exact(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(params_arrive, world=world)


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


def verified() -> str:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(64, 64)

    ways = [{"reduce_dtype": "int8"}, {"reduce_dtype": "int4", "error_feedback": False}]
    return str(
        shardopt.verify(build, [torch.ones(2, 64)], 2, loss=lambda net, x: net(x).pow(2).sum(), stages=(2,), ways=ways)
    )


def test_verify_expects_a_difference(ranks: Pool) -> None:
    for found in ranks.run(verified, world=2):
        assert found.count("other formats than torch's") == 2, found
