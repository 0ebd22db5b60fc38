"""All-gather: moves final shards to every rank. One mechanism for each kind of connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ...errors import DisagreementError
from ..streams import last_used
from . import collectives
from .group import Pending, as_bytes
from .tags import FIRST_TAG, GatherKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .group import Ranks
    from .peer_memory import PeerMemory

CAST_NUMEL = 1 << 16  # elements of another dtype that are read at a time: they stay in the cache until they are cast


class ShardCode(Protocol):
    """The form in which the shards of one window travel, where they do not travel as they are."""

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one shard."""

    def encode(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the message of this rank's shard: 1D uint8. Params that lie apart are shown as it has them."""

    def decode(self, flat: torch.Tensor, messages: torch.Tensor) -> None:
        """Fills all shards with what their messages hold; all ranks then have the same values, of their own too."""


class Members(Protocol):
    """Ranks that gather from each other: all of a group, or some."""

    size: int
    rank: int  # this one's number among them

    def exchange_slices(
        self, own: Sequence[torch.Tensor], others: Sequence[torch.Tensor], tag: int, phase: str
    ) -> Pending: ...

    def wait(self, pending: Pending, limit: timedelta | None = None) -> None: ...


@dataclass(frozen=True)
class Window:
    """A buffer of which every rank owns one shard, and the addresses of the other ranks' buffers."""

    flat: torch.Tensor  # 1D [size * shard_numel]
    shard_numel: int
    number: int  # unique among windows; the same on all ranks
    # By rank: process number, address of its buffer; empty if ranks do not read each other's memory.
    peers: tuple[tuple[int, int], ...] = ()
    kept: torch.dtype | None = None  # of the shards as they lie in the peers' memory; None: as they travel, flat's
    code: ShardCode | None = None  # the form in which shards may travel; None: as they are

    def shard(self, rank: int) -> torch.Tensor:
        return self.flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    @cached_property
    def shards(self) -> Sequence[torch.Tensor]:
        """The shards of all ranks, for those that gather the window often."""
        shards: Sequence[torch.Tensor] = self.flat.split(self.shard_numel)
        return shards

    @cached_property
    def bytes(self) -> torch.Tensor:
        """The bytes of the buffer, for backends that gather it often."""
        return as_bytes(self.flat)

    def for_messages(self) -> Window:
        """Returns the window of messages, which hold anything."""
        assert self.code is not None
        nbytes = self.code.message_bytes
        messages = torch.empty(
            self.flat.numel() // self.shard_numel * nbytes, dtype=torch.uint8, device=self.flat.device
        )
        return Window(messages, nbytes, self.number)

    def encoded(self, rank: int) -> Window:
        """Returns the window of messages, in which this rank's shard has its place, as :attr:`code` encodes it."""
        assert self.code is not None
        found = self.for_messages()
        found.shard(rank).copy_(self.code.encode(self.shard(rank)))
        return found

    def decode(self, messages: Window) -> None:
        """Fills every shard with what its message holds; the current stream has waited for the messages."""
        assert self.code is not None
        self.code.decode(self.flat, messages.flat)
        last_used(messages.flat)  # the gather may have been started on another stream

    @cached_property
    def nbytes_received(self) -> int:
        return (self.flat.numel() - self.shard_numel) * (self.kept or self.flat.dtype).itemsize


class AllGather:
    """Moves final shards into windows, whose own shard is in place; one of the functions below makes it.

    Attributes:
        reads_memory: True if other ranks read our shard during their ``finish``: it must be final before, and stay
            until all of them are done.
        ends: by number of each started window, the call that ends with every rank's shard in it.
        go_on: is called once windows are started, if this rank computes before it waits for them; None: need not be.
    """

    def __init__(
        self,
        begin: Callable[[Window], Callable[[], None]],
        reads_memory: bool = False,
        go_on: Callable[[], None] | None = None,
    ):
        """``begin`` begins to fill a window, and returns the call that ends with every rank's shard in the window."""
        self._begin, self.reads_memory, self.go_on = begin, reads_memory, go_on
        self.ends: dict[int, Callable[[], None]] = {}

    def start(self, window: Window) -> None:
        if window.nbytes_received:  # not on one rank, which owns everything
            self.ends[window.number] = self._begin(window)

    def start_encoded(self, window: Window, rank: int) -> int:
        """Like ``start``, but shards travel as the window's code has them. Returns the bytes that will arrive."""
        messages = window.encoded(rank)
        end = self._begin(messages)

        def arrive() -> None:
            end()
            window.decode(messages)

        self.ends[window.number] = arrive
        return messages.nbytes_received

    def start_all(self, windows: Sequence[Window]) -> int:
        """Starts all of these windows; this rank may compute before it waits. Returns the bytes that they receive."""
        nbytes = 0
        for each in windows:
            if each.nbytes_received:
                self.start(each)
                nbytes += each.nbytes_received
        if self.go_on is not None:
            self.go_on()
        return nbytes

    def finish(self) -> None:
        """Waits until every started window holds every rank's shard. The next gather may begin then.

        Raises:
            CommunicationError: a rank died or is late.
            DisagreementError: ranks run apart; all has arrived, and may hold anything.
        """
        ends, self.ends = self.ends, {}
        apart: DisagreementError | None = None
        for end in ends.values():
            try:
                end()
            except DisagreementError as error:  # ranks complete the rest as well: memory is freed once it has arrived
                apart = error
        if apart is not None:
            raise apart


def by_messages(ranks: Members, phase: str, limit: timedelta | None = None) -> AllGather:
    """Sends shards straight to every rank, while this rank computes.

    Message tags name the window: ranks may start windows in different orders. ``limit``: see :meth:`Ranks.wait`.
    """

    def begin(window: Window) -> Callable[[], None]:
        shards = [window.shard(rank) for rank in range(ranks.size)]
        own = [shards[ranks.rank]] * ranks.size
        return partial(ranks.wait, ranks.exchange_slices(own, shards, FIRST_TAG + window.number, phase), limit)

    return AllGather(begin)


def by_asking(ranks: Ranks, phase: str, limit: timedelta | None, kind: GatherKind) -> AllGather:
    """Like :func:`by_messages`; ranks that do not run it are found, and complete it."""

    def begin(window: Window) -> Callable[[], None]:
        shards = [window.shard(rank) for rank in range(ranks.size)]
        own = [shards[ranks.rank]] * ranks.size
        pending = ranks.exchange_slices(own, shards, kind.tag_of(window.number), phase)
        return partial(ranks.wait, ranks.asking(pending, own[0].nbytes, kind is GatherKind.ON_DEMAND), limit)

    return AllGather(begin)


def by_reading(ranks: Members, memory: PeerMemory, before: Callable[[Window], None] = lambda _: None) -> AllGather:
    """Reads every other rank's shard from its memory, once ``before`` has returned."""

    def end(window: Window) -> None:
        before(window)
        # Every rank starts with another peer, so that not all ranks read one memory at a time.
        for step in range(1, ranks.size):
            owner = (ranks.rank + step) % ranks.size
            pid, base = window.peers[owner]
            target, kept = window.shards[owner], window.kept
            assert kept is not None
            address = base + owner * window.shard_numel * kept.itemsize
            if kept is target.dtype:
                memory.read(pid, address, target)
            else:
                read_and_cast(pid, address, target, kept)

    def read_and_cast(pid: int, address: int, target: torch.Tensor, kept: torch.dtype) -> None:
        piece = torch.empty(min(CAST_NUMEL, target.numel()), dtype=kept)
        for start in range(0, target.numel(), CAST_NUMEL):
            into = target[start : start + CAST_NUMEL]
            memory.read(pid, address + start * kept.itemsize, piece[: into.numel()])
            into.copy_(piece[: into.numel()])

    return AllGather(lambda window: partial(end, window), reads_memory=True)


def by_collectives(ranks: Ranks, phase: str) -> AllGather:
    """The backend's all-gather. NCCL runs it on its own stream; ``finish`` makes the current stream wait for it."""

    def begin(window: Window) -> Callable[[], None]:
        nbytes = window.bytes.numel() // ranks.size
        own = window.bytes.narrow(0, ranks.rank * nbytes, nbytes)
        assert ranks.group is not None
        work = collectives.all_gather(window.bytes, own, group=ranks.group)
        return partial(ranks.wait_on_stream, Pending(phase, (work,)))

    return AllGather(begin)


def by_batches(ranks: Ranks, members: Sequence[int], phase: str) -> AllGather:
    """Sends shards straight to some ranks of a group, as one operation of its backend. Waits as collectives do."""

    def begin(window: Window) -> Callable[[], None]:
        own = window.shard(members.index(ranks.rank))
        tag = FIRST_TAG + window.number
        ops = []
        with ranks.naming(phase):
            for number, peer in enumerate(members):
                if peer != ranks.rank:
                    shard = window.shard(number)
                    ops.append(dist.P2POp(dist.irecv, shard, group=ranks.group, tag=tag, group_peer=peer))
                    ops.append(dist.P2POp(dist.isend, own, group=ranks.group, tag=tag, group_peer=peer))
            works = tuple(dist.batch_isend_irecv(ops))
        return partial(ranks.wait_on_stream, Pending(phase, works))

    return AllGather(begin)
