"""Domain: what lies on the ranks that share one set of shards.

It is the table of a data-parallel group: from params to entries, the shards that hold their masters and states, what
carries these between the ranks, and the store that they rest in. :mod:`shardopt.domain.bind` fills it: what is bound
never changes its place. What does change later changes through one method each, named in :class:`Domain`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..config import Options
from ..errors import OffloadError
from ..offload.gradients import HostLanding
from ..offload.store import ShardStorage, Store
from ..partition.comm.group import Ranks
from ..partition.comm.transport import Transport
from ..partition.gatherer import Gatherer
from ..partition.mesh import Mesh
from ..partition.reducer import Reducer
from ..rules import Rule
from .agreement import StepDigest, agree
from .epoch import Epoch, Moment
from .param import Candidate, Group, ParamRecord, named_params
from .param_names import name_of
from .remote_states import RemoteStates
from .shard import Shard
from .sharded_params import ShardedParams
from .tiers import make_store, offloads_params
from .timings import Clock, Timings


@dataclass(frozen=True)
class Links:
    """What joins the ranks of a domain: made once, by all of them together, when its first params are bound.

    Attributes:
        shards: between ranks that share one copy of the states.
        replicas: between ranks that hold the same slice, of a copy each.
        reducer: where the module was handed over.
        landing: where sums of gradients rest, if not where they are reduced.
        sharded: at stage 3.
        remote: the states of other ranks, for a rank that reads alone; None if there are none, or without a socket.
    """

    shards: Transport
    replicas: Transport
    reducer: Reducer | None
    landing: HostLanding | None
    sharded: ShardedParams | None
    remote: RemoteStates | None


class Domain:
    """The table from params to entries, and the shards.

    ============================================  ==========================================
    what changes                                  through
    ============================================  ==========================================
    ``entries``, ``shards``, ``links``            :meth:`adopt`, by bind; :meth:`release`
    ``store``, and the homes of the shards        :meth:`rest_in`
    ``rounds``                                    :meth:`count_round`
    ``epoch``, ``clock``                          their own methods; :meth:`end_step`
    ``broken``, ``is_half_loaded``                :meth:`break_off`, :meth:`make_good`
    ``counted_elsewhere``, ``slice_numbers``      :meth:`note_slice`
    ``remote``                                   :meth:`retire`, :meth:`release`
    ============================================  ==========================================
    """

    def __init__(self, rule: Rule, options: Options, mesh: Mesh):
        self.rule = rule
        self.options = options
        self.mesh = mesh
        self.epoch = Epoch()  # which states these are
        self.clock = Clock()
        self._links: Links | None = None
        self._shards: list[Shard] = []
        self._entries: dict[torch.nn.Parameter, ParamRecord] = {}  # by identity: that is how tensors hash
        self._store: Store | None = None  # opened at the first binding: until then nothing rests anywhere
        self._rounds = 0
        self._broken: str | None = None
        self._is_half_loaded = False
        self._counted_elsewhere: set[torch.nn.Parameter] = set()
        self._slice_numbers: dict[torch.nn.Parameter, int] = {}

    # -- what is bound ---------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Mapping[torch.nn.Parameter, ParamRecord]:
        """In the order of binding."""
        return self._entries

    @property
    def shards(self) -> Sequence[Shard]:
        """Of params that train, in the order of binding; those of frozen ones are in ``sharded``."""
        return self._shards

    @property
    def links(self) -> Links | None:
        """None before anything is bound."""
        return self._links

    @property
    def transport(self) -> Transport:
        """Between the ranks that share one copy of the states, once anything is bound."""
        assert self._links is not None
        return self._links.shards

    @property
    def reducer(self) -> Reducer | None:
        """Where the module was handed over, once anything is bound."""
        return None if self._links is None else self._links.reducer

    @property
    def landing(self) -> HostLanding | None:
        """Where sums of gradients rest, if not where they are reduced."""
        return None if self._links is None else self._links.landing

    @property
    def sharded(self) -> ShardedParams | None:
        """At stage 3, once anything is bound."""
        return None if self._links is None else self._links.sharded

    @property
    def remote(self) -> RemoteStates | None:
        """For ranks that read states alone, once anything is bound."""
        return None if self._links is None else self._links.remote

    def unbound(self, groups: Sequence[Group]) -> list[Candidate]:
        """Params that a step needs and that are not bound: trainable, or with a gradient all the same."""
        entries = self._entries
        if all(param in entries or not _is_needed(param) for group in groups for param in group["params"]):
            return []  # as in nearly every step: no names are made for it
        return [
            (name, param, group)
            for name, param, group in named_params(groups)
            if param not in entries and _is_needed(param)
        ]

    def adopt(self, links: Links, shards: Sequence[Shard], entries: Sequence[ParamRecord]) -> None:
        """What all ranks have made becomes part of the table. Allocates nothing."""
        self._links = links
        self._shards.extend(shards)
        self._entries.update((entry.param, entry) for entry in entries)

    def name_of(self, param: torch.Tensor) -> str | None:
        """What the user calls a param, where the module was handed over."""
        return name_of(self.options.module, param)

    # -- facts of a training ---------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Steps that all ranks agreed on."""
        return self._rounds

    def count_round(self) -> None:
        """All ranks agreed on a step."""
        self._rounds += 1

    @property
    def broken(self) -> str | None:
        """Why params and states of the ranks may belong to different steps."""
        return self._broken

    @property
    def is_half_loaded(self) -> bool:
        """Whether that is because of a load, which another one can make good."""
        return self._is_half_loaded

    def break_off(self, why: str, by_load: bool = False) -> None:
        """Params and states of the ranks may belong to different steps from now on."""
        self._broken, self._is_half_loaded = why, by_load

    def make_good(self) -> None:
        """All that a load left half-way was replaced."""
        if self._is_half_loaded:
            self._broken, self._is_half_loaded = None, False

    @property
    def counted_elsewhere(self) -> AbstractSet[torch.nn.Parameter]:
        """Copies whose elements another rank's norm counts."""
        return self._counted_elsewhere

    @property
    def slice_numbers(self) -> Mapping[torch.nn.Parameter, int]:
        """Of the slice of a DTensor in a local param."""
        return self._slice_numbers

    def note_slice(self, local: torch.nn.Parameter, is_counted_here: bool, number: int | None) -> None:
        """Which slice of a DTensor a local param is (None: of none), and whether this rank's norm counts it."""
        if not is_counted_here:
            self._counted_elsewhere.add(local)
        if number is not None:
            self._slice_numbers[local] = number

    # -- where states rest -----------------------------------------------------------------------------------------

    @property
    def resting(self) -> list[Shard]:
        """The shards whose homes are the store's."""
        frozen = self.sharded.frozen if self.sharded is not None and self.params_rest(self.device) else ()
        return [*self._shards, *frozen]

    def params_rest(self, device: torch.device) -> bool:
        """Whether slices of sharded params rest where masters and states do."""
        return offloads_params(self.options.rests, device)

    @property
    def gatherer(self) -> Gatherer:
        assert self.sharded is not None
        return self.sharded.gatherer

    @property
    def is_averaged(self) -> bool:
        """Whether params show the average of the weights at this moment."""
        return any(shard.saved_weights is not None for shard in self._shards)

    @property
    def device(self) -> torch.device:
        """Of all bound params; the CPU before there are any."""
        return self._shards[0].device if self._shards else torch.device("cpu")

    @property
    def store(self) -> Store:
        """Where masters and states rest.

        Raises:
            OffloadError: it was not opened yet, and cannot be.
        """
        return self.store_for(self.device)

    def store_for(self, device: torch.device) -> Store:
        """As ``store``, for params of this device, which may be the first to be bound."""
        if self._store is None:
            self._store = make_store(self.options.rests, self.options.tuning, device)
        return self._store

    def rest_in(self, store: Store, homes: Sequence[ShardStorage]) -> tuple[Store, list[ShardStorage]]:
        """From now on masters and states of the shards lie in these homes. Returns what they lay in before."""
        before, self._store = self.store, store
        left = [shard.home for shard in self.resting]
        for shard, home in zip(self.resting, homes, strict=True):
            shard.home = home
        return before, left

    def release(self) -> None:
        """Gives every param storage of its own and forgets the states."""
        links = self._links
        if links is not None and links.remote is not None:
            links.remote.close()
        if links is not None and links.sharded is not None:
            links.sharded.give_back()
        for shard in self._shards:
            shard.bucket.release()
        if self._store is not None:
            self._store.close()
        if links is not None and links.landing is not None:
            links.landing.close()
        if links is not None:  # by its transports what was shown of states may be read yet
            self._links = replace(links, reducer=None, landing=None, sharded=None, remote=None)
        self._store, self._shards, self._entries = None, [], {}

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is written to the store inside holds if all of it could be written."""
        try:
            self.store.begin()
            yield
            self.store.flush()
        except BaseException:
            self.store.roll_back()
            raise
        self.store.commit()

    def timings(self) -> Timings:
        return self.clock.read(None if self._store is None else self._store.note)

    def end_step(self) -> None:
        """This rank has come to the end of a step."""
        self.clock.end_step()
        if self.remote is not None:
            self.remote.end_step()
        self.epoch.end_step()

    def retire(self) -> None:
        """The optimizer is gone; other ranks may still read."""
        if self._links is not None and self._links.remote is not None:
            self._links.remote.retire()
            self._links = replace(self._links, remote=None)  # which refers to this

    # -- what other ranks hold -------------------------------------------------------------------------------------

    def fetcher(
        self, shard: Shard, index: int, name: str, moment: Moment | None = None
    ) -> Callable[[], torch.Tensor] | None:
        """See :meth:`RemoteStates.fetcher`; by default as it is now. None where nothing can be asked for."""
        if self.mesh.shard.size == 1:
            return partial(_own, shard, index, name)
        if self.remote is None:
            return None
        return self.remote.fetcher(shard, index, name, self.epoch.now(name) if moment is None else moment)

    def gather(self, shard: Shard, name: str) -> torch.Tensor:
        """Collective: state ``name`` (or "master") of every rank's shard, 1D, as long as the bucket.

        Raises:
            OffloadError: a rank could not read its own; on all of them.
        """
        return self.gather_slices(shard, self.read_together(shard, name, self.mesh.shard), name)

    def read_together(self, shard: Shard, name: str, ranks: Ranks) -> torch.Tensor:
        """Collective: the whole of a state of this rank's shard, if each of the ranks could read its own."""
        own, problem = torch.empty(0), None
        try:
            own = shard.whole(name)
        except OffloadError as error:
            problem = error
        if not self.store.is_final:
            agree(StepDigest("read", dict, problem), ranks, self.device)
        return own

    def gather_slices(self, shard: Shard, own: torch.Tensor, name: str) -> torch.Tensor:
        """Collective: what every rank holds as ``own`` for its slice of one bucket, 1D, as long as the bucket."""
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
    """A state (or "param") of which this rank holds all, in host memory."""
    where = shard.slice_of(index).local
    values = shard.read_chunk(name, where.start, where.stop).cpu().clone()
    return values.as_strided(shard.bucket.params[index].size(), shard.strides(index))


def _is_needed(param: torch.nn.Parameter) -> bool:
    return param.requires_grad or param.grad is not None
