"""Several transfers of a disk are in flight at a time: in steps, moves, state dicts, checkpoints and reads of params.

No clock: a transfer that has begun does not end before others have begun beside it. Where they are handed over one
after the other, the first one waits until a deadline, and what asked for it fails.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import Parameter

import shardopt
from shardopt import Offload, ShardedAdamW, ShardedOptimizer, ShardedSGD, Tuning
from shardopt.kernels import native_backend
from shardopt.offload.disk.file_io import TransferBuffer
from shardopt.offload.disk.pipeline import ChunkJob, Move, Pipeline
from tests.offload.test_offload_faults import System, system

CHUNK = 4096  # bytes, the least: 1,024 elements
CHUNKS = 8  # of the long params: two rounds of the slots
IN_FLIGHT = 4  # transfers; with 3 steps took longer
DEADLINE = 120.0  # seconds, of a transfer that begins alone

_HAND_OVER = Pipeline._hand_over


class Meeting(System):
    """Chosen transfers wait for each other; all others pass.

    They are numbered as they are handed to the threads, which is the order of chunks. They may begin in another order,
    where a thread that has taken one gets no core.

    Args:
        readers, writers: the numbers of the transfers that wait, counted from here.
        others: further threads that call :meth:`wait`.
    """

    def __init__(self, readers: range = range(0), writers: range = range(0), others: int = 0):
        self.barrier = threading.Barrier(len(readers) + len(writers) + others, timeout=DEADLINE)
        self.has_met = False
        self._awaited = {"read": readers, "write": writers}
        self._handed_over = {"read": 0, "write": 0}
        self._of_thread = threading.local()

    def wait(self) -> None:
        self.barrier.wait()
        self.has_met = True

    def hand_over(self, pipeline: Pipeline, job: ChunkJob, moves: Sequence[Move]) -> None:
        """As ``Pipeline._hand_over``, which runs under the pipeline's lock."""
        kind = "read" if moves is job.reads else "write"
        first = self._handed_over[kind]
        self._handed_over[kind] += len(moves)
        numbered = [partial(self._move, number, move) for number, move in enumerate(moves, first)]
        _HAND_OVER(pipeline, job, numbered)

    def _move(self, number: int, move: Move, part: TransferBuffer) -> None:
        self._of_thread.number = number
        try:
            move(part)
        finally:
            self._of_thread.number = None

    def _begin(self, kind: str) -> None:
        """At a transfer's first call; the header of a new file, say, is no transfer and has no number."""
        number = getattr(self._of_thread, "number", None)
        self._of_thread.number = None
        if number in self._awaited[kind]:
            self.wait()

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._begin("read")
        return super().read(fd, buffer, offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._begin("write")
        return super().write(fd, buffer, offset)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with system(self), patch.object(Pipeline, "_hand_over", lambda *given: self.hand_over(*given)):
            yield


@contextmanager
def meets(**parties: Any) -> Iterator[Meeting]:
    """What is done here brings these transfers together."""
    meeting = Meeting(**parties)
    with meeting.at_work():
        yield meeting
    assert meeting.has_met, f"there were too few transfers for {parties} to begin"


reads = {"readers": range(IN_FLIGHT)}
writes = {"writers": range(IN_FLIGHT)}


def make(kind: Any, *chunks: int, offload: Any = None, **keywords: Any) -> ShardedOptimizer:
    """A shard for each number of chunks, a step behind it."""
    params = [Parameter(torch.linspace(-1, 1, 1024 * each)) for each in chunks]
    optimizer = kind(params, **keywords, offload=offload, tuning=Tuning(chunk_bytes=CHUNK, bucket_bytes=CHUNK))
    step(optimizer)
    return optimizer


def step(optimizer: ShardedOptimizer) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()


def momentum(root: Path, *chunks: int) -> ShardedOptimizer:
    """One stream, so that transfers at one time are those of several chunks."""
    return make(ShardedSGD, *chunks, offload=root, lr=0.5, momentum=0.5)


LAYOUTS = pytest.mark.parametrize("chunks", [(CHUNKS,), (1,) * CHUNKS], ids=["one shard", "many shards"])


@LAYOUTS
def test_a_step_reads_several_chunks_at_a_time(chunks: tuple[int, ...], tmp_path: Path) -> None:
    optimizer = momentum(tmp_path, *chunks)
    with meets(**reads):
        step(optimizer)


@LAYOUTS
def test_a_step_writes_several_chunks_at_a_time(chunks: tuple[int, ...], tmp_path: Path) -> None:
    optimizer = momentum(tmp_path, *chunks)
    with meets(**writes):
        step(optimizer)


@LAYOUTS
def test_a_step_reads_ahead_updates_and_writes_behind_at_a_time(chunks: tuple[int, ...], tmp_path: Path) -> None:
    """Chunk 0 is being written and chunk 3 read while chunk 1 is updated."""
    optimizer, updates = momentum(tmp_path, *chunks), 0
    update = native_backend.run
    with meets(readers=range(3, 4), writers=range(1), others=1) as meeting:

        def meet(*arguments: Any) -> None:
            nonlocal updates
            if updates == 1:
                meeting.wait()
            updates += 1
            update(*arguments)

        with patch.object(native_backend, "run", meet):
            step(optimizer)
    assert updates == CHUNKS


def test_moves_state_dicts_and_checkpoints(tmp_path: Path) -> None:
    optimizer = make(ShardedAdamW, CHUNKS)
    (param,) = optimizer.param_groups[0]["params"]
    module = torch.nn.ParameterList([param])

    def saved() -> dict[str, Any]:
        return copy.deepcopy(optimizer.state_dict())  # the dict itself is live, and reads nothing

    acts: list[tuple[str, dict[str, range], Callable[[], object]]] = [
        ("from memory to a directory", writes, lambda: optimizer.offload(tmp_path / "one")),
        ("to another directory: reads", reads, lambda: optimizer.offload(tmp_path / "two")),
        ("to another directory: writes", writes, lambda: optimizer.offload(tmp_path / "three")),
        ("state_dict()", reads, saved),
        ("load_state_dict()", writes, lambda state=saved: optimizer.load_state_dict(state())),
        ("a checkpoint saved", reads, lambda: shardopt.save_checkpoint(tmp_path / "saved", module, optimizer)),
        ("a checkpoint loaded", writes, lambda: shardopt.load_checkpoint(tmp_path / "saved", module, optimizer)),
        ("back into memory", reads, optimizer.reload),
    ]
    found = {}
    for name, parties, act in acts:
        meeting = Meeting(**parties)
        with meeting.at_work():
            try:
                act()
            except (threading.BrokenBarrierError, shardopt.ShardoptError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        if not meeting.has_met:
            found.setdefault(name, "no transfers that met")
    assert not found


def test_params_are_read_several_chunks_at_a_time(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, CHUNKS, bias=False)
    tuning = Tuning(chunk_bytes=CHUNK, live_bytes=0, keep_below=0)
    offload = Offload(tmp_path, params=tmp_path)
    optimizer = ShardedSGD(model, lr=0.5, stage=3, offload=offload, tuning=tuning)
    for _ in range(2):
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with meets(**reads):
        model(torch.ones(2, 1024))
    optimizer.close()
