"""Two hosts of two ranks, by ``Tuning(by_host=True)``: each host's bytes cross once, and sums are taken by host."""

import functools
import math
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import BindingError, CommunicationError, ShardedAdamW, ShardedSGD, Tuning
from shardopt.kernels import native_backend
from shardopt.partition.comm import peer_memory
from shardopt.partition.comm.all_gather_hosts import HostGather
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.host_marks import FILLED, READ, HostMarks
from shardopt.tensors.arriving_guard import ArrivingParameter
from tests.partition.test_ranks_apart import dropping, made, trained
from tests.step.test_quantized_traffic import SHAPES, Given, Owed, own_gradients, residuals_of, values_of
from tests.support.compiled import nothing_compiled
from tests.support.modules import poisoned
from tests.support.moments import Moments, until
from tests.support.ranks import Pool
from tests.support.training import raw
from tests.support.wire import counting

WORLD = 4
BF16 = torch.bfloat16
SIDE_BY_SIDE, IN_TURN = (0, 0, 1, 1), (0, 1, 0, 1)


def on_hosts(hosts: Sequence[int]) -> AbstractContextManager[Any]:
    """Within it, ranks are started on hosts of these numbers, by rank."""
    return patch.object(peer_memory, "namespaces", lambda: [hosts[dist.get_rank()], 0, 0])


def tuning(by_host: bool = True, **others: Any) -> Tuning:
    return Tuning(**{"bucket_bytes": 4096, "keep_below": 1, "by_host": by_host, **others})


def of_host(hosts: Sequence[int], each: Sequence[Any]) -> list[list[Any]]:
    """What ranks have, by host."""
    return [[one for host, one in zip(hosts, each, strict=True) if host == number] for number in (0, 1)]


def sums_are_taken_by_host() -> None:
    """Every stage has the bits of (ranks of host 0) + (ranks of host 1), in fp32."""
    for hosts, dtype, stages in ((SIDE_BY_SIDE, torch.float32, range(4)), (IN_TURN, BF16, (2,))):
        everyones = [own_gradients(rank, 0, dtype) for rank in range(WORLD)]
        expected = []
        for each in zip(*everyones, strict=True):
            first, second = (one.float() + other.float() for one, other in of_host(hosts, each))
            expected.append((-((first + second) / WORLD)).to(dtype))
        in_order = [functools.reduce(torch.add, map(Tensor.float, each)) for each in zip(*everyones, strict=True)]
        in_rank_order = [(-(each / WORLD)).to(dtype) for each in in_order]
        assert dtype is BF16 or [*map(raw, in_rank_order)] != [*map(raw, expected)]
        for stage in stages:
            with on_hosts(hosts):
                model = Given(dtype)
                opt = ShardedSGD(model, lr=1.0, tuning=tuning(), **{"stage": stage})  # type: ignore[arg-type]
                model(own_gradients(dist.get_rank(), 0, dtype)).backward()
                opt.step()
                found = values_of(model, opt)
                assert stage == 0 or "by host" in repr(opt)
                opt.close()
            for mine, theirs in zip(found, expected, strict=True):
                assert raw(mine + 0.0) == raw(theirs + 0.0), (hosts, dtype, stage)


def one_is_without(gradients: list[Tensor], rank: int, step: int) -> list[Tensor]:
    """In step 1 host 0 has no gradient of a param, and in step 2 rank 3 has none."""
    if (step == 1 and rank < 2) or (step == 2 and rank == 3):
        gradients[4].zero_()
    return gradients


def hosts_encode_their_sums() -> None:
    """The sum of a host is encoded once, and what that takes from it is fed back: by the oracle's bits."""
    for stage, form in ((1, "int8"), (2, "int4")):
        owed = [[Owed(shape) for shape in SHAPES] for _ in range(2)]
        expected = [np.zeros(math.prod(shape), np.float32) for shape in SHAPES]
        with on_hosts(SIDE_BY_SIDE):
            model = Given()
            options: Any = {"stage": stage, "reduce_dtype": form}
            opt = ShardedSGD(model, lr=1.0, tuning=tuning(), **options)
            for step in range(4):
                everyones = [one_is_without(own_gradients(rank, step), rank, step) for rank in range(WORLD)]
                opt.zero_grad()
                model(everyones[dist.get_rank()]).backward()
                opt.step()
                for index, each in enumerate(zip(*everyones, strict=True)):
                    sent = []
                    for host, (one, other) in enumerate(of_host(SIDE_BY_SIDE, each)):
                        total = one + other
                        is_silent = not total.any()  # sends nothing, and owes what it owed
                        sent.append(
                            np.zeros(total.numel(), np.float32) if is_silent else owed[host][index].sends(total, form)
                        )
                    expected[index] = expected[index] - (sent[0] + sent[1]) / np.float32(WORLD)
            for mine, theirs in zip(values_of(model, opt), expected, strict=True):
                assert raw(mine.flatten() + 0.0) == raw(torch.from_numpy(theirs) + 0.0), (stage, form)
            for index, mine in enumerate(residuals_of(opt)):  # a slice is owed by one rank of each host
                total = mine.float()
                dist.all_reduce(total)
                due = torch.from_numpy(owed[0][index].kept + owed[1][index].kept)
                assert torch.equal(total, due), (stage, form, index)
            opt.close()


def whole(rank: int, step: int) -> list[Tensor]:
    """Gradients whose sums are exact in any order."""
    return [each.mul(4).round().clamp(-64, 64) for each in own_gradients(rank, step)]


WAYS: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 1, "gather_dtype": "int8"},
    {"stage": 2, "gather_dtype": "int8", "module": True},
    {"stage": 1, "release_gradients": True},
    {"stage": 2, "ema": 0.5},
    {"stage": 3, "gather_dtype": "int8"},
    {"stage": 2, "overlap_gather": True},
)


def has_the_bits_of_straight_messages() -> None:
    """Where sums are exact: whatever else is asked for, over micro-batches, and with params that nobody handed over."""
    for way in (*WAYS, {"stage": 1, "gather_dtype": "int8", "module": False}):
        given = dict(way)
        has_module, late = given.pop("module", True), given.pop("overlap_gather", False)
        found = []
        for by_host in (False, True):
            with on_hosts(IN_TURN):
                model = Given()
                of = model if has_module else model.parameters()
                its = tuning(by_host, overlap_gather=late)
                clips = None if "release_gradients" in way else 1.0
                opt = ShardedAdamW(of, lr=0.01, max_grad_norm=clips, tuning=its, **given)
                for step in range(3):
                    opt.zero_grad()
                    if has_module:
                        for micro_batch in range(1 if "release_gradients" in way else 2):
                            model(whole(dist.get_rank(), 10 * step + micro_batch)).backward()
                    else:
                        for each, own in zip(model.weights, whole(0, step), strict=True):
                            each.grad = own
                    opt.step()
                shown = [] if way["stage"] == 3 else [raw(each.detach().clone()) for each in model.weights]
                found.append([*shown, *map(raw, values_of(model, opt))])
                opt.close()
        assert found[0] == found[1], way


def test_sums_are_taken_by_host(ranks: Pool) -> None:
    ranks.run(sums_are_taken_by_host, world=WORLD)
    ranks.run(hosts_encode_their_sums, world=WORLD)


def test_the_bits_of_straight_messages(ranks: Pool) -> None:
    ranks.run(has_the_bits_of_straight_messages, world=WORLD)


def skips_units() -> None:
    """At stage 3 each rank skips other blocks, and joins their gathers later."""
    with on_hosts(SIDE_BY_SIDE), poisoned():
        expected, *found = (
            [
                np.frombuffer(each, np.float32)
                for each in trained(*made(stage, by_host=True, live_bytes=live), dropping())
            ]
            for stage, live in ((1, 0), (3, None), (3, 0))
        )
        for its in found:  # a product may have other last bits where a weight lies elsewhere in memory
            assert all(np.allclose(*pair, rtol=0, atol=1e-7) for pair in zip(its, expected, strict=True))


def test_a_rank_that_skips_a_unit_joins_its_gather(ranks: Pool) -> None:
    ranks.run(skips_units, world=WORLD)


def crossed(by_host: bool, late: bool = False, **options: Any) -> float:
    """The bytes that this rank's host receives from the other one in a step, as a multiple of the params'."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    resharded = 2 if options.pop("holds", False) else True  # the ranks of a host
    its = Tuning(
        bucket_bytes=1 << 18, by_host=by_host, overlap_gather=late, live_bytes=0, reshard_after_forward=resharded
    )
    opt = ShardedAdamW(model, lr=0.01, tuning=its, **options)

    def step() -> None:
        opt.zero_grad()
        model(torch.ones(1, 256)).sum().backward()
        opt.step()
        if late:  # what it left under way counts
            with opt.unsharded():
                pass

    step()
    with counting() as moved:
        step()
    other = [rank for rank in range(WORLD) if SIDE_BY_SIDE[rank] != SIDE_BY_SIDE[dist.get_rank()]]
    received = torch.tensor([float(sum(moved.by_rank[rank] for rank in other))])
    both: list[Any] = [None] * WORLD
    dist.all_gather_object(both, received.item())
    opt.close()
    mine = [each for each, host in zip(both, SIDE_BY_SIDE, strict=True) if host == SIDE_BY_SIDE[dist.get_rank()]]
    return float(sum(mine)) / sum(each.numel() * 4 for each in model.parameters())


def what_crosses() -> list[float]:
    with on_hosts(SIDE_BY_SIDE):
        return [
            crossed(by_host, **options)
            for options in ({"stage": 2}, {"stage": 2, "reduce_dtype": "int8", "gather_dtype": "int8"})
            for by_host in (False, True)
        ] + [
            crossed(True, late=True, stage=2),
            crossed(False, stage=3),
            crossed(True, stage=3),
            crossed(True, stage=3, holds=True),
        ]


def test_bytes_cross_once(ranks: Pool) -> None:
    """A host receives half of the gradients and half of the params; without, each of its two ranks receives these.

    At stage 3 params are gathered twice, and the second time within the host, if its ranks hold them between them.
    """
    coded = (1 + 4 / 256) / 4
    expected = [2, 1, 2 * coded, coded, 1, 3, 1.5, 1]
    for found in ranks.run(what_crosses, world=WORLD):
        assert found == pytest.approx(expected, abs=0.015), found  # and some KiB of agreements


def beside_a_neighbour(folder: Path) -> None:
    """Params arrive while a rank of the same host does not come to its wait; and it may write once it has come."""
    moments, rank = Moments(folder), dist.get_rank()
    read, wait = HostGather._read_from, HostMarks.wait
    found = []
    for late in (True, False):
        with on_hosts(SIDE_BY_SIDE), nothing_compiled():
            model = Given()
            opt = ShardedAdamW(model, lr=0.01, stage=2, tuning=tuning(overlap_gather=late, bucket_bytes=1 << 20))
            model(whole(rank, 0)).backward()
            opt.step()
            if late:
                assert all(isinstance(each, ArrivingParameter) for each in model.weights)
                if rank == 0:
                    found.append([raw(each.detach().clone()) for each in model.weights])
                    moments.say("rank 0 has read")
                moments.wait("rank 0 has read")
            found.append([raw(each.detach().clone()) for each in model.weights])
            model(whole(rank, 1)).backward()

            def slowly(*arguments: Any) -> None:
                if rank == 0:
                    until(lambda: any(map(moments.was_said, ("rank 1 waits", "rank 1 has written"))), "rank 1")
                read(*arguments)

            def waiting(marks: HostMarks, of: int, window: int, column: int, *arguments: Any) -> int:
                if rank == 1 and column == READ:
                    moments.say("rank 1 waits")
                return wait(marks, of, window, column, *arguments)

            with (
                patch.object(HostGather, "_read_from", slowly if late else read),
                patch.object(HostMarks, "wait", waiting if late else wait),
            ):
                opt.step()
                with torch.no_grad():
                    for each in model.weights:
                        each.mul_(rank + 2)
                if rank == 1:
                    moments.say("rank 1 has written")
            found.append([raw(each.detach().clone()) for each in model.weights])
            opt.close()
    *reads, first, second, plain, other = found
    assert (first, second) == (plain, other) and all(each == plain for each in reads)


def test_params_arrive_whatever_a_neighbour_does(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(beside_a_neighbour, tmp_path, world=WORLD)


def dies(rank: int, in_step: bool, late: bool) -> str:
    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with on_hosts(SIDE_BY_SIDE):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        opt = ShardedAdamW(model, lr=0.01, stage=2, tuning=tuning(timeout=120, overlap_gather=late))
        try:
            for step in range(2):
                opt.zero_grad()
                loss = model(torch.ones(1, 64)).sum()
                is_last = step == 1 and dist.get_rank() == rank
                if is_last and not in_step:
                    model.get_parameter("1.weight").register_hook(end)
                loss.backward()
                with patch.object(native_backend, "run", end) if is_last else nullcontext():  # the update
                    opt.step()
            model.state_dict()
        except CommunicationError as error:
            dist.destroy_process_group()  # as a process that ends does
            return str(error)
    return "nothing"


def test_a_rank_that_dies_is_an_error_on_all(ranks: Pool) -> None:
    for rank, in_step, late in ((1, False, False), (2, True, False), (2, True, True)):
        found = ranks.run(dies, rank, in_step, late, world=WORLD, doomed=[rank])
        for other, words in enumerate(found):
            assert other == rank or "rank" in words, (rank, other, words)


def refuses() -> None:
    for hosts, words in (((0, 1, 1, 1), r"hosts of \[1, 3\] ranks"), ((0, 0, 1, 2), r"\[2, 1, 1\]")):
        with on_hosts(hosts), pytest.raises(BindingError, match=words):
            ShardedSGD(Given(), lr=1.0, stage=2, tuning=tuning()).bind()
    with on_hosts(SIDE_BY_SIDE), pytest.raises(BindingError, match="release_gradients=True at stage 0"):
        ShardedSGD(Given(), lr=1.0, stage=0, release_gradients=True, tuning=tuning()).bind()
    with patch.object(Ranks, "has_collectives", lambda *_: True), pytest.raises(BindingError, match="NCCL"):
        ShardedSGD(Given(), lr=1.0, stage=2, tuning=tuning()).bind()
    for hosts in ((0, 0, 0, 0), (0, 1, 2, 3)):  # nothing would cross twice
        with on_hosts(hosts):
            opt = ShardedSGD(Given(), lr=1.0, stage=2, tuning=tuning())
            opt.bind()
            assert "by host" not in repr(opt)
            opt.close()


def test_marks_of_one_gather_are_not_taken_for_those_of_another() -> None:
    """By one process's marks: a rank that failed and went on, or has left, is told from one that fills or reads."""
    marks = HostMarks(Ranks.alone(), peer_memory.PeerMemory(), [os.getpid()])
    first, second, third = (marks.begin(5) for _ in range(3))

    def state(column: int, gather: int) -> str:
        try:
            marks.wait(0, 5, column, gather, timedelta(seconds=1), "waiting")
        except CommunicationError:
            return "lost"
        return "here"

    marks.mark_filled(5, first, 0)
    marks.mark_read(5, first)
    assert (state(FILLED, first), state(READ, first)) == ("here", "here")
    marks.mark_failed(5, second)
    assert (state(FILLED, second), state(READ, second)) == ("lost", "lost")
    assert (state(FILLED, first), state(READ, first)) == ("lost", "here")  # whoever still waits for its marks
    marks.mark_filled(5, third, 0)
    assert (state(FILLED, second), state(FILLED, third)) == ("lost", "here")


def test_what_cannot_go_by_host(ranks: Pool) -> None:
    ranks.run(refuses, world=WORLD)
    with pytest.raises(ValueError, match="neighbours=False"):
        Tuning(by_host=True, neighbours=False)
