"""The update of one step, once it is decided: shard by shard, and in each shard chunk by chunk through the store.

A kernel may run where the gradients are not: on the CPU for gradients on a device, or on a device for gradients in host
memory. A chunk then names its gradients as runs, the store copies each run, and a table is made of the copies::

    shard       | w1 w1 | w1 .. | w2 .. | w3 w3 |        a chunk of four blocks, .. the padding of a last block
    gradients   | w1 w1   w1 ..   w2 |  w3 w3 |          two runs: w3's was allocated by itself
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..domain.agreement import StepDigest, agree
from ..domain.domains import agree_on_whole
from ..domain.shard import Shard, scales_name
from ..errors import CommunicationError
from ..kernels.launch import backend_of
from ..kernels.pool import beside_a_gpu
from ..kernels.tables import BLOCK, Factors, Gradients, Streams, Tables, blocks_of, noise_from
from ..partition.comm.async_gather import AsyncGather
from ..partition.comm.together import Relay, riding_on
from ..profiler import label
from .launches import Launch, StepPlan, joined

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..kernels.spec import Spec
    from ..offload.store import Chunk, Fetched, Store
    from ..partition.comm.group import Ranks
    from ..partition.comm.transport import Gather
    from .launches import KeptChunks
    from .matrices import MatrixUpdate

LaunchesByShard = Mapping[Shard, Sequence[Launch]]

_GATHERING = "gathering updated params"
_HALF_WAY = "Some shards are updated, others are not: do not go on training from here; restart from a checkpoint."


class GradientRun(NamedTuple):
    """Gradients that lie in memory as they lie in the shard; the reducer's sums are one run for a whole chunk."""

    first: int  # element of the shard
    values: torch.Tensor  # 1D; between params it holds anything
    rows: list[int]

    def joined(self, other: GradientRun) -> GradientRun | None:
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
    # Of each launch, for the elements of this chunk alone: the table of gradients that are read where they are, or the
    # runs that the store copies. None: the table is made when the chunk is here, as it would delay the first copies.
    gradients: Sequence[Gradients | Sequence[GradientRun] | None]
    has_tables: bool = True  # of all launches
    target: torch.Tensor | None = None  # 1D, as long as the chunk: written in place of params and masters

    @staticmethod
    def of(chunk: Chunk, launches: Sequence[Launch]) -> ChunkUpdate:
        """Returns the update of a chunk that reads all gradients where they are."""
        return ChunkUpdate(chunk, launches, [_only(each, _part(each, chunk), chunk) for each in launches])

    def tables(self, fetched: Fetched) -> Sequence[Gradients]:
        """Makes the table of gradients of each launch."""
        if self.has_tables:
            return self.gradients  # type: ignore[return-value]
        copies, chunk = iter(fetched.gradients), self.chunk
        return [
            each
            if isinstance(each, Gradients)
            else _only(
                launch,
                _part(launch, chunk)
                if each is None
                else _table(launch.shard, chunk, [(run, next(copies)) for run in each]),
                chunk,
            )
            for launch, each in zip(self.launches, self.gradients, strict=True)
        ]


def chunks_of(
    shard: Shard, states: Iterable[str], launches: Sequence[Launch], kept: KeptChunks | None = None
) -> Sequence[ChunkUpdate]:
    """Makes missing states, divides sums of gradients, and lists the chunks of a shard that hold what is updated.

    Args:
        states: names of those that the shard needs, the same on all ranks.
        kept: those of the last step, for shards that stay in memory.
    """
    if kept and shard in kept:
        home, param, known, chunks_before = kept[shard]
        if home is shard.home and param is shard.param and known == launches:
            return list[ChunkUpdate](chunks_before)
    shard.ensure_states(states)
    divided = [launch.divided() for launch in launches]
    names = dict.fromkeys([name for launch in divided for name in launch.spec.names])
    rows = [row for launch in divided for row in launch.updates]
    pieces = [shard.pieces[row] for row in rows]
    chunks = [_chunk_update(shard, chunk, divided) for chunk in shard.chunks(names, pieces)]
    if kept is not None and divided == launches and not shard.store.moves:
        kept[shard] = shard.home, shard.param, divided, chunks
    return chunks


def _chunk_update(shard: Shard, chunk: Chunk, launches: list[Launch]) -> ChunkUpdate:
    updates_on_host, gradients = chunk.home.updates_on_host, list[Gradients | Sequence[GradientRun] | None]()
    for launch in launches:
        if launch.is_on_host != updates_on_host:
            gradients.append(_runs(launch, chunk.start, chunk.stop))
        else:
            gradients.append(None if shard.store.moves else _only(launch, _part(launch, chunk), chunk))
    runs = [each for each in gradients if each is not None and not isinstance(each, Gradients)]
    moved = tuple([run.values for each in runs for run in each])
    writes_params = updates_on_host and any(launch.part.writes_param for launch in launches)
    written = _written(shard, chunk, launches) if writes_params else ()
    chunk = replace(chunk, gradients=moved, written=written, unwritten=_unwritten(chunk, launches))
    return ChunkUpdate(chunk, launches, gradients, not shard.store.moves and not runs)


def _part(launch: Launch, chunk: Chunk) -> Gradients:
    return launch.gradients.part(chunk.start, chunk.stop, launch.spec.grad.itemsize)


def _only(launch: Launch, table: Gradients, chunk: Chunk) -> Gradients:
    """Returns the table with the blocks that the launch leaves out skipped."""
    return table if launch.blocks is None else table.only(blocks_of(launch.blocks, chunk.start, chunk.stop))


def _unwritten(chunk: Chunk, launches: Sequence[Launch]) -> frozenset[str]:
    """Returns the streams that a pass of a rule reads only."""
    written: set[str] = set()
    for part in {launch.part for launch in launches}:
        written.update(part.written, map(scales_name, part.written))
        if part.writes_param:
            written |= {"master", "param"}
    return frozenset(chunk.names) - written


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


def launches_by_shard(plan: StepPlan) -> dict[Shard, list[Launch]]:
    """Returns the launches of all shards, in the order in which shards are updated."""
    # Backward order reversed: the first layers' params, which the next forward needs first, arrive first. But the wire
    # idles while the first of all is updated, and an embedding takes long: the bucket beside it goes ahead.
    order = plan.domain.shards[::-1]
    if len(order) > 1 and order[0].numel > order[1].numel:
        order[:2] = order[1], order[0]
    found: dict[Shard, list[Launch]] = {shard: [] for shard in order}
    for launch in plan.launches:
        found[launch.shard] += (launch,)
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
    return Gradients(blocks_of(row_of_block, chunk.start, chunk.stop), torch.from_numpy(rows), aligned)


# -- through the store, and to the other ranks -------------------------------------------------------------------------


def update_and_gather(plans: Sequence[StepPlan], factors: Factors, whole: Sequence[Ranks] = ()) -> Exception | None:
    """Collective: launches every update of this rank and gathers the buckets that any rank updated.

    Args:
        plans: of all domains.
        factors: of every gradient; each launch has a divisor of its own.
        whole: the ranks over which the domains decide together; empty if one domain's ranks are all there are.

    Returns:
        Why no rank updated anything after all. An error is raised where that is not certain.
    """
    updates, is_final = list[Update](), True
    for plan in plans:
        if plan.domain.links is not None:  # without links every param is frozen
            update = Update(plan, launches_by_shard(plan), factors)
            for store in update.stores:
                store.begin_step()  # it chooses where the launches run that are made next
            updates += (update,)
        elif not whole:
            continue
        # Ranks of a model that is composed come to this agreement whatever they have bound.
        is_final = is_final and plan.domain.store.is_final
    for update in updates:
        if update.domain.sharded is not None:
            # The next forward gathers params anew: whole params here would be out of date.
            update.domain.gatherer.drop_all()
        update.domain.epoch.begin_step()
    if not is_final:
        undone = _update_or_roll_back(updates, plans[0].domain, whole)
        if undone is not None:
            return undone
    for update in updates:
        update.open_gather()
        relay = Relay()
        if is_final:
            update.run(relay)
        else:
            for shard in update.shards:
                relay.attempt(update.finish, shard)
                update.send(shard)
            relay.attempt(update.flush)  # the next backward adds to sums that `finish` copied from
        update.finish_gather(relay)
    return None


def _update_or_roll_back(updates: Sequence[Update], main: Domain, whole: Sequence[Ranks]) -> Exception | None:
    """Collective: keeps what was updated if every rank's store could write it; else puts all back and returns why."""
    stores, relay = [store for update in updates for store in update.stores], Relay()
    try:
        for update in updates:
            for store in update.stores:
                if not store.is_open:  # else backward has updated some buckets, as a part of this
                    relay.attempt(store.begin)
            update.run(relay)
        try:
            with main.clock.phase("agree"):
                digest = StepDigest("stored", dict, relay.problem)
                agree_on_whole(digest, whole) if whole else agree(digest, main.mesh.world)
        except CommunicationError:
            raise
        except Exception as error:
            for store in stores:
                store.roll_back()
            for update in updates:
                update.undo()
            return error
    except BaseException:
        for store in stores:
            store.roll_back()
        raise
    for store in stores:
        store.commit()
    return None


class Update:
    """One domain's update in one step: what the ops of its program work on.

    Attributes:
        launches: of the last pass of each rule, by shard, in the order in which shards are updated.
        matrices: the launches of the first pass of rules of whole matrices; their shards are not among the others.
        ran: the launches of the pass that ran last, by shard.
        slices: of matrices, on their way; from the first pass on.
        joins: True if launches of several shards are made as one where the backend takes them.
    """

    slices: MatrixUpdate

    def __init__(self, plan: StepPlan, launches: LaunchesByShard, factors: Factors, joins: bool = True):
        self.plan, self.domain, self.factors, self.joins = plan, plan.domain, factors, joins
        self.store, self.stores = plan.domain.store, plan.domain.stores
        self.shards = list(launches)
        of_matrices = plan.program.of_matrices
        self.launches, self.matrices = launches, dict[Shard, Sequence[Launch]]()
        if of_matrices:
            self.launches = {shard: its for shard, its in launches.items() if shard not in of_matrices}
            self.matrices = {shard: its for shard, its in launches.items() if shard in of_matrices}
        self.ran: LaunchesByShard = {}
        # Of shards that stay in memory beside a disk: updates of their last pass, which hold as soon as they are made.
        self._after_vote: dict[Shard, tuple[Sequence[ChunkUpdate], Factors]] = {}
        self._updated = {each.entry.shard for each in plan.updates}
        self._unread = set[Shard]()  # writes to their params are looked for right before their update
        self._gather: Gather | AsyncGather | None = None
        self._starts = 0

    def run(self, relay: Relay) -> None:
        """Collective: runs the program.

        Args:
            relay: has an earlier error of this rank, and gets the first one.
        """
        ops = self.plan.program.ops
        for shard in self.shards:
            if shard.exact_slice is not None and ops and self._writes(shard):
                # What a store moves is copied ahead, devices update shards together, and a vote may undo all. Else the
                # first shard travels before the others are read, and is in the cache until it is encoded.
                if len(ops) == 1 and self.store.is_final and not shard.store.moves and shard.exact_slice.values.is_cpu:
                    self._unread.add(shard)
                else:
                    shard.exact_slice.begin_update()
        for op in ops:
            try:
                op.run(self, relay)
            except Exception as error:  # all ranks know of it: none waits for a shard any more
                relay.note(error)
                self._gather = None
        if self.store.moves and self.store.is_final and any((*self.launches.values(), *self.matrices.values())):
            try:
                self.flush()  # also after an error: copies are under way
            except Exception as error:
                relay.note(error)

    def _writes(self, shard: Shard) -> bool:
        """True if this rank updates the shard, or sends it again."""
        return shard in self._updated or bool(self.launches.get(shard) or self.matrices.get(shard))

    def undo(self) -> None:
        """Notes that the store has put everything back."""
        for shard in self.shards:
            if shard.exact_slice is not None:
                shard.exact_slice.is_ahead = False

    def run_pass(
        self,
        launches: LaunchesByShard,
        relay: Relay,
        factors: Factors | None = None,
        upon: Mapping[Shard, torch.Tensor] | None = None,
        is_last: bool = False,
    ) -> None:
        """Runs one pass over all shards of this rank; nothing, if the rank has failed.

        Args:
            factors: of gradients that are not those of the step.
            upon: 1D [shard_numel] of each shard, which the pass writes in place of params and masters.
            is_last: True for the pass that writes params: each shard is sent once it is done, also after an error, as
                the other ranks wait for it.
        """
        domain, factors, plan = self.domain, factors or self.factors, self.plan
        self.ran = launches
        early = domain.early if is_last else None
        ready = set[Shard]()

        def prepare() -> Mapping[Shard, Sequence[ChunkUpdate]]:
            if early is not None:
                ready.update(early.ready(launches, factors))
            chunks = {
                shard: chunks_of(shard, plan.states[shard], launches[shard], plan.kept)
                for shard in launches
                if shard not in ready
            }
            if upon is not None:
                chunks = {shard: [_upon(each, upon[shard]) for each in its] for shard, its in chunks.items()}
            if is_last and not self.store.is_final:
                stay = [shard for shard in chunks if shard.store is not self.store]
                self._after_vote.update({shard: (chunks.pop(shard), factors) for shard in stay})
            for store in self.stores:
                if store.moves:
                    store.prefetch([each.chunk for shard in chunks if shard.store is store for each in chunks[shard]])
            return _update_together(domain, chunks, factors) if self.joins else chunks

        apart = relay.attempt(prepare) or {}
        for shard in launches:
            if early is not None and shard in ready:
                relay.attempt(early.take, domain, shard)
            if shard in self._unread and shard.exact_slice is not None:
                relay.attempt(shard.exact_slice.begin_update)
            if shard in apart:
                relay.attempt(update_chunks, domain, shard.store, apart[shard], factors)
            if is_last:
                self.send(shard)
        if not self.store.is_final:  # a disk makes room for other chunks only once all of these are written
            relay.attempt(self.flush)

    def finish(self, shard: Shard) -> None:
        """Makes what of a shard's update had to wait for the vote."""
        chunks, factors = self._after_vote.pop(shard, ((), self.factors))
        update_chunks(self.domain, shard.store, chunks, factors)

    def flush(self) -> None:
        """Waits until what was updated can be read again."""
        with self.domain.clock.phase("write back"):
            for store in self.stores:
                store.flush()

    def open_gather(self) -> None:
        """From now on shards travel to the other ranks, if there are any, as soon as they are updated."""
        domain, transport = self.domain, self.domain.transport
        if domain.overlaps_gather:
            self._gather = transport.async_gather(_GATHERING)
        elif transport.ranks.size > 1:
            self._gather = transport.gather(_GATHERING, domain.codes_updates)

    def send(self, shard: Shard) -> None:
        """Starts to send a shard whose params are updated."""
        if self._gather is not None and shard in self._updated and shard.gathered is None:
            with label("gather bucket", self._starts):
                self._gather.start(shard.window)
        self._starts += 1

    def finish_gather(self, relay: Relay) -> None:
        """Collective: waits until all have their shards, or leaves that to whoever reads them.

        Raises:
            Exception: this rank's error; CommunicationError on the other ranks.
        """
        domain, gather = self.domain, self._gather
        if gather is not None:
            domain.transport.traffic.params += gather.received
        if relay.problem is None and isinstance(gather, AsyncGather):
            arriving = [shard for shard in self.shards if shard in self._updated]
            if domain.overlap_gather(gather, arriving):
                return
        with domain.clock.phase("gather"):
            if gather is not None:  # else there is no other rank, or all know of an error
                relay.meet(riding_on(gather.finish))
        problem = relay.problem
        if problem is None:
            return
        if isinstance(problem, CommunicationError):
            raise CommunicationError(f"{problem} {_HALF_WAY}") from problem
        problem.add_note(_HALF_WAY)
        raise problem


def _upon(each: ChunkUpdate, update: torch.Tensor) -> ChunkUpdate:
    """Returns the update of a chunk that writes to ``update``, 1D [shard_numel], and to no param or master."""
    chunk = each.chunk
    names = tuple(name for name in chunk.names if name not in ("master", "param"))
    chunk = replace(chunk, names=names, param=None, written=())
    return each._replace(chunk=chunk, target=update[chunk.start : chunk.stop])


def update_chunks(domain: Domain, store: Store, chunks: Iterable[ChunkUpdate], factors: Factors) -> None:
    """Fetches each chunk from its store, updates it, and writes it back."""
    clock = domain.clock
    if not store.moves:  # what lies in memory takes no time of its own
        with clock.phase("update"):
            for each in chunks:
                update_chunk(each, store.fetch(each.chunk), factors)
        return
    for each in chunks:
        with clock.phase("fetch"):
            fetched = store.fetch(each.chunk)
        with clock.phase("update"), beside_a_gpu() if each.chunk.home.updates_on_host else nullcontext():
            update_chunk(each, fetched, factors)
        with clock.phase("write back"):
            store.write_back(each.chunk)


def update_chunk(each: ChunkUpdate, fetched: Fetched, factors: Factors) -> None:
    """Launches the updates of a fetched chunk."""
    for launch, gradients in zip(each.launches, each.tables(fetched), strict=True):
        _launch(launch, each, fetched, gradients, factors)


def _update_together(
    domain: Domain, chunks: Mapping[Shard, Sequence[ChunkUpdate]], factors: Factors
) -> Mapping[Shard, Sequence[ChunkUpdate]]:
    """Updates the shards that lie whole where they are updated, by as few launches as their backend takes.

    Those whose gradients lie elsewhere are not among them.

    Returns:
        The chunks of the other shards.
    """
    together = {
        shard: chunks[shard][0]
        for shard in chunks
        if shard.store.tier == "device"
        and backend_of(shard.home.device).joins_shards
        and len(chunks[shard]) == 1
        and not chunks[shard][0].chunk.gradients
    }
    if not together:
        return chunks
    fetched = {shard: shard.store.fetch(each.chunk) for shard, each in together.items()}
    launches = [launch for each in together.values() for launch in each.launches]
    with domain.clock.phase("update"):
        for each in joined([shard for shard in domain.shards if shard.store.tier == "device"], launches):
            one = each.one
            streams = {
                shard: _streams(one.spec, together[shard], fetched[shard])
                for shard, launch in zip(each.shards, each.launches, strict=True)
                if launch is not None
            }
            folded, totals = _folded(factors, one.divisor), each.new_totals()
            tables = Tables(each.gradients, each.scalars, folded, each.noise, each.products, totals, one.ties)
            backend_of(each.shards[0].device).run(one.spec, one.number, each.streams(streams), tables)
            each.hand_out(totals)
    return {shard: each for shard, each in chunks.items() if shard not in together}


def _launch(launch: Launch, each: ChunkUpdate, fetched: Fetched, gradients: Gradients, factors: Factors) -> None:
    start, streams = each.chunk.start, _streams(launch.spec, each, fetched)
    tables = Tables(
        gradients,
        launch.scalars,
        _folded(factors, launch.divisor),
        None if launch.noise is None else noise_from(launch.noise, start),
        None if launch.products is None else launch.products.part(start),
        launch.totals,
        launch.ties,
    )
    backend_of(streams.param.device).run(launch.spec, launch.number, streams, tables)


def _streams(spec: Spec, each: ChunkUpdate, fetched: Fetched) -> Streams:
    """Returns what a launch over one chunk reads and writes."""
    streams = dict(zip(each.chunk.names, fetched.streams, strict=True))
    param = each.target if each.target is not None else fetched.param
    states = tuple(map(streams.__getitem__, spec.names))
    scales = tuple(map(streams.get, map(scales_name, spec.names)))
    master = streams.get("master") if spec.has_master else None
    return Streams(streams["param"] if param is None else param, master, states, scales)


@lru_cache(maxsize=8)  # each launch of a step asks
def _folded(factors: Factors, divisor: int) -> Factors:
    folded = Factors(divisor, *factors[1:]).folded()
    assert folded is not None  # chunks_of() divided all others
    return folded
