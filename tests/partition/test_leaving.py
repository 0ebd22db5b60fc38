"""Promise: over collectives of the device (NCCL's) a rank that raises or dies is an error on all others, not a hang.

What ranks tell each other travels beside the device: ``tests/support/beside_a_device``. Where the rank that raised
could issue what the others wait for, all go on together, and the next step has the bits that it has without that one.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardopt import CommunicationError, ShardedAdamW
from shardopt.kernels import native_backend
from shardopt.module.arrivals import Arrivals
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.roll_call import RankStatus, RollCall
from tests.support.beside_a_device import beside_a_device, for_gpus
from tests.support.comparing import snapshot
from tests.support.modules import W, data, small
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.scripts import DEADLINE

SPOILT = "a gradient that cannot be computed"
ODD = 1  # the rank that leaves
GONE = "the odd rank is gone"


class Chain(nn.Module):
    """Four buckets; in the middle of a backward something may happen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(W, W, bias=False) for _ in range(4))
        self.amid: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        x.register_hook(lambda _: self.amid())
        return self.layers[3](self.layers[2](x)).square().mean()


def made(stage: int, group: dist.ProcessGroup | DeviceMesh | None = None) -> tuple[Chain, Any]:
    model = Chain()
    return model, ShardedAdamW(model, lr=1e-2, stage=stage, process_group=group, tuning=small(neighbours=False))


def train(model: Chain, opt: Any, *steps: int) -> None:
    for step in steps:
        opt.zero_grad()
        model(data(step, 4, W)).backward()
        opt.step()


def outcome(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


class Leaving:
    """What the odd rank does in the middle of a step, and what the others wait for in vain meanwhile."""

    def __init__(self, folder: str, how: str):
        self.moments, self.how, self.is_odd = Moments(folder), how, dist.get_rank() == ODD
        self._is_amid = False

    def is_in_vain(self) -> bool:
        return self._is_amid and self.moments.was_said(GONE)

    def leave(self, *_: Any) -> None:
        self.moments.say(GONE)
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(SPOILT)

    def amid(self, call: Callable[[], object]) -> Exception | None:
        """What a call raised in whose middle the odd rank leaves."""
        self._is_amid = True
        try:
            return outcome(call)
        finally:
            self._is_amid = False

    def part(self) -> None:
        """The odd rank's process ends, else nobody could end what waits for it. It has no result then."""
        self.moments.say(f"rank {dist.get_rank()} is done")
        self.moments.wait("rank 0 is done", "rank 1 is done")
        if self.is_odd:
            os.kill(os.getpid(), signal.SIGKILL)


def check(error: Exception | None, is_odd: bool, *words: str) -> None:
    assert isinstance(error, ValueError if is_odd else CommunicationError), repr(error)
    assert all(each in str(error) for each in ((SPOILT,) if is_odd else words)), error


def goes_on(stage: int, in_package: bool, folder: str) -> None:
    """The odd rank raises in the middle of a backward: in the user's code, or in the package's."""
    expected = made(stage)
    train(*expected, 0, 1, 3, 4)
    leaving, group = Leaving(folder, "raises"), for_gpus()
    with beside_a_device(group, leaving.is_in_vain):
        model, opt = made(stage, group)
        train(model, opt, 0, 1)
        assert opt.engine.domain.reducer.on_stream
        opt.zero_grad()
        spoilt = patch.object(Arrivals, "deliver", leaving.leave) if in_package and leaving.is_odd else nullcontext()
        if leaving.is_odd and not in_package:
            model.amid = leaving.leave
        with spoilt:
            error = leaving.amid(lambda: model(data(2, 4, W)).backward())
            if leaving.is_odd and not in_package:
                # This rank's next call notices that the backward ended, and tells the others, who wait for it.
                opt.zero_grad()
        check(error, leaving.is_odd, f"rank {ODD} left", "zero_grad()", "reducing gradients")
        if in_package:  # of its type on all ranks: so they can catch it
            assert isinstance(error, ValueError), repr(error)
        model.amid = lambda: None
        train(model, opt, 3, 4)
        assert snapshot(model, opt) == snapshot(*expected)
        opt.close()


@pytest.mark.parametrize(("stage", "in_package"), [(0, True), (1, False), (2, True)])
def test_ranks_go_on_behind_one_that_raised(stage: int, in_package: bool, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(goes_on, stage, in_package, str(tmp_path), world=2)


def goes_on_in_a_mesh() -> None:
    """Ranks 0 and 1 share one copy of the states, 2 and 3 the other: 0 is told in its row, and tells rank 2."""
    mesh = init_device_mesh("cpu", (2, 2))
    expected = made(2, mesh)
    train(*expected, 0, 1, 3, 4)
    is_odd = dist.get_rank() == ODD
    with patch.object(Ranks, "has_collectives", lambda ranks, _: ranks.size > 1):
        model, opt = made(2, mesh)
        train(model, opt, 0, 1)
        assert opt.engine.domain.reducer.on_stream
        opt.zero_grad()

        def fail(*_: Any) -> None:
            raise ValueError(SPOILT)

        with patch.object(Arrivals, "deliver", fail) if is_odd else nullcontext():
            error = outcome(lambda: model(data(2, 4, W)).backward())
        check(error, is_odd, "left", "zero_grad()")
        train(model, opt, 3, 4)
        assert snapshot(model, opt) == snapshot(*expected)


def test_ranks_of_a_mesh_go_on(ranks: Pool) -> None:
    ranks.run(goes_on_in_a_mesh, world=4)


def restarts(folder: str) -> None:
    """At stage 3 the others wait for gathers as well, which cannot be made up for: no device is waited for again."""
    leaving, group = Leaving(folder, "raises"), for_gpus()
    with beside_a_device(group, leaving.is_in_vain):
        model, opt = made(3, group)
        train(model, opt, 0, 1)
        opt.zero_grad()
        if leaving.is_odd:
            model.amid = leaving.leave
        error = leaving.amid(lambda: model(data(2, 4, W)).backward())
        if leaving.is_odd:
            opt.zero_grad()
        check(error, leaving.is_odd, f"rank {ODD} left", "restart the ranks")
        again = outcome(opt.step)
        assert isinstance(again, CommunicationError) and "restart the ranks" in str(again), again
        leaving.part()


def test_ranks_restart_where_gathers_are_missing(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(restarts, str(tmp_path), world=2, doomed=[ODD])


def hears_of_a_death(stage: int, in_step: bool, folder: str) -> None:
    leaving, group = Leaving(folder, "dies"), for_gpus()
    with beside_a_device(group, leaving.is_in_vain):
        model, opt = made(stage, group)
        train(model, opt, 0, 1)
        opt.zero_grad()
        if leaving.is_odd and not in_step:
            model.amid = leaving.leave
        error = leaving.amid(lambda: model(data(2, 4, W)).backward())
        if in_step:
            assert error is None, error
            with patch.object(native_backend, "run", leaving.leave) if leaving.is_odd else nullcontext():
                error = leaving.amid(opt.step)
        check(error, False, *(["Some shards are updated"] if in_step else [f"with rank {ODD}"]))


@pytest.mark.parametrize(("stage", "in_step"), [(1, True), (2, False), (3, False)])
def test_a_rank_that_dies_is_an_error(stage: int, in_step: bool, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(hears_of_a_death, stage, in_step, str(tmp_path), world=2, doomed=[ODD])


def waits_no_longer(folder: str) -> None:
    """The odd rank raised, and makes no call by which the others could hear of it."""
    leaving, group = Leaving(folder, "raises"), for_gpus()
    with beside_a_device(group, leaving.is_in_vain):
        model, opt = made(2, group)
        train(model, opt, 0, 1)
        if leaving.is_odd:
            model.amid = leaving.leave
        with patch.object(opt.engine.domain.mesh.world, "_deadline", timedelta(seconds=0.2)):
            error = leaving.amid(lambda: model(data(2, 4, W)).backward())
        check(error, leaving.is_odd, f"with rank {ODD}")
        leaving.part()


def test_a_rank_that_says_nothing_is_given_up(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(waits_no_longer, str(tmp_path), world=2, doomed=[ODD])


def names_who_is_gone(folder: str) -> None:
    """Rank 0 hears of the death before rank 2 has come: it waits for two, and one is gone."""
    rank, moments, roll_call = dist.get_rank(), Moments(folder), RollCall(Ranks(dist.new_group(), None), "a test")
    if rank == ODD:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank > ODD:
        moments.wait("rank 0 has heard")
    roll_call.send(RankStatus.ISSUED)
    error = outcome(roll_call.wait_for_all)
    moments.say(f"rank {rank} has heard")
    moments.wait("rank 0 has heard", "rank 2 has heard")  # its own end is no death that they may hear of
    assert isinstance(error, CommunicationError) and f"a test (with rank {ODD}), on" in str(error), error


def test_a_rank_that_dies_is_named_among_others(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(names_who_is_gone, str(tmp_path), world=3, doomed=[ODD])


def names_no_silent_rank_itself(folder: str) -> None:
    """Roll calls that nobody else comes to keep all of gloo's threads: what this rank tells has not left it yet."""
    rank, moments = dist.get_rank(), Moments(folder)
    roll_call = RollCall(Ranks(dist.new_group(), timedelta(seconds=0.5)), "a test")
    if rank == ODD:
        moments.wait("rank 0 has heard")
        return
    for status in (RankStatus.LEFT, RankStatus.LEFT, RankStatus.ISSUED):
        roll_call.send(status)
    error = outcome(roll_call.wait_for_all)
    moments.say("rank 0 has heard")
    assert isinstance(error, CommunicationError) and f"a test (with rank {ODD}), on" in str(error), error


def test_a_rank_does_not_name_itself(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(names_no_silent_rank_itself, str(tmp_path), world=2)


def tells_rounds_apart() -> None:
    """Two optimizers of one group: a rank leaves a round of the first, which the other has behind it."""
    ranks = Ranks(dist.new_group(), None)
    first, second = RollCall(ranks, "the first"), RollCall(ranks, "the second")
    if dist.get_rank() == ODD:
        first.send(RankStatus.LEFT)
        return
    second.send(RankStatus.ISSUED)
    with pytest.raises(CommunicationError, match=f"rank {ODD} is in another round"):
        second.wait_for_all()
    with pytest.raises(CommunicationError, match="in another round while the second"):
        ranks.exchange([], "a test")


def test_a_status_counts_in_its_own_round_alone(ranks: Pool) -> None:
    ranks.run(tells_rounds_apart, world=2)


SCRIPT = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from shardopt import ShardedAdamW
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.roll_call import RankStatus, RollCall
from shardopt.remote import peers

peers.SILENCE = peers.LINGER = 36000.0
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=10))
opt = ShardedAdamW([torch.nn.Parameter(torch.ones(8))], stage=1)
if rank == 1:
    RollCall(Ranks(None, None), "a test").send(RankStatus.LEFT)
    sys.exit(3)
dist.recv(torch.empty(1), 1)
"""


def test_the_process_of_a_rank_that_left_ends(tmp_path: Path) -> None:
    """The others wait for it elsewhere, and do not come to the end of the round: what it told them does not hold it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Interpreters of their own: one that ends waits for threads of gloo's, which a forked Program does not.
    first, second = (
        subprocess.Popen([sys.executable, script, str(rank), tmp_path], stderr=subprocess.PIPE) for rank in range(2)
    )
    try:
        _, said = first.communicate(timeout=DEADLINE)
        assert second.wait(DEADLINE) == 3 and first.returncode == 1, said
        assert b"Connection closed by peer" in said, said
    finally:
        for each in (first, second):
            each.kill()
            each.communicate()


def gives_up_its_device() -> None:
    ranks = Ranks(dist.new_group(), timedelta(seconds=0.1))
    with pytest.raises(CommunicationError, match=r"within 0\.1 s, while reducing"):
        ranks.wait_for_device(lambda: False, "reducing")
    with pytest.raises(CommunicationError, match="did not finish"):
        ranks.exchange([], "a test")


def test_a_collective_that_never_ends_is_an_error(ranks: Pool) -> None:
    """Every rank had issued it, and one died since."""
    ranks.run(gives_up_its_device, world=2)
