"""What there is to do once a step is decided: shard by shard, and in each of them chunk by chunk.

Where an update does not run where backward left the gradients (it runs on the CPU and they are on a device, or they
rest in host memory and it runs on the device), a chunk names those that it needs as runs, and a table is made of the
copies::

    shard       | w1 w1 | w1 .. | w2 .. | w3 w3 |        a chunk of four blocks, .. the padding of a last block
    gradients   | w1 w1   w1 ..   w2 |  w3 w3 |          two runs: w3's was allocated by itself
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ..domain.domain import Domain
from ..domain.shard import Shard
from ..kernels.tables import BLOCK, Gradients
from ..offload.store import Chunk, Fetched
from .survey import Launch, StepPlan


class GradientRun(NamedTuple):
    """Gradients that lie in memory as in the shard: those of a whole chunk, where the reducer summed them."""

    first: int  # element of the shard
    values: torch.Tensor  # 1D; between params it holds anything
    rows: list[int]

    def and_then(self, other: "GradientRun") -> "GradientRun | None":
        """The two as one, if the other one follows in memory as it does in the shard."""
        ours, theirs = self.values, other.values
        if ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr():
            return None
        if theirs.storage_offset() - ours.storage_offset() != other.first - self.first:
            return None
        numel = other.first + theirs.numel() - self.first
        return GradientRun(self.first, ours.as_strided((numel,), (1,)), self.rows + other.rows)


class ChunkUpdate(NamedTuple):
    """The update of one chunk."""

    chunk: Chunk
    launches: Sequence[Launch]
    runs: Sequence[Sequence[GradientRun] | None]  # of each launch; None where gradients are read where they are

    def tables(self, fetched: Fetched) -> list[Gradients]:
        """The gradients of each launch, for these elements alone."""
        start, stop, copies = self.chunk.start, self.chunk.stop, iter(fetched.gradients)
        return [
            launch.gradients.part(start, stop, launch.spec.grad.itemsize)
            if runs is None
            else _table(launch.shard, self.chunk, [(run, next(copies)) for run in runs])
            for launch, runs in zip(self.launches, self.runs, strict=True)
        ]


class ShardUpdate(NamedTuple):
    """What there is to do for one shard."""

    shard: Shard
    states: Iterable[str]  # that it needs, the same on all ranks
    launches: list[Launch]

    def tasks(self) -> list[ChunkUpdate]:
        """None where this rank holds nothing of what is updated."""
        self.shard.ensure_states(self.states)
        names = dict.fromkeys(name for launch in self.launches for name in launch.spec.variant.states)
        pieces = [self.shard.pieces[row] for launch in self.launches for row in launch.ready]
        return [self._task(chunk) for chunk in self.shard.chunks(names, pieces)]

    def _task(self, chunk: Chunk) -> ChunkUpdate:
        apart = chunk.home.updates_on_host
        runs = [None if launch.at_rest == apart else _runs(launch, chunk.start, chunk.stop) for launch in self.launches]
        moved = tuple(run.values for each in runs if each is not None for run in each)
        written = self._written(chunk) if apart else ()
        return ChunkUpdate(replace(chunk, gradients=moved, written=written), self.launches, runs)

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


def works_of(domain: Domain, seen: StepPlan) -> list[ShardUpdate]:
    """In the order in which they are done."""
    launches: dict[Shard, list[Launch]] = defaultdict(list)
    for launch in seen.launches:
        launches[launch.shard].append(launch)
    # Backward order reversed: the first layers' params, which the next forward needs first, arrive first.
    return [ShardUpdate(shard, seen.states[shard], launches[shard]) for shard in reversed(domain.shards)]


def _runs(launch: Launch, start: int, stop: int) -> list[GradientRun]:
    """What elements [start, stop) of the shard have of a launch's gradients."""
    runs: list[GradientRun] = []
    for row, each in sorted(launch.ready.items()):
        piece = launch.shard.pieces[row]
        first, last = max(piece.shard_start, start), min(piece.shard_end, stop)
        if first < last:
            offset = each.grad.storage_offset() + piece.start - each.start + first - piece.shard_start
            run = GradientRun(first, each.grad.as_strided((last - first,), (1,), offset), [row])
            joined = runs[-1].and_then(run) if runs else None
            runs[len(runs) - (joined is not None) :] = [joined or run]
    return runs


def _table(shard: Shard, chunk: Chunk, copied: Sequence[tuple[GradientRun, torch.Tensor]]) -> Gradients:
    """Of runs that were copied to where the update runs."""
    rows = np.zeros((shard.tables.num_rows, 2), dtype=np.int64)
    for run, copy in copied:
        grad_at = copy.data_ptr() - (run.first - chunk.start) * copy.element_size()
        for row in run.rows:
            rows[row] = (grad_at, min(shard.pieces[row].shard_end, chunk.stop) - chunk.start)
    device, aligned = shard.home.device, not np.any(rows[:, 0] % 16)
    row_of_block = shard.tables.host_row_of_block if device.type == "cpu" else shard.tables.row_of_block
    blocks = slice(chunk.start // BLOCK, -(-chunk.stop // BLOCK))
    return Gradients(row_of_block[blocks], torch.from_numpy(rows).to(device), aligned)
