"""Domain: the params, shards and links of the ranks that share one set of shards.

A domain is the table of a data-parallel group. It leads from params to their records, to the shards that hold masters
and states, to the transports between the ranks, and to the store of masters and states. :mod:`shardopt.domain.bind`
fills it; a bound param never changes its place. Each fact that changes later has one method that changes it, see
:class:`Domain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..errors import BindingError, CommunicationError, RuleError
from ..offload.kept import Kept
from ..partition.comm.group import Ranks, Traffic
from ..partition.comm.transport import Transport
from ..partition.zero_stage import ZeroStage
from ..remote.epoch import Epoch
from ..tensors.edits import Edits
from .agreement import agreed
from .bucket_plan import MatrixStats, matrix_stats
from .listed import ListedParams
from .members import Members
from .overlapped_gather import OverlappedGather
from .param import named_params
from .param_names import name_of
from .remote_states import Fetch
from .tiers import for_updates, make_near_store, make_store, offloads_params
from .timings import Clock

if TYPE_CHECKING:
    from ..config import Options
    from ..offload.gradients import HostLanding
    from ..offload.store import ShardStorage, Store
    from ..partition.comm.async_gather import AsyncGather
    from ..partition.mesh import Mesh
    from ..partition.reducer import Reducer
    from ..remote.epoch import Moment
    from ..rules import Rule
    from ..tensors.inner_tensors import Inner
    from ..units.gatherer import Gatherer
    from .dtensors import DTensorLocals
    from .early import Early
    from .param import Candidate, Group, ParamRecord
    from .remote_states import RemoteStates
    from .shard import Shard
    from .sharded_params import ShardedParams
    from .timings import Timings
    from .turn import Turn


class ShowsExact(Protocol):
    """What shows params with their fp32 values, see :mod:`.exact_params`; a protocol, since that lies above."""

    def compute(self) -> None:
        """A forward or backward begins."""

    def rest(self) -> None:
        """Forward and backward have ended."""

    def end(self) -> None:
        """Collective: writes what was written."""


# Takes what is called once all params have arrived.
StartGather = Callable[[Callable[[], None]], "OverlappedGather"]


@dataclass(frozen=True)
class Links:
    """The connections between the ranks of a domain. All ranks make them together, once, at the first binding.

    Attributes:
        shards: between ranks that share one copy of the states.
        replicas: between ranks that hold the same slice, each of its own copy.
        reducer: None unless the module was handed over.
        landing: host memory for sums of gradients; None if they stay where they are reduced.
        sharded: the sharded params; None below stage 3.
        remote: the states of other ranks, for a rank that reads alone; None if there are none, or without a socket.
    """

    shards: Transport
    replicas: Transport
    reducer: Reducer | None
    landing: HostLanding | None
    sharded: ShardedParams | None
    remote: RemoteStates | None


class Domain:
    """The table from params to records, and the shards.

    Attributes:
        entries: the records, in the order of binding.
        shards: of params that train, in the order of binding.
        links: the connections between the ranks; None before anything is bound.
        reducer, landing, sharded, remote: those of the links; None before anything is bound.
        steps_agreed: the number of steps that all ranks agreed on.
        is_away: True if a call of ``offload()`` says where states are, and not the options.
        broken: why params and states of the ranks may belong to different steps; None if they do not.
        is_half_loaded: a load broke off, which another load can repair.
        counted_elsewhere: the params that are copies, whose elements the norm counts on another rank.
        slice_numbers: local param -> the number of its slice of a DTensor.
        cut_over: local param -> the ranks that hold the other slices, in each dimension of a mesh that it is cut along;
            of rules that look at whole params.
        overlapped_gather: the gather that the last step did not wait for.
        is_averaged: True while params show the average of the weights.

    ============================================  ==========================================
    what changes                                  by
    ============================================  ==========================================
    ``entries``, ``shards``, ``links``            :meth:`adopt`, by bind; :meth:`drop_left`; :meth:`release`
    ``store``, ``near``, the homes of the shards  :meth:`move_to`, :meth:`take_back`
    ``early``                                     made with the backward; :meth:`release`
    ``awaits_room``                               :func:`.staying.fill_device`
    ``is_away``                                   :func:`.relocate.move_states`
    ``steps_agreed``                              :meth:`count_step`
    ``epoch``, ``clock``, ``edits``               their own methods; :meth:`end_step`
    ``state_edits``                               writes to states; a load, and the agreement of a step, forget them
    ``broken``, ``is_half_loaded``                :meth:`mark_broken`, :meth:`mark_repaired`
    ``counted_elsewhere``, ``slice_numbers``      :meth:`note_slice`
    ``cut_over``                                  :meth:`note_slice`
    ``remote``                                    :meth:`retire`, :meth:`release`
    ``is_averaged``                               :func:`.averaged.averaged`
    ``overlapped_gather``                         :meth:`overlap_gather`, :meth:`finish_gather`
    ``members``, ``leader``                       :func:`.experts.set_members`
    what :meth:`listed` returns                   :meth:`adopt`, :meth:`drop_left`, :meth:`release`, :meth:`note_slice`,
                                                  other param groups
    histories of the records                      a step; a load, which counts ``epoch.revision``
    ============================================  ==========================================
    """

    def __init__(self, rule: Rule, options: Options, mesh: Mesh, locals_: DTensorLocals, turn: Turn):
        """
        Args:
            locals_: the plain tensors behind DTensor params. A domain knows params by these.
            turn: of the optimizer, which hooks on forward and backward hold.
        """
        self.rule = rule
        self.options = options
        self.mesh = mesh
        self.locals = locals_
        self.turn = turn
        self.epoch = Epoch()  # the moment of the states
        self.clock = Clock()
        self.edits = Edits()  # of reduced gradients in place, which the next step compares
        self.state_edits: Edits | None = None  # of states since the last step, by :meth:`number_of`
        self._use(None)
        self.shards: list[Shard] = []
        self.entries: dict[torch.nn.Parameter, ParamRecord] = {}  # by identity, which is how tensors hash
        self.inner: dict[torch.Tensor, Inner] = {}  # of quantized frozen params that are sharded
        self._store: Store | None = None  # opened at the first binding
        self.near: Store | None = None  # of shards whose states stay, beside a store that offloads the others
        self.kept = Kept()  # that stores leave to each other
        offload = options.offload_options
        # True until ``staying.fill_device`` has taken back what the device has room for.
        self.awaits_room = offload is not None and offload.fraction == "auto"
        self.is_away = False
        self.steps_agreed = 0
        self.broken: str | None = None
        self.is_half_loaded = False
        self.counted_elsewhere: set[torch.nn.Parameter] = set()
        self.slice_numbers: dict[torch.nn.Parameter, int] = {}
        self.cut_over: dict[torch.nn.Parameter, Sequence[Ranks]] = {}
        self._listed: ListedParams | None = None
        self.whole_contexts = 0  # how many ``unsharded()`` contexts are open, but for those of averages
        self.exact: ShowsExact | None = None  # in ``unsharded()`` with ``compute_dtype``
        self.early: Early | None = None  # where buckets are updated in backward for a step to come
        self.overlapped_gather: OverlappedGather | None = None
        self.is_averaged = False
        self._to_mates: dict[dist.ProcessGroup, Transport] = {}
        self.members = Members()  # of the module's params; all, unless experts have domains of their own
        self.leader: Domain | None = None  # the main domain, where experts share what gathers units with it
        # Puts hooks on the module and starts the gather, or returns False: the step must wait. Set by the takeover.
        self.on_overlap: Callable[[StartGather], bool] = lambda _: False
        # Keeps what scripts hold of the states of these params. Set by the table of the states.
        self.on_freed: Callable[[Sequence[torch.nn.Parameter]], object] = lambda _: None
        # True of a param whose loaded state is in parts. Set by the table of the states.
        self.waits_in_parts: Callable[[torch.nn.Parameter], bool] = lambda _: False

    # -- what is bound ---------------------------------------------------------------------------------------------

    def _use(self, links: Links | None) -> None:
        """Sets the links, with an attribute for each that steps and hooks look at."""
        self.links = links
        self.reducer = None if links is None else links.reducer
        self.landing = None if links is None else links.landing
        self.sharded = None if links is None else links.sharded
        self.remote = None if links is None else links.remote

    @property
    def shards_params(self) -> bool:
        """True if params are sharded: stage 3."""
        return ZeroStage(self.options.stage).shards_params

    def owner_of(self, inner: torch.Tensor) -> torch.nn.Parameter:
        """Returns the quantized param that an inner tensor is of; any other param itself."""
        found = self.inner.get(inner)
        return inner if found is None else found.owner  # type: ignore[return-value]

    @property
    def frozen_shards(self) -> Sequence[Shard]:
        """The shards of frozen params, at stage 3."""
        return () if self.sharded is None else self.sharded.frozen

    @property
    def transport(self) -> Transport:
        """The transport between the ranks that share one copy of the states, once anything is bound."""
        assert self.links is not None
        return self.links.shards

    def unbound(self, groups: Sequence[Group], listed: ListedParams | None = None) -> list[Candidate]:
        """Returns the params that are to be bound: those that train, or have a gradient, or a state in parts.

        What a frozen param has in parts, as a copy of the optimizer has it, other ranks find only once it is bound.

        Args:
            listed: those of the groups, where they were looked up.
        """
        entries, others = self.entries, (listed or self.listed(groups)).others
        needed = {param for param in others if _is_needed(param) or self.waits_in_parts(param)} if others else ()
        if not needed:
            return []  # nearly every step ends here, before names are made
        return [each for each in named_params(groups) if each[1] not in entries and each[1] in needed]

    def listed(self, groups: Sequence[Group]) -> ListedParams:
        """Returns the params of these groups with their records. They are looked up anew if the groups list others."""
        if self._listed is None or not self._listed.are_in(groups):
            self._listed = ListedParams(groups, self.entries, self.slice_numbers, self.shards)
        return self._listed

    @property
    def left(self) -> list[int]:
        """The numbers of the shards whose params have all left their groups, when these were last looked at.

        None where the module was handed over: it uses its params, whoever updates them.
        """
        return [] if self._listed is None or self.options.module is not None else self._listed.left

    def drop_left(self) -> None:
        """Frees what :attr:`left` numbers, the same on all ranks."""
        gone = [self.shards[number] for number in self.left]
        self.on_freed([param for shard in gone for param in shard.bucket.params])
        with self.epoch.loading():
            # New tables: threads that serve states may read the old ones.
            self.shards = [shard for shard in self.shards if shard not in gone]
            self.entries = {param: entry for param, entry in self.entries.items() if entry.shard not in gone}
            for shard in gone:
                shard.bucket.release(self._exact(shard) if shard.exact_slice is not None else None)
                shard.home.release()
                for param in shard.bucket.params:
                    self.counted_elsewhere.discard(param)
                    self.slice_numbers.pop(param, None)
                    self.cut_over.pop(param, None)
                    self.locals.forget(param)
            self._listed = None

    def adopt(self, links: Links, shards: Sequence[Shard], entries: Sequence[ParamRecord]) -> None:
        """Adds what all ranks have made to the table. Allocates nothing, so it cannot fail on one rank alone."""
        self._use(links)
        self._listed = None
        self.shards.extend(shards)
        self.entries.update((entry.param, entry) for entry in entries)

    def name_of(self, param: torch.Tensor) -> str | None:
        """Returns the user's name of a param; None unless the module was handed over."""
        return name_of(self.options.module, self.locals.outer_of(self.owner_of(param)))

    # -- facts of a training ---------------------------------------------------------------------------------------

    def number_of(self, entry: ParamRecord) -> int:
        """Returns the number of a record, the same on all ranks."""
        return self.shards.index(entry.shard) << 32 | entry.index

    def draw(self, entry: ParamRecord) -> str:
        """Returns the name of the next noise for a param: the same on all ranks that draw alike, and after a resume.

        Experts, and slices of DTensors, draw other noise than each other.
        """
        step, count = entry.drawn
        entry.drawn = entry.step, count + 1 if step == entry.step else 0
        seed, number = self.options.tuning.seed, self.slice_numbers.get(entry.param, 0)
        return f"{entry.drawn[1]} of step {entry.step} and {entry.name}, seed {seed}, slice {number}"

    def count_step(self) -> None:
        """Counts a step that all ranks agreed on, with what scripts had written before it."""
        self.steps_agreed += 1
        self.edits.clear()
        self.state_edits = None

    def mark_broken(self, why: str, by_load: bool = False) -> None:
        """Records that params and states of the ranks may belong to different steps from now on."""
        self.broken, self.is_half_loaded = why, by_load

    def mark_repaired(self) -> None:
        """Records that a load replaced all that a broken load had left."""
        if self.is_half_loaded:
            self.broken, self.is_half_loaded = None, False

    def note_slice(
        self, local: torch.nn.Parameter, is_counted_here: bool, number: int | None, cut_over: Sequence[Ranks] = ()
    ) -> None:
        """Records which slice of a DTensor a local param is (None: of none), and if the norm counts it on this rank.

        Args:
            cut_over: the ranks that hold the other slices; see the attribute.
        """
        if not is_counted_here:
            self.counted_elsewhere.add(local)
        if number is not None and self.slice_numbers.get(local) != number:
            self.slice_numbers[local], self._listed = number, None
        if cut_over:
            self.cut_over[local] = cut_over

    def by_mesh(self, entries: Iterable[ParamRecord]) -> dict[Ranks, list[ParamRecord]]:
        """Returns the ranks of each dimension of a tensor mesh, with the params that are cut along it.

        The ranks themselves have the same params in the same order.
        """
        found: dict[Ranks, list[ParamRecord]] = {}
        for entry in entries:
            for ranks in self.cut_over.get(entry.param, ()):
                found.setdefault(ranks, []).append(entry)
        return found

    def transport_to_mates(self, group: dist.ProcessGroup) -> Transport:
        """Collective at its first call: returns the transport to the ranks that hold other slices of matrices.

        Raises:
            BindingError: the mates are not those of the same number in their data-parallel groups; on all of them.
        """
        if group not in self._to_mates:
            tuning, shard = self.options.tuning, self.mesh.shard
            ranks = Ranks(group, tuning.deadline)
            found = ranks.exchange([shard.rank, shard.size], "comparing data-parallel groups of tensor mates")
            if any(each != found[0] for each in found):
                raise BindingError(
                    "take the groups of both dimensions from one DeviceMesh: ranks of a tensor mesh have the numbers "
                    f"{[rank for rank, _ in found]} in their data-parallel groups, of {[size for _, size in found]} "
                    "ranks. Slices of matrices could not be put together on one rank."
                )
            self._to_mates[group] = Transport.of(ranks, self.device, tuning.neighbours)
        return self._to_mates[group]

    # -- params under way ------------------------------------------------------------------------------------------

    @property
    def overlaps_gather(self) -> bool:
        """True if a step may return before its gather has ended; the same on all ranks."""
        return self.options.tuning.overlap_gather and self.sharded is None and self.transport.overlaps

    @property
    def codes_updates(self) -> bool:
        """True if updated params travel in 8 bits."""
        return self.options.gather_dtype is not None and not self.shards_params

    def overlap_gather(self, gather: AsyncGather, shards: Sequence[Shard]) -> bool:
        """Lets the params of these shards arrive while this rank goes on. Returns False if it must wait for them.

        What ``detach()`` or ``state_dict()`` returned before the step shows the same memory, and nothing guards it.
        """
        if self.slice_numbers or any(shard.bucket.is_viewed for shard in shards):
            return False

        def start(on_end: Callable[[], None]) -> OverlappedGather:
            gather.send_status(failed=False)
            self.overlapped_gather = OverlappedGather(gather, shards, self.clock, self.mark_broken, on_end)
            return self.overlapped_gather

        return self.on_overlap(start)

    def finish_gather(self) -> None:
        """Waits until all params have arrived.

        Raises:
            CommunicationError: a rank failed, died or is late.
        """
        if self.overlapped_gather is not None:
            self.overlapped_gather.finish()
            self.overlapped_gather = None

    # -- the store of states ---------------------------------------------------------------------------------------

    @property
    def stored_shards(self) -> list[Shard]:
        """The shards whose homes belong to the store: all, but for those of frozen params that are not offloaded."""
        return [*self.shards, *(self.frozen_shards if self.offloads_params(self.device) else ())]

    def offloads_params(self, device: torch.device) -> bool:
        """True if slices of sharded params are offloaded together with masters and states."""
        return offloads_params(self.options.offload_options, device)

    def message_of(self, window: int, nbytes: int) -> torch.Tensor | None:
        """See :meth:`.sharded_params.ShardedParams.message_of`."""
        return None if self.sharded is None else self.sharded.message_of(window, nbytes)

    @property
    def gatherer(self) -> Gatherer:
        assert self.sharded is not None
        return self.sharded.gatherer

    @property
    def device(self) -> torch.device:
        """The device of all bound params; the CPU before there are any."""
        return self.shards[0].device if self.shards else torch.device("cpu")

    @property
    def store(self) -> Store:
        """The store of masters and states, opened if it is not yet.

        Raises:
            OffloadError: it cannot be opened.
        """
        return self.store_for(self.device) if self._store is None else self._store

    @property
    def stores(self) -> list[Store]:
        """``store``, and the store of shards whose states stay on the device."""
        store = self.store_for(self.device) if self._store is None else self._store
        return [store] if self.near is None else [store, self.near]

    def store_for(self, device: torch.device, stays: bool = False) -> Store:
        """Returns ``store``, or ``near`` for states that stay; params of this device may be the first to be bound."""
        offload = self.options.offload_options
        if self._store is None:
            rests = for_updates(offload, device, self.options.release_gradients)
            self._store = make_store(rests, self.options.tuning, device, self.kept)
        if stays and self.near is None:
            assert offload is not None
            self.near = make_near_store(offload, device, self._store)
        return self.near if stays and self.near is not None else self._store

    def move_to(
        self, store: Store, near: Store | None, homes: Sequence[ShardStorage]
    ) -> tuple[Store, list[ShardStorage]]:
        """Sets the stores, and the homes of the stored shards. Returns the store and the homes from before."""
        if self.early is not None:
            self.early.free()
        before, self._store, self.near = self.store, store, near
        homes_before = [shard.home for shard in self.stored_shards]
        for shard, home in zip(self.stored_shards, homes, strict=True):
            shard.home, shard.store = home, near if shard.stays and near is not None else store
        return before, homes_before

    def take_back(self, shards: Sequence[Shard], homes: Sequence[ShardStorage]) -> list[ShardStorage]:
        """Lets the states of these shards stay on the device from now on. Returns their homes from before."""
        assert self.near is not None
        before = [shard.home for shard in shards]
        for shard, home in zip(shards, homes, strict=True):
            shard.home, shard.store, shard.stays = home, self.near, True
        return before

    def stop_serving(self) -> None:
        """Other ranks cannot read this one's slices any more, once none does."""
        if self.remote is not None:
            self.remote.close()

    def release(self) -> None:
        """Gives every param storage of its own, and forgets the states."""
        links = self.links
        self._end_early()
        self.stop_serving()
        if links is not None and links.sharded is not None:
            links.sharded.give_back()
        for shard in self.shards:
            is_exact = shard.exact_slice is None and not shard.is_cast
            shard.bucket.release(None if is_exact else self._exact(shard))
        if self._store is not None:
            self._store.close()
        self.kept.free_spare()
        if links is not None and links.landing is not None:
            links.landing.close()
        if links is not None:  # its transports stay: a state dict taken before may still be read
            self._use(replace(links, reducer=None, landing=None, sharded=None, remote=None))
        self._store, self.near, self.shards, self.entries, self._listed = None, None, [], {}, None

    def _end_early(self) -> None:
        if self.early is not None:
            self.early.free()
            self.early = None  # it refers to slices of gradients, which would keep this domain alive

    def _exact(self, shard: Shard) -> torch.Tensor | None:
        """Collective: returns the exact values of a bucket that holds rounded ones; None once another rank is gone."""
        with suppress(CommunicationError):
            return self.gather(shard, shard.exact)
        return None

    @contextmanager
    def shown_whole(self) -> Iterator[None]:
        """A context of ``unsharded()``: state dicts of the module hold whole tensors."""
        self.whole_contexts += 1
        try:
            yield
        finally:
            self.whole_contexts -= 1

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A context: writes to the store inside take effect together, or not at all after an error."""
        stores = self.stores
        try:
            for store in stores:
                store.begin()
            yield
            for store in stores:
                store.flush()
        except BaseException:
            for store in stores:
                store.roll_back()
            raise
        for store in stores:
            store.commit()

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has received from others, by kind."""
        counted = [] if self.links is None else [self.links.shards.traffic, self.links.replicas.traffic]
        if self.sharded is not None and all(self.sharded.transport.traffic is not each for each in counted):
            counted.append(self.sharded.transport.traffic)  # offloaded slices have a transport of their own
        counted += [each.traffic for each in self._to_mates.values()]
        return {kind.name: sum(getattr(each, kind.name) for each in counted) for kind in fields(Traffic)}

    def matrix_stats(self, groups: Sequence[Group]) -> MatrixStats:
        """Counts the matrices of a rule of whole matrices, DTensors excepted; none at stage 0."""
        found = MatrixStats()
        if self.mesh.shard.size == 1:
            return found
        group_of = {self.locals.of(param): group for group in groups for param in group["params"]}
        for bucket in (shard.bucket for shard in self.shards):
            if bucket.outers == bucket.params and all(param in group_of for param in bucket.params):
                members = [("", param, group_of[param]) for param in bucket.params]
                with suppress(ValueError, RuleError):  # of a group that was written to: the next step says so
                    found += matrix_stats(self.rule, members, bucket.layout)
        return found

    def timings(self) -> Timings:
        rank = dist.get_rank() if dist.is_initialized() else 0  # of the whole training: traces are shown together
        notes = [self._store.note or ""] if self._store is not None else []
        notes += [str(self.early)] if self.early is not None else []
        return self.clock.read(rank, "\n".join(filter(None, notes)) or None)

    def end_step(self) -> None:
        """Marks the end of a step on this rank."""
        self.clock.end_step()
        if self.remote is not None:
            self.remote.end_step()
        self.epoch.end_step()
        if self.early is not None:
            self.early.end_step()

    def retire(self) -> None:
        """Ends this rank's reading: the optimizer is gone. Other ranks may still read its states."""
        self._end_early()
        with suppress(CommunicationError):  # raised where a param is read
            self.finish_gather()
        if self.links is not None and self.remote is not None:
            self.remote.retire()
            self._use(replace(self.links, remote=None))  # which refers to this domain, and would keep it alive

    # -- what other ranks hold -------------------------------------------------------------------------------------

    def fetcher(
        self, shard: Shard, index: int, name: str, moment: Moment | None = None
    ) -> Callable[[], torch.Tensor] | None:
        """Returns what reads a whole state (or "param"), by default as of now; None if other ranks cannot be read."""
        if self.mesh.shard.size == 1:
            return partial(_own, shard, index, name)
        if self.remote is None:
            return None
        now = self.epoch.now(name, (shard, index)) if moment is None else moment
        return Fetch(self.remote, shard, index, name, now)

    def gather(self, shard: Shard, name: str) -> torch.Tensor:
        """Collective: returns state ``name`` (or "master") of every rank's shard, 1D, as long as the bucket.

        Raises:
            OffloadError: a rank could not read its own shard; raised on all ranks.
        """
        return self.gather_slices(shard, self.read_together(shard, name, self.mesh.shard), name)

    def read_together(self, shard: Shard, name: str, ranks: Ranks) -> torch.Tensor:
        """Collective: returns a state of this rank's whole shard, once every rank could read its own."""
        with nullcontext() if self.store.is_final else agreed("read", ranks):
            return shard.whole(name)

    def gather_slices(self, shard: Shard, own: torch.Tensor, name: str) -> torch.Tensor:
        """Collective: returns the ``own`` of all ranks, each its slice of one bucket: 1D, as long as the bucket."""
        layout, device = shard.bucket.layout, shard.device
        flat = torch.empty(layout.numel, dtype=own.dtype, device=device)
        flat[layout.shard_slice(self.mesh.shard.rank)] = own
        transport = self.transport
        gather = transport.gather(f"gathering {name}")
        gather.start(transport.open(flat, layout.shard_numel))
        gather.finish()
        transport.traffic.states += gather.received
        return flat


def _own(shard: Shard, index: int, name: str) -> torch.Tensor:
    """Returns a copy of a state (or "param") that this rank holds whole, in host memory."""
    where = shard.slice_of(index).local
    values = shard.read_chunk(name, where.start, where.stop).cpu().clone()
    return values.as_strided(shard.bucket.params[index].size(), shard.strides(index))


def _is_needed(param: torch.nn.Parameter) -> bool:
    return param.requires_grad or param.grad is not None
