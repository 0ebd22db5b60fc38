"""A unit of stage 3: the buckets that are gathered together, and what is known of them on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..partition.comm.group import as_bytes

if TYPE_CHECKING:
    from ..partition.bucket import Bucket
    from ..partition.comm.all_gather import AllGather, Window
    from ..partition.comm.holders import Holders
    from ..partition.comm.tags import GatherKind
    from ..partition.comm.transport import Transport
    from .secondary import SecondaryShard


@dataclass(frozen=True, eq=False)
class ParamShard:
    """This rank's slice of a bucket's params, in memory of its own or offloaded.

    Attributes:
        memory: 1D [shard_numel]; None if the slice is offloaded.
        read: copies the whole slice into a tensor.
        write: writes the whole slice.
    """

    memory: torch.Tensor | None
    read: Callable[[torch.Tensor], object]
    write: Callable[[torch.Tensor], object]


class UnitState(Enum):
    """State of a unit on this rank.

    ==========  =======  ==========
    from        event    to
    ==========  =======  ==========
    SHARDED     unshard  UNSHARDING
    UNSHARDING  unshard  UNSHARDING
    UNSHARDED   unshard  UNSHARDED
    UNSHARDING  wait     UNSHARDED
    UNSHARDED   wait     UNSHARDED
    UNSHARDING  reshard  SHARDED
    UNSHARDED   reshard  SHARDED
    SHARDED     reshard  SHARDED
    ==========  =======  ==========
    """

    SHARDED = "sharded"
    """Buckets have no memory. This rank's slices lie elsewhere."""

    UNSHARDING = "unsharding"
    """Buckets have memory, which other ranks or the backend may write to until the gather is waited for."""

    UNSHARDED = "unsharded"
    """Buckets hold whole values. Params may be read while the unit has users; else the guard sees a read."""


class Stay(Enum):
    """How a unit that no call uses stays until it is resharded by hand, or the next step."""

    NO = "no"
    """It may be resharded at any time."""

    GATHERED = "gathered"
    """The guard sees a read of its params."""

    SHOWN = "shown"
    """Its params may be read without a call."""


@dataclass(eq=False)
class GatheredBucket:
    """A bucket of a unit, and this rank's slice of it.

    Attributes:
        window: on the bucket's buffer; the ranks' own slices lie elsewhere.
        messages: the window that fills while the unit is gathered, where slices travel encoded; None: ``window`` does.
        secondary: this rank's part of what was gathered, for the next gather; None: there is none.
        parts: the window on the same memory that fills while other ranks' parts are gathered.
    """

    bucket: Bucket
    param_shard: ParamShard
    window: Window
    unit: Unit
    messages: Window | None = None
    secondary: SecondaryShard | None = None
    parts: Window | None = None

    @cached_property
    def own(self) -> torch.Tensor:
        """This rank's slice of the buffer, which is allocated when this is asked for first."""
        return self.window.shard(self.unit.transport.ranks.rank)

    def lies_in(self, flat: torch.Tensor) -> None:
        """Notes that the bucket's buffer is another one from now on."""
        self.window = replace(self.window, flat=flat)
        self.__dict__.pop("own", None)

    def encode(self) -> None:
        """Makes the message of this rank's slice, which is in its place in the bucket, to be gathered in its stead."""
        if self.window.code is not None and self.window.nbytes_received:
            self.messages = self.window.encoded(self.unit.transport.ranks.rank)

    def message(self, nbytes: int) -> torch.Tensor:
        """Returns this rank's slice as it travels, 1D uint8: encoded if that has so many bytes."""
        shard, code = torch.empty(self.window.shard_numel, dtype=self.window.flat.dtype), self.window.code
        self.param_shard.read(shard)
        return code.encode(shard) if code is not None and code.message_bytes == nbytes else as_bytes(shard)

    def put_part(self) -> None:
        """Puts this rank's part of what was gathered before in its place, to be gathered anew."""
        assert self.secondary is not None
        if self.window.code is not None:
            self.messages = self.window.for_messages()
        self.parts = self.secondary.window((self.messages or self.window).flat)

    def keep_part(self) -> None:
        """Keeps this rank's part of what was gathered; the current stream has waited for it."""
        if self.secondary is not None:
            self.secondary.keep((self.messages or self.window).flat, self.unit.display_name)

    def decode(self) -> None:
        """Fills the bucket with what was gathered; the current stream has waited for it."""
        messages, self.messages, self.parts = self.messages, None, None
        if messages is not None:
            self.window.decode(messages)


@dataclass(eq=False)
class Unit:
    """The buckets that are gathered together: one for each dtype and format.

    Attributes:
        name, number: of the unit in the model, see :mod:`shardopt.domain.model_units`.
        transport: between the ranks over which it is gathered; if any of their slices is offloaded, one by which no
            rank reads another's memory.
        is_spread: True if modules use it early and late in a pass. Without a schedule it stays between them.
        is_around: True if a module with params of it calls modules of other units.
        users: calls that run now and need it.
        stays: what becomes of it without users.
        outlives_backward: it stays gathered until the step, for backwards of other micro-batches follow.
        called: the name of the module that a script calls, with this unit in it. Each has passes of its own.
        all_gathers: that gather it, by what they are for; made for the first time.
        gathering: the all-gather that was started and not waited for.
        has_code: True if its slices travel encoded to what trains.
        is_coded: True if its buckets hold, or will hold, what quantizing left of the slices.
        holders: the ranks that keep parts of it; None: no rank does.
        held_at: the number of writes of its slices after which ranks kept parts of it; None: they kept none.
        keeps_at: the same of the gather that was started, if parts of it will be kept.
    """

    name: str
    number: int
    transport: Transport
    is_spread: bool
    is_around: bool
    buckets: list[GatheredBucket] = field(default_factory=list)
    state: UnitState = UnitState.SHARDED
    users: int = 0
    stays: Stay = Stay.NO
    outlives_backward: bool = False
    called: str = ""
    all_gathers: dict[GatherKind, AllGather] = field(default_factory=dict)
    gathering: AllGather | None = None
    has_code: bool = False
    is_coded: bool = False
    held_at: int | None = None
    keeps_at: int | None = None
    holders: Holders | None = None

    @cached_property
    def display_name(self) -> str:
        """The name for messages and profilers."""
        return self.name or "the params of the model itself"

    @cached_property
    def phase(self) -> str:
        """What a rank does that gathers it."""
        return f"gathering {self.display_name}"

    @property
    def nbytes(self) -> int:
        return sum(each.bucket.nbytes for each in self.buckets)

    @property
    def is_here(self) -> bool:
        """True if its buckets hold whole values."""
        return self.state is UnitState.UNSHARDED
