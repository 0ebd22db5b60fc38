"""One rank saves, and no other one makes a call for it."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import ShardedAdamW, ShardedSGD, ShardoptError, StateError, Tuning
from shardopt.remote import peers as peers_module
from shardopt.remote import serve
from tests.support.moments import DEADLINE, Moments, until
from tests.support.ranks import Pool
from tests.support.scripts import Done, Program
from tests.support.training import raises, raw

SMALL = Tuning(bucket_bytes=3000, keep_below=100)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 40), nn.Tanh(), nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 3))


def train_step(model: nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(4, 17, generator=generator).to(model[0].weight.dtype)
    model(x).square().mean().backward()
    if opt.options.module is None:
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    opt.step()


def saved(value: Any) -> Any:
    """Through a file, read as one reads a stranger's."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return type(one) is Tensor and one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)
    return bool(one == other)


def saves_alone(stage: int, dtype: torch.dtype) -> None:
    rank, model = dist.get_rank(), network().to(dtype)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()  # strides of its own
    taken = [model] if stage else [model.parameters()]
    opt = ShardedAdamW(*taken, lr=0.01, stage=stage or 1, tuning=SMALL)
    for step in range(4):
        train_step(model, opt, step)
        # The others go on to the next step, and are asked on their way.
        alone, weights = (saved(opt.state_dict()), saved(model.state_dict())) if rank == 0 and step % 2 else ({}, {})
        if step != 3:
            continue
        opt.consolidate_state_dict(to=0)
        with opt.unsharded():
            whole = {name: value.clone() for name, value in model.state_dict().items()}
        if rank == 0:
            assert same(alone, opt.state_dict()) and same(weights, whole)
            assert same(saved(opt.state_dict()), alone)
            theirs = network().to(dtype)
            torch_opt = torch.optim.AdamW(theirs.parameters(), lr=0.01)
            torch_opt.load_state_dict(alone)
            assert all(state["exp_avg"].shape == param.shape for param, state in torch_opt.state.items())
    # Whatever reads is answered, whatever would write is refused, and what has moved on is not given out as it was.
    if rank == 1:
        part = next(iter(opt.state_dict()["state"].values()))["exp_avg"]
        copied = part.double()
        assert float(part.abs().sum()) > 0 and torch.equal(copied.float() * 1, part * 1)
        with raises(StateError, "part"):
            part.add_(1)
        kept = opt.state_dict()
    dist.barrier()
    train_step(model, opt, 4)
    if rank == 1:
        for stale in (kept, copied):
            with raises(StateError, "before the next step"):
                saved(stale)
    # Into another world, every rank its part.
    state = saved(opt.state_dict()) if rank == 2 else None
    everyones = [state]
    dist.broadcast_object_list(everyones, src=2)
    again = network().to(dtype)
    other = ShardedAdamW(again, lr=0.01, stage=2, tuning=Tuning(bucket_bytes=900))
    other.load_state_dict(everyones[0])
    train_step(again, other, 5)
    with opt.unsharded():
        again.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    opt.close()
    other.close()


def test_saves_alone(ranks: Pool) -> None:
    for stage, dtype in ((0, torch.float32), (1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)):
        ranks.run(saves_alone, stage, dtype, world=3)


def on_machines_of_their_own() -> None:
    """Ranks share no folder for sockets: they read each other through the network."""
    with (
        patch.object(peers_module, "own_machine", lambda: f"machine {dist.get_rank()}"),
        patch.dict(serve._SERVERS, clear=True),
    ):
        saves_alone(1, torch.float32)
        (own,) = serve._SERVERS.values()
        assert own._listener.family == "AF_INET"


def test_saves_alone_where_ranks_are_on_several_machines(ranks: Pool) -> None:
    ranks.run(on_machines_of_their_own, world=3)


def closed_and_strange(most: tuple[int, ...] = ()) -> int:
    """Returns how many threads still answer here; waits a while for no more than ``most``, by rank."""
    rank, model = dist.get_rank(), network()
    opt = ShardedSGD(model, lr=0.1, momentum=0.9, stage=2, tuning=SMALL)
    train_step(model, opt, 0)
    (server,) = serve._SERVERS.values()
    assert server._listener.family == "AF_UNIX"
    folder = os.stat(os.path.dirname(server.address))
    assert folder.st_uid == os.getuid() and folder.st_mode & 0o077 == 0
    peers = opt.engine.domain.remote.peers
    for greeting in (b"not json", json.dumps({"token": "x", "challenge": "y"}).encode(), b"{" * 5000):
        with connection.Client(server.address) as stranger:
            stranger.send_bytes(greeting)
            assert stranger.poll(DEADLINE) and _hung_up(stranger)
    # Knowing the token is not enough.
    with connection.Client(server.address) as stranger:
        stranger.send_bytes(json.dumps({"token": peers._slices.token, "challenge": "y"}).encode())
        json.loads(stranger.recv_bytes())
        stranger.send_bytes(json.dumps({"proof": "0" * 64}).encode())
        assert stranger.poll(DEADLINE) and _hung_up(stranger)
    dist.barrier()
    if rank == 0:
        saved(opt.state_dict())
    dist.barrier()
    if rank == 1:
        with patch.object(peers_module, "SILENCE", 0.5):
            opt.close()
    dist.barrier()
    if rank == 0:
        with raises(StateError, "closed its optimizer"):
            saved(opt.state_dict())
        opt.close()
    # This optimizer's own: one of an earlier job, which a rank may still hold in frozen garbage, never ends.
    until(lambda: not peers._leaving.is_alive(), "the farewell to end")
    assert peers not in peers_module._PEERS
    if most:
        until(lambda: answering() <= most[rank], "threads that answered to end")
    return answering()


def answering() -> int:
    return sum(thread.name == "shardopt-answer" for thread in threading.enumerate())


def _hung_up(stranger: Any) -> bool:
    try:
        stranger.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def test_closed_and_strange(ranks: Pool) -> None:
    first = ranks.run(closed_and_strange, world=2)
    second = ranks.run(closed_and_strange, tuple(first), world=2)
    assert [one <= other for one, other in zip(second, first, strict=True)] == [True, True]


SCRIPT = """
import atexit, os, signal, sys, time
import torch, torch.distributed as dist
from shardopt import ShardedAdamW, Tuning
from shardopt.remote import peers, serve
from tests.support.moments import Moments

rank, folder, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
moments = Moments(folder)
# Longer than the test waits: both ranks leave, and one that gets no core for seconds is not given up.
serve.HANDSHAKE = peers.HANDSHAKE = peers.SILENCE = peers.LINGER = 3600.0
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)

class Ordered(list):
    def discard(self, each):
        self.remove(each)

def live_on():
    # Two optimizers that nobody drops, which the ranks leave in opposite order.
    for _ in range(2):
        model = torch.nn.Linear(3, 3)
        opt = ShardedAdamW(model, stage=2)
        opt.bind()
        LIVING.append((model, opt))
    peers._PEERS = Ordered(sorted(peers._PEERS, key=lambda each: each._slices.token, reverse=bool(rank)))

LIVING = []

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 7)
    opt = ShardedAdamW(model, stage=2, offload=folder if ending == "states on disk" else None)
    for _ in range(2):
        opt.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        opt.step()
    if ending == "several":
        live_on()
    if ending == "destroyed":
        dist.destroy_process_group()
    went_wrong = ending in ("raised", "killed")
    if rank == 0:
        moments.say("trained")
        moments.wait("left")
        if not went_wrong:
            # An evaluation, say. Nothing tells that a rank which should wait at its end has gone, so it gets the time.
            time.sleep(1.5)
        torch.save(opt.state_dict(), folder + "/state.pt")
        print("saved")
    elif went_wrong:
        moments.wait("trained")  # its end must meet rank 0 where it saves, not in a step; the test says that it left
    elif ending == "closed":
        moments.say("left")
    else:
        atexit.register(moments.say, "left")  # runs ahead of what the package does at the interpreter's end
    if ending == "closed":
        opt.close()
    elif ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ending == "raised":
        raise RuntimeError("told")

main()
"""


def begin_forked(script: Path, folder: Path, ending: str) -> Callable[[], list[Done]]:
    """Both ranks begin. Returns the call that waits for them, and tells how they ended."""
    first, second = (Program(str(script), (str(rank), str(folder), ending)) for rank in range(2))

    def wait() -> list[Done]:
        if ending not in ("raised", "killed"):
            return [first.wait(), second.wait()]
        ended = second.wait()
        Moments(folder).say("left")
        return [first.wait(), ended]

    return wait


def begin_fresh(script: Path, folder: Path, ending: str) -> Callable[[], list[Done]]:
    """The rank that leaves is an interpreter that ends as a user's does, all modules taken down."""
    first = Program(str(script), ("0", str(folder), ending))
    command = [sys.executable, str(script), "1", str(folder), ending]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait() -> list[Done]:
        told = second.communicate(timeout=600)
        return [first.wait(), Done(second.returncode, *told)]

    return wait


def check_saved(ended: list[Done], folder: Path) -> None:
    assert [each.returncode for each in ended] == [0, 0] and "saved" in ended[0].stdout, ended
    state = torch.load(folder / "state.pt", weights_only=True)
    assert state["state"][0]["exp_avg"].shape == (7, 300) and bool(state["state"][0]["exp_avg"].all())


def test_at_the_end_of_a_script(tmp_path: Path) -> None:
    """The others are through with it while rank 0 still saves; they wait, unless something went wrong."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    # States are read from the disk when the thread pools of the process that ends take no work any more.
    saved, lost = ("destroyed", "closed", "several", "in a fresh interpreter", "states on disk"), ("raised", "killed")
    begun = {}
    for ending in (*saved, *lost):  # all together, so that they wait at the same time
        (tmp_path / ending).mkdir()
        begin = begin_fresh if ending == "in a fresh interpreter" else begin_forked
        begun[ending] = begin(script, tmp_path / ending, ending)
    ends = {ending: wait() for ending, wait in begun.items()}
    for ending in saved:
        check_saved(ends[ending], tmp_path / ending)
    for ending in lost:
        ended = ends[ending]
        assert [each.returncode for each in ended] == [1, 1 if ending == "raised" else -signal.SIGKILL], ended
        assert "CommunicationError" in ended[0].stderr and "rank 1" in ended[0].stderr
        assert "saved" not in ended[0].stdout


def test_one_rank_needs_nobody() -> None:
    model = network()
    opt = ShardedAdamW(model, lr=0.01)
    model(torch.ones(2, 17)).sum().backward()
    opt.step()
    assert same(saved(opt.state_dict()), opt.state_dict()) and not serve._SERVERS
    assert issubclass(StateError, ShardoptError)


def test_one_rank_at_stage_3() -> None:
    """Its slices are all there is: they are saved, read and loaded like whole params."""
    model, twin = network(), network()
    opt = ShardedAdamW(model, lr=0.01, stage=3, tuning=SMALL)
    other = ShardedAdamW(twin, lr=0.01)
    for each, its in ((model, opt), (twin, other)):
        each(torch.ones(2, 17)).sum().backward()
        its.step()
    assert same(saved(model.state_dict()), dict(twin.state_dict()))
    model.load_state_dict(model.state_dict())
    assert same(saved(model.state_dict()), dict(twin.state_dict()))
    assert raw(model[0].weight.detach().sum()) == raw(twin[0].weight.detach().sum())
    opt.close()
