"""What there is to do once a step is decided: shard by shard, and in each of them chunk by chunk.

Where an update does not run where backward left the gradients, a chunk names those that it needs as runs, and a table
is made of the copies::

    shard       | w1 w1 | w1 .. | w2 .. | w3 w3 |        a chunk of four blocks, .. the padding of a last block
    gradients   | w1 w1   w1 ..   w2 |  w3 w3 |          two runs: w3's was allocated by itself
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from .binding import Binding
from .kernels.tables import BLOCK, Gradients
from .offload.store import Chunk, Fetched
from .shard import Shard
from .survey import Launch, Survey


class Run(NamedTuple):
    """Gradients that lie in memory as in the shard: those of a whole chunk, where the reducer summed them."""

    first: int  # element of the shard
    values: torch.Tensor  # 1D; between params it holds anything
    rows: list[int]

    def and_then(self, other: "Run") -> "Run | None":
        """The two as one, if the other one follows in memory as it does in the shard."""
        ours, theirs = self.values, other.values
        if ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr():
            return None
        if theirs.storage_offset() - ours.storage_offset() != other.first - self.first:
            return None
        numel = other.first + theirs.numel() - self.first
        return Run(self.first, ours.as_strided((numel,), (1,)), self.rows + other.rows)


class Task(NamedTuple):
    """The update of one chunk."""

    chunk: Chunk
    launches: Sequence[Launch]
    runs: Sequence[Sequence[Run]]  # of each launch; none where gradients are read where they are

    def tables(self, fetched: Fetched) -> list[Gradients]:
        """The gradients of each launch, for these elements alone."""
        start, stop = self.chunk.start, self.chunk.stop
        if not self.runs:
            return [launch.gradients.part(start, stop, launch.spec.grad.itemsize) for launch in self.launches]
        copies = iter(fetched.gradients)
        return [
            _table(launch.shard, self.chunk, [(run, next(copies)) for run in runs])
            for launch, runs in zip(self.launches, self.runs, strict=True)
        ]


class Work(NamedTuple):
    """What there is to do for one shard."""

    shard: Shard
    states: Iterable[str]  # that it needs, the same on all ranks
    launches: list[Launch]

    def tasks(self) -> list[Task]:
        """None where this rank holds nothing of what is updated."""
        self.shard.ensure_states(self.states)
        names = dict.fromkeys(name for launch in self.launches for name in launch.spec.variant.states)
        pieces = [self.shard.pieces[row] for launch in self.launches for row in launch.ready]
        return [self._task(chunk) for chunk in self.shard.chunks(names, pieces)]

    def _task(self, chunk: Chunk) -> Task:
        if not chunk.home.is_apart:
            return Task(chunk, self.launches, ())
        runs = [_runs(launch, chunk.start, chunk.stop) for launch in self.launches]
        gradients = tuple(run.values for each in runs for run in each)
        return Task(replace(chunk, gradients=gradients, written=self._written(chunk)), self.launches, runs)

    def _written(self, chunk: Chunk) -> tuple[slice, ...]:
        """Elements of the chunk that are updated, and padding between them."""
        found: list[slice] = []
        for row in sorted(row for launch in self.launches for row in launch.ready):
            piece = self.shard.pieces[row]
            first, last = max(piece.shard_start, chunk.start), min(piece.shard_end, chunk.stop)
            if first < last:
                follows = found and first - chunk.start < found[-1].stop + BLOCK
                start = found.pop().start if follows else first - chunk.start
                found.append(slice(start, last - chunk.start))
        return tuple(found)


def works_of(binding: Binding, seen: Survey) -> list[Work]:
    """In the order in which they are done."""
    launches: dict[Shard, list[Launch]] = defaultdict(list)
    for launch in seen.launches:
        launches[launch.shard].append(launch)
    # Backward order reversed: the first layers' params, which the next forward needs first, arrive first.
    return [Work(shard, seen.states[shard], launches[shard]) for shard in reversed(binding.shards)]


def _runs(launch: Launch, start: int, stop: int) -> list[Run]:
    """What elements [start, stop) of the shard have of a launch's gradients."""
    runs: list[Run] = []
    for row, each in sorted(launch.ready.items()):
        piece = launch.shard.pieces[row]
        first, last = max(piece.shard_start, start), min(piece.shard_end, stop)
        if first < last:
            offset = each.grad.storage_offset() + piece.start - each.start + first - piece.shard_start
            run = Run(first, each.grad.as_strided((last - first,), (1,), offset), [row])
            joined = runs[-1].and_then(run) if runs else None
            runs[len(runs) - (joined is not None) :] = [joined or run]
    return runs


def _table(shard: Shard, chunk: Chunk, copied: Sequence[tuple[Run, torch.Tensor]]) -> Gradients:
    """Of runs that were copied to host memory."""
    rows = np.zeros((shard.num_rows, 2), dtype=np.int64)
    for run, copy in copied:
        grad_at = copy.data_ptr() - (run.first - chunk.start) * copy.element_size()
        for row in run.rows:
            rows[row] = (grad_at, min(shard.pieces[row].shard_end, chunk.stop) - chunk.start)
    row_of_block = shard.host_row_of_block[chunk.start // BLOCK : -(-chunk.stop // BLOCK)]
    return Gradients(row_of_block, torch.from_numpy(rows), aligned=False)
