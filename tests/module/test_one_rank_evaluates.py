"""``unsharded(alone=True)``: one rank evaluates at stage 3 while the others wait for it, however long, or end.

No deadline passes by itself, whatever the machine does meanwhile: those that wait have a clock that the beats of the
reader put forward, each by more than any deadline.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import CommunicationError, DisagreementError, ShardedAdamW, ShardedOptimizer, StateError
from shardopt.partition.comm import messages, patience, peer_board
from shardopt.remote import peers, serve
from shardopt.remote.apart import Apart
from shardopt.remote.serve import ServedSlices
from tests.support.comparing import raw, snapshot
from tests.support.modules import W, data, small
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.scripts import Done, Program
from tests.support.training import raises

DEADLINE = 90.0  # seconds
BEATS = 5  # that the others hear before the reader leaves
WAYS: tuple[dict[str, Any], ...] = ({}, {"neighbours": False}, {"neighbours": False, "live_bytes": None})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(W, W), nn.Linear(W, 11, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(W, W), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def made(**tuning: Any) -> tuple[Model, ShardedOptimizer]:
    model = Model()
    return model, ShardedAdamW(model, lr=0.01, stage=3, tuning=small(timeout=DEADLINE, **tuning))


@contextmanager
def clock_of_beats() -> Iterator[None]:
    """More than any deadline lies between two beats. After some of them it tells the reader."""
    lock, real, note = threading.RLock(), time.monotonic, ServedSlices._note_beat
    ahead, heard, store = 0.0, 0, dist.distributed_c10d._get_default_store()

    def now() -> float:
        with lock:
            return real() + ahead

    def noted(slices: ServedSlices) -> None:
        nonlocal ahead, heard
        with lock:  # nobody sees the clock between the beats
            ahead += 2 * DEADLINE
            note(slices)
        heard += 1
        if heard == BEATS:
            store.set(f"heard on {dist.get_rank()}", "")

    clock = SimpleNamespace(monotonic=now, sleep=time.sleep)
    with ExitStack() as stack:
        for module in (patience, peer_board, peers, serve):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(patch.object(serve, "HANDSHAKE", 1e6))  # a peer may greet between two beats
        stack.enter_context(patch.object(ServedSlices, "_note_beat", noted))
        yield


def wait_until_heard() -> None:
    others = [f"heard on {rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    store = dist.distributed_c10d._get_default_store()
    store.wait(others, timedelta(seconds=DEADLINE))
    for each in others:
        store.delete_key(each)


def train_step(model: nn.Module, opt: ShardedOptimizer, step: int) -> None:
    opt.zero_grad()
    model(data(step, 4, W)).square().mean().backward()
    opt.step()


def whole_loss(model: nn.Module, opt: ShardedOptimizer) -> tuple[bytes, float]:
    with opt.unsharded(), torch.no_grad():
        norm = sum(param.square().sum().item() for param in model.parameters())
        return raw(model(torch.ones(3, W))), norm


def evaluates(reader: int, tuning: dict[str, Any]) -> None:
    """Many times the deadline, between two steps; nobody else makes a call for it, and training is not touched."""
    with ExitStack() as stack:
        if dist.get_rank() != reader:
            stack.enter_context(clock_of_beats())
        _evaluates(reader, tuning)


def _evaluates(reader: int, tuning: dict[str, Any]) -> None:
    (model, opt), (other, plain) = made(**tuning), made(**tuning)
    for step in range(3):
        train_step(model, opt, step)
        train_step(other, plain, step)
        expected = whole_loss(other, plain)
        if step == 1 and dist.get_rank() == reader:
            with opt.unsharded(alone=True):
                with torch.no_grad():
                    found = raw(model(torch.ones(3, W)))
                    norm = sum(param.square().sum().item() for param in model.parameters())
                    gathered = opt.engine.domain.sharded.gatherer.gathered
                assert (found, norm) == expected
                assert "live_bytes" in tuning or len(gathered) <= 2, gathered
                wait_until_heard()
                model.eval()(torch.ones(1, W))  # with gradients, as people forget to switch them off
                model.train()
                refused(model, opt)
    assert snapshot(model, opt) == snapshot(other, plain)
    opt.close()
    plain.close()


def refused(model: Model, opt: ShardedOptimizer) -> None:
    weight = model.first.weight
    for call in (
        opt.step,
        opt.close,
        lambda: opt.unsharded(alone=True).__enter__(),
        lambda: opt.unsharded().__enter__(),
    ):
        with raises(StateError, "leave `with optimizer.unsharded(alone=True):` before"):
            call()
    with torch.no_grad():
        for kind, write in (
            (StateError, lambda: weight.copy_(torch.ones(W, W))),
            (RuntimeError, lambda: model.load_state_dict(model.state_dict())),  # torch wraps what it finds
        ):
            with raises(kind, "first.weight", "on every rank"):
                write()
    with raises(StateError, "before a backward"):
        model(torch.ones(1, W)).sum().backward()
    opt.zero_grad()


def refused_of_whole_params(model: Model, opt: ShardedOptimizer) -> None:
    weight = model.first.weight
    saved = weight.detach().clone()
    with opt.unsharded(alone=True):
        loss = model(torch.ones(1, W)).sum()  # shares no buffers
        with raises(StateError, "before a backward"):
            loss.backward()
        opt.zero_grad()
    with raises(StateError, "first.weight", "different values"), opt.unsharded(alone=True), torch.no_grad():
        weight.add_(1)
        weight.copy_(saved)


def fails_inside() -> None:
    """An error inside is the script's own; a write to a param that is whole is told at the end."""
    model, opt = made(neighbours=False)
    train_step(model, opt, 0)
    if dist.get_rank() == 0:
        with raises(ZeroDivisionError), opt.unsharded(alone=True):
            model(torch.ones(1, W))
            print(1 / 0)
    train_step(model, opt, 1)
    before = snapshot(model, opt)
    kept = nn.Sequential(nn.Linear(W, W), nn.Linear(W, 1))  # whose last param is whole
    own = ShardedAdamW(kept, stage=3, tuning=small(timeout=DEADLINE))
    train_step(kept, own, 0)
    saved = kept[1].bias.detach().clone()
    if dist.get_rank() == 1:
        with raises(StateError, "1.bias", "different values"), own.unsharded(alone=True), torch.no_grad():
            kept[1].bias.add_(1)
            kept[1].bias.copy_(saved)
    train_step(kept, own, 1)
    own.close()
    with raises(ValueError, "on every rank"):
        opt.unsharded(ema=True, alone=True)
    assert snapshot(model, opt) == before
    opt.close()


def in_between() -> None:
    """Before the first forward, between a forward and its backward, and at stages that hold whole params."""
    for stage in (1, 3):
        torch.manual_seed(0)
        model = Model()
        model.register_buffer("shared", torch.ones(1))
        opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=small(timeout=30, neighbours=False, live_bytes=None))
        for step in range(3):
            if dist.get_rank() == 1:
                with opt.unsharded(alone=True), torch.no_grad():
                    model.eval()(torch.ones(2, W))
                    model.train()
                if step and stage == 1:
                    refused_of_whole_params(model, opt)
            loss = model(data(step, 4, W)).square().mean()
            if dist.get_rank() == 0:
                with opt.unsharded(alone=True), torch.no_grad():
                    model(torch.ones(2, W))
            loss.backward()
            opt.step()
            opt.zero_grad()
        opt.close()


def ends() -> None:
    """The last step, then the close() of the other rank, which waits for the reader longer than for a silent rank."""
    model, opt = made(neighbours=False)
    train_step(model, opt, 0)
    if dist.get_rank() == 0:
        with opt.unsharded(alone=True), torch.no_grad():
            before = model(torch.ones(2, W))
            wait_until_heard()
            assert torch.equal(model(torch.ones(2, W)), before)
        opt.close()
    else:
        with clock_of_beats():
            opt.close()


def killed(has_buffer: bool) -> None:
    """Its connections end, and no deadline has to pass: the first exchange is one of messages, or of buffers."""
    model, opt = made(neighbours=False)
    if has_buffer:
        model.register_buffer("shared", torch.ones(1))
    train_step(model, opt, 0)
    if dist.get_rank() == 0:
        with opt.unsharded(alone=True), torch.no_grad():
            model(torch.ones(2, W))
            os.kill(os.getpid(), signal.SIGKILL)
    with raises(CommunicationError, "look at the output of rank 0, whose process has ended"):
        train_step(model, opt, 1)


def next_step(model: Model, opt: ShardedOptimizer) -> None:
    train_step(model, opt, 2)


def saves(model: Model, opt: ShardedOptimizer) -> None:
    opt.consolidate_state_dict(to=0)


def whole(model: Model, opt: ShardedOptimizer) -> None:
    whole_loss(model, opt)


ASK = Apart._ask


def answer_lost(apart: Apart, rank: int, request: dict[str, Any]) -> Any:
    """The other rank is asked to complete the gathers, with zeros, and nobody hears whether it does."""
    if "complete" in request:
        threading.Thread(target=ASK, args=(apart, rank, request)).start()
        raise TimeoutError("no answer")
    return ASK(apart, rank, request)


def forgets(world: int) -> None:
    """`if rank == 0: evaluate()` without the context: it alone gets an error, while the others wait elsewhere.

    Nothing is broken: once it has joined them, all train on, with the bits of ranks that never tried.
    """
    rank = dist.get_rank()
    for live_bytes in (None, 0):
        (model, opt), (other, plain) = (made(neighbours=False, live_bytes=live_bytes) for _ in range(2))
        for step in range(2):
            train_step(model, opt, step)
            train_step(other, plain, step)
        for number, call in enumerate((lambda *_: dist.barrier(), next_step, saves, whole)):
            readers = {number % world} if world < 3 else {0, number % world}
            if rank in readers:
                with (
                    patch.object(messages, "_FIRST_LOOK", 0.05),
                    patch.object(Apart, "_ask", answer_lost) if call is saves and world == 2 else nullcontext(),
                    torch.no_grad(),
                    raises(DisagreementError, "unsharded(alone=True)", "gathering first to evaluate"),
                ):
                    model(torch.ones(3, W))
                units = opt.engine.domain.gatherer.units.values()
                assert not any(each.bucket.memory.is_allocated for unit in units for each in unit.buckets)
            call(model, opt)
            if call is next_step:
                next_step(other, plain)
            assert whole_loss(model, opt) == whole_loss(other, plain)
        assert snapshot(model, opt) == snapshot(other, plain)
        with torch.no_grad(), patch.object(messages, "_FIRST_LOOK", 0.05):  # all ranks, at other lengths
            model(torch.ones(3, W))
            if rank == 1:
                with raises(DisagreementError, "at other lengths"):
                    model(torch.ones(3, W))
        dist.barrier()
        opt.close()
        plain.close()


def is_not_rash() -> None:
    """Rank 0 is ahead: rank 1 still waits for rank 2 in a call that rank 0 has made. It is no reason for an error."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    both, ones = dist.new_group([0, 1]), [torch.ones(1) for _ in range(3)]
    asked, inquire = [0], Apart._inquire

    def counted(each: Apart, evaluation: Any) -> None:
        inquire(each, evaluation)
        asked[0] += 1
        if asked[0] == 2:
            store.set("asked twice", "")

    if rank == 2:  # holds no params
        store.wait(["asked twice"], timedelta(seconds=DEADLINE))
        dist.gather(ones[0], dst=1)
        return
    model = Model()
    opt = ShardedAdamW(model, lr=0.01, stage=3, process_group=both, tuning=small(timeout=DEADLINE, neighbours=False))
    train_step(model, opt, 0)
    with patch.object(messages, "_FIRST_LOOK", 0.05), patch.object(Apart, "_inquire", counted), torch.no_grad():
        dist.gather(ones[0], ones if rank == 1 else None, dst=1)
        found = raw(model(torch.ones(3, W)))
    assert found == whole_loss(model, opt)[0]
    opt.close()


class Late:
    """A collective that is not there at its deadline, three times, while beats come or not."""

    def __init__(self, beats: bool):
        self.beats, self.left = beats, 3

    def wait(self, _: timedelta) -> None:
        if self.left:
            self.left -= 1
            if self.beats:
                patience.note_beat([dist.group.WORLD])
            raise RuntimeError("it is late")

    def is_completed(self) -> bool:
        return False


def waits_for_collectives() -> None:
    assert dist.group.WORLD is not None
    late = Late(beats=True)
    patience.wait_for_collective(late, timedelta(), dist.group.WORLD)
    assert not late.left
    with raises(RuntimeError, "it is late"):
        patience.wait_for_collective(Late(beats=False), timedelta(), dist.group.WORLD)


SCRIPT = """
import atexit, os, sys, time
import torch, torch.distributed as dist
from shardopt.remote import peers
from tests.module.test_one_rank_evaluates import made, train_step, whole_loss
from tests.support.modules import W
from tests.support.moments import Moments

rank, folder, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
moments = Moments(folder)
peers.LINGER = 0.0  # so that nothing but the reader keeps a rank at its end
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
KEPT = []

def main():
    model, opt = made(neighbours=False)
    if ending == "ends with its model":
        KEPT.append((model, opt))
    train_step(model, opt, 0)
    loss = whole_loss(model, opt)
    if rank == 0:
        with opt.unsharded(alone=True), torch.no_grad():
            moments.say("reads")
            moments.wait("left")
            if ending.startswith("ends"):
                # Nothing tells that a rank which should wait at its end has gone, so it gets the time.
                time.sleep(1.5)
            assert (model(torch.ones(3, W)).numpy().tobytes(), ) == loss[:1]
        print("evaluated")
        return
    moments.wait("reads")
    if ending == "raises":
        raise RuntimeError("told")
    if ending == "leaves":
        os._exit(3)
    atexit.register(moments.say, "left")  # runs ahead of what the package does at the interpreter's end

main()
"""


def begin(script: Path, folder: Path, ending: str) -> Callable[[], list[Done]]:
    """The reader and the other rank begin. Returns the call that waits for them, and tells how they ended."""
    folder.mkdir()
    reader, other = (Program(str(script), (str(rank), str(folder), ending)) for rank in range(2))

    def wait() -> list[Done]:
        if ending.startswith("ends"):
            return [reader.wait(), other.wait()]
        done = other.wait()  # before the reader leaves
        Moments(folder).say("left")
        return [reader.wait(), done]

    return wait


def test_the_script_of_the_others_ends(tmp_path: Path) -> None:
    """Without a close(): it serves until the reader leaves, unless it ends by an error or at once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    codes = {"raises": 1, "leaves": 3}
    endings = ("ends", "ends with its model", *codes)
    begun = {ending: begin(script, tmp_path / ending, ending) for ending in endings}  # so that they wait at one time
    ended = {ending: wait() for ending, wait in begun.items()}
    for ending in ("ends", "ends with its model"):
        both = ended[ending]
        assert [each.returncode for each in both] == [0, 0] and "evaluated" in both[0].stdout, both
    for ending, code in codes.items():
        both = ended[ending]
        assert [each.returncode for each in both] == [1, code] and "evaluated" not in both[0].stdout, both
        assert "CommunicationError: look at the output of rank 1" in both[0].stderr, both


def test_one_rank_evaluates(ranks: Pool) -> None:
    for number, tuning in enumerate(WAYS):
        ranks.run(evaluates, number % 2, tuning, world=2)


def test_errors_and_other_places(ranks: Pool) -> None:
    ranks.run(fails_inside, world=2)
    ranks.run(in_between, world=2)


def test_the_others_end(ranks: Pool) -> None:
    ranks.run(ends, world=2)
    ranks.run(waits_for_collectives, world=1)


def test_the_context_is_forgotten(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(forgets, world, world=world)
    ranks.run(is_not_rash, world=3)


def test_a_reader_is_killed(ranks: Pool) -> None:
    for has_buffer in (False, True):
        ranks.run(killed, has_buffer, world=2, doomed=[0])
