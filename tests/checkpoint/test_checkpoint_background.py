"""Asynchronous saves: the values of the call, whatever training does next; errors reach whoever waits."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import CheckpointError
from shardopt.checkpoint import files
from shardopt.checkpoint.background import Background
from shardopt.checkpoint.inspect import verify
from shardopt.checkpoint.model import unwrapped
from shardopt.checkpoint.save import _BACKGROUNDS
from tests.offload.test_pinned import Runtime
from tests.support.checkpoints import build, facts, save, train
from tests.support.moments import DEADLINE, Moments, until
from tests.support.ranks import Pool
from tests.support.scripts import run_script
from tests.support.training import raises


@contextmanager
def held_disk() -> Iterator[threading.Event]:
    """Nothing is written in the background before the event."""
    real, let_go = files.write, threading.Event()

    def write(file: int, data: memoryview) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert let_go.wait(DEADLINE)
        real(file, data)

    with patch.object(files, "write", write):
        yield let_go


def at_the_moment_of_the_call(root: Path, stage: int) -> None:
    model, optimizer = build(stage)
    train(model, optimizer, range(2))
    expected = facts(model, optimizer)
    noise = torch.ones(3)
    with held_disk() as let_go:
        saving = shardopt.save_checkpoint(root, model, optimizer, extra={"noise": noise}, asynchronous=True)
        assert not saving.done
        noise.zero_()
        optimizer.param_groups[0]["lr"] = 9.0
        train(model, optimizer, range(2, 5))
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.zero_()
        assert not saving.done
        let_go.set()
        path = saving.wait()
    assert path == saving.path and path.is_dir() and not verify(path)
    found = shardopt.load_checkpoint(root, model, optimizer)
    assert torch.equal(found["noise"], torch.ones(3))
    assert facts(model, optimizer) == expected
    room = _BACKGROUNDS[unwrapped(model)]._buffer
    second = shardopt.save_checkpoint(root, model, optimizer, asynchronous=True, keep=2)
    third = shardopt.save_checkpoint(root, model, optimizer, asynchronous=True, keep=2)  # waits for the second
    assert second.done and second.wait().is_dir()
    third.wait()
    assert _BACKGROUNDS[unwrapped(model)]._buffer is room
    dist.barrier()
    assert len(os.listdir(root)) == 3


@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_those_of_the_call_while_all_ranks_train_on(ranks: Pool, tmp_path: Path, stage: int) -> None:
    ranks.run(at_the_moment_of_the_call, tmp_path, stage, world=2)


def one_cannot_write(root: Path, failing: int, asynchronous: bool) -> None:
    model, optimizer = build(2)
    train(model, optimizer, range(1))
    first = save(root, model, optimizer)
    real = files.write

    def write(file: int, data: memoryview) -> None:
        if dist.get_rank() == failing and "safetensors" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        real(file, data)

    with patch.object(files, "write", write), raises(CheckpointError, "No space left", "whole"):
        save(root, model, optimizer, asynchronous=asynchronous, keep=1)
    train(model, optimizer, range(1, 2))
    dist.barrier()
    assert (root / "latest").read_text().strip() == first.name and not verify(first)
    save(root, model, optimizer, keep=1)
    assert len(os.listdir(root)) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write_stops_all(ranks: Pool, tmp_path: Path, asynchronous: bool) -> None:
    for failing in (0, 1):
        ranks.run(one_cannot_write, tmp_path / str(failing), failing, asynchronous, world=2)


def one_is_silent(root: Path) -> None:
    """Rank 1 does not come to its end before rank 0 has given up."""
    moments = Moments(root.with_name("moments"))
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    real: Callable[..., Any] = shardopt.checkpoint.write.RankWriter._write

    def stuck(run: Any) -> Any:
        if dist.get_rank() == 1:
            moments.wait("gave up")
        else:
            run._seconds = 0.5  # for rank 1 in this checkpoint alone; training and the save itself have time
        return real(run)

    with patch.object(shardopt.checkpoint.write.RankWriter, "_write", stuck):
        saving = shardopt.save_checkpoint(root, model, optimizer, asynchronous=True)
        told = () if dist.get_rank() == 0 else ("rank 0 failed while saving", "the last one is whole")
        with raises(CheckpointError, "nothing has grown", *told):
            saving.wait()
        if dist.get_rank() == 0:
            moments.say("gave up")


def test_a_rank_that_never_ends_is_not_awaited_for_ever(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(one_is_silent, tmp_path / "runs", world=2)


def test_errors_that_nobody_waited_for_are_told_at_the_next_save(tmp_path: Path) -> None:
    model, optimizer = build(0)
    with patch.object(files, "write", lambda *_: 1 / 0):
        saving = shardopt.save_checkpoint(tmp_path, model, optimizer, asynchronous=True)
        while not saving.done:
            time.sleep(0.01)
    with pytest.warns(UserWarning, match="wait"):
        save(tmp_path, model, optimizer)
    with raises(CheckpointError, "ZeroDivisionError"):
        saving.wait()
    assert "failed" in repr(saving)


def test_a_process_that_ends_finishes_its_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import torch, shardopt
model = torch.nn.Linear(1000, 1000)
optimizer = shardopt.ShardedAdamW(model)
shardopt.save_checkpoint({str(tmp_path / "runs")!r}, model, optimizer, asynchronous=True)
"""
    )
    done = run_script(script)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not verify(shardopt.checkpoint.publish.find(tmp_path / "runs"))


def is_slow_to_sync(root: Path) -> None:
    """Rank 0 finds rank 1's word and publishes before rank 1 has synced the directory that it left it in."""
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    real = files.sync_directory

    def late(path: Path) -> None:
        if dist.get_rank() == 1 and (path / "rank-00001.json").exists():
            until(lambda: not path.exists(), "the checkpoint to be published")
        real(path)

    with patch.object(files, "sync_directory", late):
        save(root, model, optimizer)
    assert not verify(shardopt.checkpoint.publish.find(root))


def test_a_rank_that_syncs_late_finds_the_checkpoint_published(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(is_slow_to_sync, tmp_path, world=2)


def test_the_script_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is that of the call, also for what is written later."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    with held_disk() as let_go:
        saving = shardopt.save_checkpoint("runs", model, optimizer, asynchronous=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        let_go.set()
        assert saving.wait().parent == tmp_path / "runs"
    assert os.listdir() == []
    shardopt.load_checkpoint("../runs", model, optimizer)


def test_staging_memory_is_no_larger_than_what_is_saved(tmp_path: Path) -> None:
    """Pinned for the params' GPU, by pages: torch's own pinned memory is rounded up to a power of two."""
    runtime, gpu, copy = Runtime(refuses=False), torch.device("cuda", 2), Background.copy
    with (
        patch("torch.cuda.cudart", lambda: runtime),
        patch("torch.cuda.device", runtime.device),
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.is_available", lambda: True),
        patch.object(Background, "copy", lambda background, items, device: copy(background, items, gpu)),
    ):
        model = torch.nn.Linear(300, 300, bias=False)
        for name, numel in (("first", 300 * 300), ("second", 300 * 300 + 40_000)):
            if name == "second":
                model.register_buffer("more", torch.ones(40_000))
            shardopt.save_checkpoint(tmp_path / name, model, asynchronous=True).wait()
            assert len(runtime.registered) == 1 and numel * 4 <= runtime.nbytes < numel * 4 + (32 << 10)
        assert [call[:2] for call in runtime.calls] == [("register", 2), ("give back", 2), ("register", 2)]
        del model
        gc.collect()
        assert not runtime.registered
