"""What ranks tell each other at the end of a backward: one sum over ranks has every param's sums, maximum and facts."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from shardopt import CommunicationError, ShardedSGD, ShardoptError, Tuning
from shardopt.domain.shard import Shard
from shardopt.kernels import native_backend
from shardopt.kernels.reductions import COLUMNS, LARGEST, LIMBS, NONFINITE, norms_of_limbs
from shardopt.module import gradient_totals
from shardopt.module.gradient_report import Report, ReportLayout
from shardopt.partition.comm.reduce_scatter_p2p import P2PReduceScatter
from shardopt.partition.layout import BLOCK, BucketLayout
from tests.support.ranks import Pool
from tests.support.training import raises

# -- the vector --------------------------------------------------------------------------------------------------------

NUMELS = ((300, 0, 700, 1), (0,), (0, 0), (5 * BLOCK,), (1, 1, 1, 40 * BLOCK + 1, 1))
SPLIT = [(shards, copies) for shards in (1, 2, 3, 8, 50) for copies in (1, 2)]


@pytest.mark.parametrize(("shards", "copies"), SPLIT)
def test_the_sum_over_ranks_is_the_report_of_all(shards: int, copies: int) -> None:
    """Drawn numbers for each piece: sums, maxima and facts are those of all pieces, whoever had them."""
    buckets = [BucketLayout(numels, shards) for numels in NUMELS]
    params = [(bucket, index) for bucket in buckets for index in range(len(bucket.numels))]
    ranks, generator = shards * copies, np.random.default_rng(shards)
    limbs = np.zeros((len(params), LIMBS), dtype=np.int64)
    largest, nonfinite = np.zeros(len(params), dtype=np.float32), np.zeros(len(params), dtype=np.int64)
    facts = generator.random((3, ranks, len(params))) < 1 / ranks
    facts[1, :, 0] = True  # on all ranks
    facts[1, :, 1] = np.arange(ranks) == ranks - 1
    reports = []
    for rank in range(ranks):
        sums = np.zeros((len(params), COLUMNS), dtype=np.int64)
        layout = ReportLayout(params, rank % shards, ranks)
        for number, (bucket, index) in enumerate(params):
            if any(piece.param == index for piece in bucket.pieces(rank % shards)):
                value = np.float32(generator.random() * 10.0 ** generator.integers(-40, 38))
                sums[number] = generator.integers(0, 1 << 40, COLUMNS)
                sums[number, LARGEST] = value.view(np.int32)
                if rank < shards:
                    limbs[number] += sums[number, :LIMBS]
                    nonfinite[number] += sums[number, NONFINITE]
                    largest[number] = max(largest[number], value)
        report = Report(layout)
        report.fill_flags(facts[:, rank])
        if rank < shards:
            report.fill_sums(sums)
            # As a device does it: rows of its launches in any order, and some of no param.
            rows = generator.permutation(np.append(np.flatnonzero(sums.any(axis=1)), [-1, -1]))
            added, totals = Report(layout), np.where(rows[:, None] < 0, 0, sums[rows])
            added.fill_flags(facts[:, rank])
            added.vector.index_add_(0, torch.from_numpy(layout.places(rows)), torch.from_numpy(totals).view(-1))
            assert torch.equal(added.vector, report.vector)
        reports.append(report)
    assert {len(report.vector) for report in reports} == {len(reports[0].vector)}
    pieces = sum(len(bucket.pieces(rank)) for bucket in buckets for rank in range(shards))
    empty = sum(bucket.numels.count(0) for bucket in buckets)
    assert layout.num_pieces == pieces + empty <= len(params) + len(buckets) * (shards - 1)
    found = Report(layout)
    found.vector.copy_(torch.stack([report.vector for report in reports]).sum(dim=0))
    assert np.array_equal(found.limbs, limbs) and np.array_equal(found.nonfinite, nonfinite)
    assert np.array_equal(found.largest, largest) and found.largest.dtype == np.float32
    assert list(found.counts) == facts.sum(axis=1).tolist()
    assert found.late == np.flatnonzero(facts[2].any(axis=0)).tolist()
    assert found.held_apart == np.flatnonzero(facts[1].any(axis=0) & ~facts[1].all(axis=0)).tolist()
    assert 0 not in found.held_apart and (1 in found.held_apart) == (ranks > 1)
    assert not found.failed and not found.updated


def test_shards_of_more_elements_than_32_bits_count() -> None:
    bucket = BucketLayout((1 << 33, 5), 2)  # rank 1 has the end of the first param, and the second one
    for rank, own in ((0, [0]), (1, [0, 1])):
        layout = ReportLayout([(bucket, 0), (bucket, 1)], rank, 2)
        assert layout.num_pieces == 3 and layout.own_params.tolist() == own


def test_who_failed_and_whether_anything_moved() -> None:
    """Also of no params at all."""
    for params in ([], [(BucketLayout((3,), 4), 0)]):
        total = Report(ReportLayout(params, 0, 4))
        for rank in range(4):
            report = Report(ReportLayout(params, rank, 4))
            if rank % 2:
                report.mark_failed(rank)
            if rank == 2:
                report.mark_updated(report.vector, torch.tensor(True))
            total.vector += report.vector
        assert total.failed == [1, 3] and total.updated and len(total.largest) == len(params)


# -- between ranks -----------------------------------------------------------------------------------------------------


class Product(nn.Module):
    """The gradient of its weight is what it is given."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def each_piece_may_hold_the_largest(stage: int, mesh: bool) -> None:
    numel, size = 12 * BLOCK, dist.get_world_size()
    model = Product(numel)
    group = init_device_mesh("cpu", (2, size // 2)) if mesh else None
    tuning = Tuning(keep_below=0)  # or stage 3 keeps the param whole, as stage 2 does
    opt = ShardedSGD(model, lr=0.1, stage=stage, process_group=group, tuning=tuning)
    opt.bind()
    assert bool(opt.units) == (stage == 3)
    for at in range(0, numel, BLOCK):
        opt.zero_grad()
        x = torch.ones(numel)
        x[at], x[at - 1] = -7.0 - at, math.inf if at else 1.0
        model(x).backward()
        grad: Any = model.weight.grad
        norms = [float(torch.linalg.vector_norm(grad, order)) for order in (2, math.inf)]
        if at:
            assert all(map(math.isnan, norms)) and not grad.isfinite().all()
            x[at - 1] = 1.0
            opt.zero_grad()
            model(x).backward()
            norms = [float(torch.linalg.vector_norm(model.weight.grad, order)) for order in (2, math.inf)]
        assert norms[1] == 7.0 + at
        torch.testing.assert_close(norms[0], float(x.double().norm()), rtol=1e-6, atol=0.0)
    opt.close()


@pytest.mark.parametrize(("stage", "world", "mesh"), [(0, 2, False), (2, 3, False), (3, 3, False), (2, 4, True)])
def test_each_piece_may_hold_the_largest(stage: int, world: int, mesh: bool, ranks: Pool) -> None:
    ranks.run(each_piece_may_hold_the_largest, stage, mesh, world=world)


class Spare(Product):
    """A param of one element comes later: rank 1 holds no piece of it."""

    def __init__(self) -> None:
        super().__init__(4 * BLOCK)
        self.spare = Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.spare.sum()


def params_that_come_later_move_the_places() -> None:
    """The norms in the report are those of the slices, before and after."""
    model = Spare()
    model.spare.requires_grad = False
    opt = ShardedSGD(model, lr=0.1, stage=2)
    for has_spare in (False, True):
        if has_spare:
            opt.zero_grad()
            model.spare.requires_grad = True
        model(torch.arange(1.0, 1.0 + 4 * BLOCK)).backward()
        gradients: Any = opt.engine.takeover.rounds.main if opt.engine.takeover is not None else None
        assert len(gradients.entries) == 1 + has_spare
        report = Report(gradients.layout)
        gradients._totals.add_to(report.vector, gradients.layout, 1)
        slices = [entry.gradient_slice.total for entry in gradients.entries]
        assert any(each.any() for each in slices)
        norms = torch.tensor([float(each.double().norm()) for each in slices], dtype=torch.float64)
        assert torch.allclose(torch.from_numpy(norms_of_limbs(report.limbs)), norms, rtol=1e-6), has_spare
    opt.close()


def test_params_that_come_later_move_the_places(ranks: Pool) -> None:
    ranks.run(params_that_come_later_move_the_places, world=2)


class Several(nn.Module):
    """Each weight has a bucket of its own; the gradient of the last one is there first."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(Parameter(torch.ones(4 * BLOCK)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x.sum()


@contextmanager
def measuring_alone(come: bool) -> Iterator[None]:
    """All sums count as large; messages are taken for such that have come, which a wait makes true, or never."""
    has_come = patch.object(P2PReduceScatter, "_has_come", lambda *_: come)
    with patch.object(gradient_totals, "MEASURED_ALONE", 1), has_come:
        yield


def reports_take_what_was_measured_once(opt: Any) -> None:
    """Late gradients change sums between two reports of one backward."""
    gradients = opt.engine.takeover.rounds.main
    gradients._totals.measure_meanwhile(lambda _: True, 1)
    for _ in range(2):
        report = Report(gradients.layout)
        gradients._totals.add_to(report.vector, gradients.layout, 1)
        slices = [entry.gradient_slice.total for entry in gradients.entries]
        expected = torch.tensor([float(each.double().norm()) for each in slices], dtype=torch.float64)
        assert expected.all()
        assert torch.allclose(torch.from_numpy(norms_of_limbs(report.limbs)), expected, rtol=1e-6)
        for each in slices:
            each.mul_(2.0)


def large_sums_are_measured_while_others_travel() -> None:
    seen: list[str] = []
    add_totals, finish = native_backend.add_totals, P2PReduceScatter.finish

    def measure(*arguments: Any) -> None:
        seen.append("measure")
        add_totals(*arguments)

    def wait(self: P2PReduceScatter) -> Any:
        seen.append("wait")
        return finish(self)

    found = []
    for come in (None, False, True):
        model, norms = Several(), []
        tuning = Tuning(neighbours=False, bucket_bytes=4 * BLOCK, keep_below=0)
        with nullcontext() if come is None else measuring_alone(come):
            opt = ShardedSGD(model, lr=0.1, stage=2, tuning=tuning)
            for turn in range(4):
                if turn != 2:  # else it adds to the sums
                    opt.zero_grad()
                seen.clear()
                with (
                    patch.object(native_backend, "add_totals", measure),
                    patch.object(P2PReduceScatter, "finish", wait),
                ):
                    model(torch.arange(4.0 * BLOCK) / BLOCK + turn + dist.get_rank()).backward()
                expected = {None: ["wait", "measure"], False: ["wait"] + 3 * ["measure"]}
                assert seen == expected.get(come, 3 * ["measure"] + ["wait"]), (come, turn)
                norms += [float(torch.linalg.vector_norm(weight.grad)) for weight in model.weights]
                if turn == 1:
                    for weight in model.weights:  # what was measured no longer holds
                        weight.grad *= 0.5
                opt.step()
            if come:
                reports_take_what_was_measured_once(opt)
        opt.close()
        found.append(norms)
    assert found[0] == found[1] == found[2]


def test_large_sums_are_measured_while_others_travel(ranks: Pool) -> None:
    ranks.run(large_sums_are_measured_while_others_travel, world=2)


# -- one rank fails ----------------------------------------------------------------------------------------------------


def one_rank_cannot_sum_up_meanwhile() -> None:
    with measuring_alone(come=True):
        one_rank_cannot_sum_up(2, neighbours=False)


def test_one_rank_cannot_sum_up_meanwhile(ranks: Pool) -> None:
    ranks.run(one_rank_cannot_sum_up_meanwhile, world=2)


def one_rank_cannot_sum_up(stage: int, neighbours: bool) -> None:
    """Memory runs out on a rank that sums its slices up: the others hear of it at once, and all go on."""
    rank, numel = dist.get_rank(), 6 * BLOCK
    failing = 1 if stage else 0  # where all ranks hold the same sums, only the first one takes their norms
    model = Product(numel)
    opt = ShardedSGD(model, lr=0.5, stage=stage, tuning=Tuning(neighbours=neighbours, keep_below=0))
    opt.bind()
    assert bool(opt.units) == (stage == 3)
    add_totals = native_backend.add_totals

    def fails(*arguments: Any) -> Any:
        if rank == failing:
            raise MemoryError("no room for sums")
        return add_totals(*arguments)

    for _ in range(2):
        with patch.object(native_backend, "add_totals", fails):
            told = CommunicationError, f"rank {failing} left this backward"
            with raises(*((MemoryError, "no room") if rank == failing else told)):
                model(torch.ones(numel)).backward()
        opt.zero_grad()
        model(torch.full((numel,), 2.0)).backward()
        opt.step()
    with opt.unsharded():
        assert torch.equal(model.weight, torch.full((numel,), -1.0))
    opt.close()


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_cannot_sum_up(stage: int, neighbours: bool, ranks: Pool) -> None:
    ranks.run(one_rank_cannot_sum_up, stage, neighbours, world=2)


def one_rank_cannot_use_its_sum() -> None:
    """Rank 1 has no memory for states, which its first update in a backward makes: the others hear of it at once."""
    rank, numel = dist.get_rank(), 6 * BLOCK
    model = Product(numel)
    tuning = Tuning(neighbours=False, timeout=120.0)
    opt = ShardedSGD(model, lr=0.5, momentum=0.9, stage=1, release_gradients=True, tuning=tuning)

    def fails(*_: Any) -> Any:
        raise MemoryError("no room for states")

    with patch.object(Shard, "ensure_states", fails) if rank == 1 else nullcontext():
        error = (
            (MemoryError, "no room")
            if rank == 1
            else (CommunicationError, "restart from a checkpoint: rank 1 left this backward")
        )
        with raises(*error):
            model(torch.ones(numel)).backward()
    with raises(ShardoptError, "load a checkpoint"):
        opt.step()
    opt.close()


def test_one_rank_cannot_use_its_sum(ranks: Pool) -> None:
    ranks.run(one_rank_cannot_use_its_sum, world=2)
