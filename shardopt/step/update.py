"""The update of one step, once it is decided: shard by shard, and in each shard chunk by chunk through the store.

A kernel may run where the gradients are not: on the CPU for gradients on a device, or on a device for gradients in host
memory. A chunk then names its gradients as runs, the store copies each run, and a table is made of the copies::

    shard       | w1 w1 | w1 .. | w2 .. | w3 w3 |        a chunk of four blocks, .. the padding of a last block
    gradients   | w1 w1   w1 ..   w2 |  w3 w3 |          two runs: w3's was allocated by itself
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ..domain.agreement import StepDigest, agree
from ..domain.domain import Domain
from ..domain.shard import Shard, scales_name
from ..errors import CommunicationError
from ..kernels.launch import backend_of
from ..kernels.pool import beside_a_gpu
from ..kernels.tables import BLOCK, Factors, Gradients, Streams, blocks_of, noise_from
from ..offload.store import Chunk, Fetched
from ..partition.comm.transport import Gather
from .launches import Launch, StepPlan

_HALF_WAY = "Some shards are updated, others are not: do not go on training from here; restart from a checkpoint."


class GradientRun(NamedTuple):
    """Gradients that lie in memory as they lie in the shard; the reducer's sums are one run for a whole chunk."""

    first: int  # element of the shard
    values: torch.Tensor  # 1D; between params it holds anything
    rows: list[int]

    def joined(self, other: "GradientRun") -> "GradientRun | None":
        """Returns both as one run; None unless ``other`` follows in memory as it does in the shard."""
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
        """Makes the table of gradients of each launch, for the elements of this chunk alone."""
        start, stop, copies = self.chunk.start, self.chunk.stop, iter(fetched.gradients)
        return [
            launch.gradients.part(start, stop, launch.spec.grad.itemsize)
            if runs is None
            else _table(launch.shard, self.chunk, [(run, next(copies)) for run in runs])
            for launch, runs in zip(self.launches, self.runs, strict=True)
        ]


def chunks_of(shard: Shard, states: Iterable[str], launches: Sequence[Launch]) -> list[ChunkUpdate]:
    """Makes missing states, divides sums of gradients, and lists the chunks of a shard that hold what is updated.

    Args:
        states: names of those that the shard needs, the same on all ranks.
    """
    shard.ensure_states(states)
    launches = [_divided(launch) for launch in launches]
    names = dict.fromkeys(name for launch in launches for name in launch.spec.variant.states)
    rows = [row for launch in launches for row in launch.updates]
    return [_chunk_update(shard, chunk, launches) for chunk in shard.chunks(names, [shard.pieces[row] for row in rows])]


def _chunk_update(shard: Shard, chunk: Chunk, launches: list[Launch]) -> ChunkUpdate:
    updates_on_host = chunk.home.updates_on_host
    runs = [
        None if launch.is_on_host == updates_on_host else _runs(launch, chunk.start, chunk.stop) for launch in launches
    ]
    moved = tuple(run.values for each in runs if each is not None for run in each)
    written = _written(shard, chunk, launches) if updates_on_host else ()
    return ChunkUpdate(replace(chunk, gradients=moved, written=written), launches, runs)


def _written(shard: Shard, chunk: Chunk, launches: list[Launch]) -> tuple[slice, ...]:
    """Returns the elements of the chunk that are updated, with the padding between them."""
    found: list[slice] = []
    for row in sorted(row for launch in launches for row in launch.updates):
        piece = shard.pieces[row]
        first, last = max(piece.shard_start, chunk.start), min(piece.shard_end, chunk.stop)
        if first < last:
            follows = found and first - chunk.start < found[-1].stop + BLOCK
            start = found.pop().start if follows else first - chunk.start
            found.append(slice(start, last - chunk.start))
    return tuple(found)


def _divided(launch: Launch) -> Launch:
    """Returns a launch whose divisor a kernel can fold into its factors: a power of two.

    Sums with another divisor are divided in place: one more pass over this rank's slices.
    """
    if Factors(launch.divisor).folded() is not None:
        return launch
    for each in launch.updates.values():
        assert each.gradient_slice is not None
        each.gradient_slice.divide()
    return replace(launch, divisor=1)


def launches_by_shard(plan: StepPlan) -> dict[Shard, list[Launch]]:
    """Returns the launches of all shards, in the order in which shards are updated."""
    # Backward order reversed: the first layers' params, which the next forward needs first, arrive first.
    found: dict[Shard, list[Launch]] = {shard: [] for shard in reversed(plan.domain.shards)}
    for launch in plan.launches:
        found[launch.shard].append(launch)
    return found


def _runs(launch: Launch, start: int, stop: int) -> list[GradientRun]:
    """Lists the gradients of a launch that belong to elements [start, stop) of the shard."""
    runs: list[GradientRun] = []
    for row, each in sorted(launch.updates.items()):
        piece = launch.shard.pieces[row]
        first, last = max(piece.shard_start, start), min(piece.shard_end, stop)
        if first < last:
            offset = each.grad.storage_offset() + piece.start - each.start + first - piece.shard_start
            run = GradientRun(first, each.grad.as_strided((last - first,), (1,), offset), [row])
            joined = runs[-1].joined(run) if runs else None
            runs[len(runs) - (joined is not None) :] = [joined or run]
    return runs


def _table(shard: Shard, chunk: Chunk, copied: Sequence[tuple[GradientRun, torch.Tensor]]) -> Gradients:
    """Makes the table of runs that were copied to where the kernel runs."""
    rows = np.zeros((shard.tables.num_rows, 2), dtype=np.int64)
    for run, copy in copied:
        grad_at = copy.data_ptr() - (run.first - chunk.start) * copy.element_size()
        for row in run.rows:
            rows[row] = (grad_at, min(shard.pieces[row].shard_end, chunk.stop) - chunk.start)
    device, aligned = shard.home.device, not np.any(rows[:, 0] % 16)
    row_of_block = shard.tables.host_row_of_block if device.type == "cpu" else shard.tables.row_of_block
    return Gradients(blocks_of(row_of_block, chunk.start, chunk.stop), torch.from_numpy(rows).to(device), aligned)


# -- through the store, and to the other ranks -------------------------------------------------------------------------


def update_and_gather(plan: StepPlan, factors: Factors) -> Exception | None:
    """Collective: launches every update of this rank and gathers the buckets that any rank updated.

    Args:
        factors: of every gradient; each launch has a divisor of its own.

    Returns:
        Why no rank updated anything after all. An error is raised where that is not certain.
    """
    domain = plan.domain
    if domain.links is None:  # nothing is bound: every param is frozen
        return None
    if domain.sharded is not None:
        domain.gatherer.drop_all()  # the next forward gathers params anew: whole params here would be out of date
    launches = launches_by_shard(plan)
    domain.epoch.begin_step()
    if not domain.store.is_final:
        undone = _update_or_roll_back(plan, launches, factors)
        if undone is not None:
            return undone
    _update_in_memory_and_gather(plan, launches, factors)
    return None


def _update_or_roll_back(
    plan: StepPlan, launches: Mapping[Shard, Sequence[Launch]], factors: Factors
) -> Exception | None:
    """Collective: keeps what was updated if every rank's store could write it; else puts all back and returns why."""
    domain, store = plan.domain, plan.domain.store
    problem: Exception | None = None
    try:
        try:
            store.begin()
            chunks = [each for shard, its in launches.items() for each in chunks_of(shard, plan.states[shard], its)]
            store.prefetch([each.chunk for each in chunks])
            update_chunks(domain, chunks, factors)
            with domain.clock.phase("write back"):
                store.flush()
        except Exception as error:
            problem = error
        try:
            with domain.clock.phase("agree"):
                agree(StepDigest("stored", dict, problem), domain.mesh.world, domain.device)
        except CommunicationError:
            raise
        except Exception as error:
            store.roll_back()
            return error
    except BaseException:
        store.roll_back()
        raise
    store.commit()
    return None


def _update_in_memory_and_gather(plan: StepPlan, launches: Mapping[Shard, Sequence[Launch]], factors: Factors) -> None:
    """Collective: updates what lies in memory (on a disk it was updated), and sends every shard as soon as it is."""
    domain, updated = plan.domain, {each.entry.shard for each in plan.updates}
    gather = domain.transport.gather("gathering updated params")
    problem: Exception | None = None
    chunks: dict[Shard, list[ChunkUpdate]] = {}
    try:
        if domain.store.is_final:
            chunks = {shard: chunks_of(shard, plan.states[shard], its) for shard, its in launches.items()}
            domain.store.prefetch([chunk.chunk for each in chunks.values() for chunk in each])
    except Exception as error:  # the other ranks wait for this rank's shards: they are told once all have met
        problem = error
    for shard in launches:
        try:
            if problem is None:
                update_chunks(domain, chunks.get(shard, ()), factors)
        except Exception as error:
            problem = error
        if shard in updated and shard.gathered is None:
            gather.start(shard.window)
    try:
        if any(chunks.values()):
            domain.store.flush()
    except Exception as error:
        problem = problem or error
    _finish(domain, gather, problem)


def _finish(domain: Domain, gather: Gather, problem: Exception | None) -> None:
    try:
        with domain.clock.phase("gather"):
            gather.finish(failed=problem is not None)
    except CommunicationError as error:
        if problem is None:
            raise CommunicationError(f"{error} {_HALF_WAY}") from error
    domain.transport.traffic.params += gather.received
    if problem is not None:
        problem.add_note(_HALF_WAY)
        raise problem


def update_chunks(domain: Domain, chunks: Iterable[ChunkUpdate], factors: Factors) -> None:
    """Fetches each chunk, updates it, and writes it back."""
    store, clock = domain.store, domain.clock
    for each in chunks:
        with clock.phase("fetch"):
            fetched = store.fetch(each.chunk)
        with clock.phase("update"), beside_a_gpu() if each.chunk.home.updates_on_host else nullcontext():
            for launch, gradients in zip(each.launches, each.tables(fetched), strict=True):
                _launch(launch, each.chunk, fetched, gradients, factors)
        with clock.phase("write back"):
            store.write_back(each.chunk)


def _launch(launch: Launch, chunk: Chunk, fetched: Fetched, gradients: Gradients, factors: Factors) -> None:
    streams = dict(zip(chunk.names, fetched.streams, strict=True))
    names = launch.spec.variant.states
    states = tuple(streams[name] for name in names)
    scales = tuple(streams.get(scales_name(name)) for name in names)
    folded = factors._replace(divisor=launch.divisor).folded()
    assert folded is not None  # chunks_of() divided all others
    master = streams.get("master") if launch.spec.has_master else None
    noise = None if launch.noise is None else noise_from(launch.noise, chunk.start)
    param = streams["param"] if fetched.param is None else fetched.param
    backend_of(param.device).step(
        launch.spec, Streams(param, master, states, scales), gradients, launch.scalars, folded, noise
    )
