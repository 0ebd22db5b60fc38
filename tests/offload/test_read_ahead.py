"""Promise: with the module handed over, a backward reads the first chunks of its step from the disk; no bit, no byte of
memory and no error of a step is another one for it."""

import copy
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardopt import Offload, OffloadError, ShardedAdamW, ShardedLAMB, ShardedOptimizer, ShardedSGD, Tuning
from shardopt.offload.disk.pipeline import SLOTS, ChunkJob, Pipeline
from shardopt.offload.disk.store import DiskStore
from shardopt.offload.store import Chunk, Plane
from tests.offload.test_offload_faults import Faulty, Stalled, System, system
from tests.support.moments import DEADLINE, until
from tests.support.offloaded import on_a_gpu
from tests.support.training import raw

CHUNK, CHUNKS = 4096, 8  # bytes, the least: 1,024 elements; of a model


class Training:
    """A model of 8 chunks, of one bucket each."""

    def __init__(self, offload: Any, kind: Any = ShardedAdamW, **keywords: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(CHUNKS)))
        tuning = Tuning(chunk_bytes=CHUNK, bucket_bytes=CHUNK, keep_below=0)
        self.optimizer: ShardedOptimizer = kind(
            self.model, lr=1e-2, stage=2, offload=offload, tuning=tuning, **keywords
        )
        self.batches = 0
        self.saved: Any = None

    def backward(self, scale: float = 1.0) -> None:
        self.batches += 1
        x = torch.sin(torch.arange(4 * 32.0) + self.batches).view(4, 32)
        (self.model(x).square().mean() * scale).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def pipeline(self) -> Pipeline:
        store: Any = self.optimizer.engine.domain.store  # type: ignore[union-attr]
        return getattr(store, "_inner", store).pipeline  # type: ignore[no-any-return]

    def wait_for_reads(self) -> None:
        until(lambda: not self.pipeline._busy, "reads to end")

    def bits(self) -> list[bytes]:
        states = [value for state in self.optimizer.state.values() for _, value in sorted(state.items())]
        return [raw(each) for each in (*self.model.parameters(), *states)]


@contextmanager
def reads() -> Iterator[list[int]]:
    """How many streams are read, in each part of what follows: whoever looks appends a part."""
    counts, hand_over = [0], Pipeline._hand_over

    def counted(pipeline: Pipeline, job: ChunkJob, moves: Any) -> None:
        counts[-1] += len(moves) if moves is job.reads else 0
        hand_over(pipeline, job, moves)

    with patch.object(Pipeline, "_hand_over", counted):
        yield counts


@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.parametrize("release", [False, True])
def test_a_backward_reads_what_the_step_would_read_first(is_on_gpu: bool, release: bool, tmp_path: Path) -> None:
    if is_on_gpu and release:
        return  # refused
    with on_a_gpu() if is_on_gpu else nullcontext():
        training = Training(tmp_path, ShardedSGD, momentum=0.5, release_gradients=release)
        training.backward()
        training.step()
        buffers = training.optimizer.memory()["buffer"]
        with reads() as counts:

            def part(act: Callable[[], object]) -> None:
                act()
                counts.append(0)

            if release:
                part(training.backward)  # all that is read, and the first chunks once
                assert counts[0] == CHUNKS
                return
            part(training.backward)
            assert training.optimizer.memory()["buffer"] == buffers
            part(training.backward)  # accumulates
            part(training.step)
            assert counts[:3] == [SLOTS, 0, CHUNKS - SLOTS]
            part(lambda: training.backward(float("inf")))
            with pytest.warns(UserWarning, match="skipped this step"):
                part(training.step)
            part(training.backward)
            part(training.step)
            assert counts[3:7] == [SLOTS, 0, 0, CHUNKS - SLOTS]
        training.optimizer.close()


# -- what comes between backward and step ------------------------------------------------------------------------------


def save(training: Training) -> None:
    training.saved = copy.deepcopy(training.optimizer.state_dict())


def load(training: Training) -> None:
    training.optimizer.load_state_dict(training.saved)


def write_weights(training: Training) -> None:
    with torch.no_grad():
        for param in training.model.parameters():
            param.mul_(0.5)
    training.optimizer.refresh_masters()


def turn_on_amsgrad(training: Training) -> None:
    training.optimizer.param_groups[0]["amsgrad"] = True


def begin_anew(training: Training) -> None:
    training.optimizer.zero_grad()
    training.backward()


def move(training: Training) -> None:
    training.optimizer.offload("cpu")
    training.optimizer.reload()


def freeze(training: Training) -> None:
    training.optimizer.param_groups[0]["params"][0].requires_grad_(False)


def fail_half_way(training: Training) -> None:
    """A step that changed nothing, which is taken again."""
    if training.optimizer.memory()["state"].get("disk"):
        with system(Faulty("write", "EIO", 3)), pytest.raises(OffloadError):
            training.optimizer.step()


def find_no_room(training: Training) -> None:
    """A step that failed before it read anything."""
    if training.optimizer.memory()["state"].get("disk"):
        (group,) = training.optimizer.param_groups
        group["amsgrad"] = True
        with system(Faulty("reserve", "ENOSPC", 0)), pytest.raises(OffloadError):
            training.optimizer.step()
        group["amsgrad"] = False


ACTS = (
    load,
    save,
    write_weights,
    turn_on_amsgrad,
    Training.backward,
    begin_anew,
    move,
    freeze,
    fail_half_way,
    find_no_room,
)


@pytest.mark.parametrize("kind", [ShardedAdamW, ShardedLAMB])
def test_nothing_that_comes_between_changes_a_bit(kind: Any, tmp_path: Path) -> None:
    for act in ACTS if kind is ShardedAdamW else ACTS[:1]:
        ends = []
        for offload in (None, tmp_path):
            training = Training(offload, kind)
            training.backward()
            training.step()
            save(training)
            for _ in range(2):
                training.backward()
                act(training)
                training.step()
            ends.append(training.bits())
            training.optimizer.close()
        assert ends[0] == ends[1], act.__name__
    assert not os.listdir(tmp_path)


def test_a_chunk_that_comes_before_those_that_were_read_finds_a_slot(tmp_path: Path) -> None:
    """Every other backward leaves out the params whose chunks are updated first."""
    ends = []
    for offload in (None, tmp_path):
        training = Training(offload)
        for number in range(4):
            training.model[:2].requires_grad_(number % 2 == 0)
            training.backward()
            training.step()
        ends.append(training.bits())
        training.optimizer.close()
    assert ends[0] == ends[1]


def test_a_read_that_fails_in_backward_is_made_again(tmp_path: Path) -> None:
    expected, training = Training(None), Training(tmp_path)
    for each in (expected, training):
        each.backward()
        each.step()
    faulty = Faulty("read", "EIO", 5)
    with system(faulty):
        training.backward()
        training.wait_for_reads()
    assert faulty.fired
    training.step()
    expected.backward()
    expected.step()
    assert training.bits() == expected.bits()
    before = training.bits()

    class Broken(System):
        def read(self, fd: int, buffer: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, "the disk is broken")

    with system(Broken()):
        training.backward()
        with pytest.raises(OffloadError, match="broken"):
            training.optimizer.step()
    assert training.bits() == before
    training.step()
    expected.backward()
    expected.step()
    assert training.bits() == expected.bits()


@contextmanager
def slow_until_a_step_reads() -> Iterator[None]:
    slow, prefetch = Stalled("read"), Pipeline.prefetch

    def let_go(pipeline: Pipeline, jobs: Any) -> None:
        prefetch(pipeline, jobs)
        slow._gate.set()

    with system(slow), patch.object(Pipeline, "prefetch", let_go):
        yield


def test_slots_that_have_become_too_short_are_not_used_again(tmp_path: Path) -> None:
    """Chunks have a stream more than those that are still being read when the step begins."""
    ends = []
    for offload in (None, tmp_path):
        training = Training(offload)
        training.backward()
        training.step()
        with slow_until_a_step_reads():
            training.backward()
            turn_on_amsgrad(training)
            training.step()
        ends.append(training.bits())
        training.optimizer.close()
    assert ends[0] == ends[1]


def test_what_was_read_of_a_shard_that_is_gone_is_no_other_shards(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, CHUNK, DEADLINE)

    def chunk_of_new_shard() -> Chunk:
        home = store.home(1024, torch.float32, torch.device("cpu"))
        home.ensure({"exp_avg": Plane(torch.float32)})
        return Chunk(home, 0, 1024, ("exp_avg",), None)

    def fetched(chunk: Chunk) -> torch.Tensor:
        store.begin()
        store.prefetch([chunk])
        (stream,) = store.fetch(chunk).streams
        return stream

    chunk = chunk_of_new_shard()
    fetched(chunk).fill_(1.0)
    store.write_back(chunk)
    store.flush()
    store.commit()
    store.read_ahead()
    until(lambda: not store.pipeline._busy, "reads to end")
    chunk.home.release()
    assert not fetched(chunk_of_new_shard()).any()
    store.roll_back()
    store.close()


def test_a_child_that_is_forked_in_a_backward_leaves_the_disk_alone(tmp_path: Path) -> None:
    training = Training(Offload(tmp_path))
    training.backward()
    training.step()
    with Stalled("read").at_work():
        training.backward()
        child = os.fork()
        if not child:
            training.optimizer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    training.step()
    training.optimizer.close()
    assert not os.listdir(tmp_path)
