"""The connections between ranks: mechanisms for reducing and gathering, chosen once, the same on all ranks.

========================  ==================================================================================
tensors, group            gathering; reducing
========================  ==================================================================================
one rank                  nothing; :class:`NoReduceScatter`
NCCL, or any but gloo     :func:`by_collectives`, in place; :class:`CollectiveReduceScatter`
CPU, ranks of one machine :func:`by_reading` each other's memory; :class:`PeerReduceScatter`
CPU, gloo                 :func:`by_messages`; :class:`P2PReduceScatter`: straight to every rank (4x faster
                          than gloo's all-gather; its reduce-scatter is slower than its all-reduce)
CPU, gloo, several hosts  :func:`by_hosts`; :class:`HostReduceScatter`: if that is asked for
CUDA, gloo                refused: it has neither collectives nor messages for tensors of a GPU
========================  ==================================================================================

An :class:`AllGather` moves shards that are already final (stage 3 gathers params so). A :class:`Gather` follows an
update: every rank first waits until the other ranks' shards are written, and last until no rank reads its own. A
:class:`.async_gather.AsyncGather` follows an update too, and its caller goes on meanwhile.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ...errors import BindingError
from . import all_to_all
from .all_gather import Window, by_asking, by_collectives, by_messages, by_reading
from .async_gather import AsyncGather
from .group import Traffic
from .notes import note_of
from .peer_board import PeerBoard
from .peer_memory import PeerMemory
from .reduce_scatter import NoReduceScatter
from .reduce_scatter_collective import CodedReduceScatter, CollectiveReduceScatter
from .reduce_scatter_p2p import P2PReduceScatter
from .reduce_scatter_peer import PeerReduceScatter
from .tags import FIRST_TAG, WINDOWS, GatherKind
from .together import riding_on, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .all_gather import AllGather
    from .all_to_all import AllToAll
    from .group import Ranks
    from .holders import Holders
    from .hosts import Hosts
    from .reduce_scatter import ReduceScatter


class _Transports:
    """How many transports a group has had."""

    count = 0


class Transport:
    """Opens windows and chooses mechanisms for one group of ranks."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        memory: PeerMemory | None = None,
        cards: tuple[tuple[int, ...], ...] = (),
        reach: Sequence[Sequence[int]] = (),
        hosts: Hosts | None = None,
    ):
        """
        Args:
            memory: reads the other ranks' memory, if all ranks can.
            cards: of all ranks, if some can.
            reach: by rank: 1 for each rank whose memory it can read.
            hosts: if reductions and gathers go by host.
        """
        self._hosts = hosts
        self.ranks, self._device, self._reach = ranks, device, reach
        self._memory, self._cards = memory, cards
        self._number = 0
        if ranks.group is not None:
            transports = note_of(ranks.group, _Transports)
            self._number, transports.count = transports.count, transports.count + 1
        self._first = self._opened = self._number % 512 * WINDOWS  # the number of no window
        self.traffic = Traffic()
        self._all_to_all: AllToAll | None = None

    @staticmethod
    def of(ranks: Ranks, device: torch.device, use_neighbours: bool, by_host: bool = False) -> Transport:
        """Collective: finds out whether the ranks can read each other's memory.

        Args:
            by_host: True if what crosses between hosts is to cross once, where several have several ranks.

        Raises:
            BindingError: the group has no backend that carries tensors of this device, or its ranks cannot go by host;
                on all ranks.
        """
        if ranks.size > 1 and device.type != "cpu" and not ranks.carries(device):
            raise BindingError(
                "call init_process_group() without a backend, or with one for this device too, such as "
                f'"cpu:gloo,cuda:nccl": params are on {device}, of which the {ranks.size} ranks\' group carries no '
                "shards and no gradients (gloo does not), so nothing was bound."
            )
        if by_host and ranks.size > 1 and ranks.has_collectives(device):
            raise BindingError(
                "omit Tuning(by_host=True): params are on a device whose group has a backend of its own. NCCL's rings "
                "and trees cross to each host once as it is; by host is for gloo, whose messages go from rank to rank."
            )
        if ranks.size == 1 or device.type != "cpu" or not use_neighbours:
            return Transport(ranks, device)
        memory = PeerMemory()
        cards = tuple(tuple(card) for card in ranks.exchange(memory.card(), "looking for neighbours"))
        reach = ranks.exchange([int(memory.can_read(card)) for card in cards], "agreeing on neighbours")
        hosts = None
        if by_host:
            from .hosts import Hosts  # here, as nearly no training goes by host

            hosts = Hosts.of(ranks, reach, memory, [card[0] for card in cards])
        return Transport(ranks, device, memory if all(map(all, reach)) else None, cards, reach, hosts)

    @property
    def name(self) -> str:
        """The name of what carries params and gradients, for people."""
        if self.ranks.size == 1:
            return "none"
        if self._memory is not None:
            return "neighbours"
        if self._hosts is not None:
            return "messages, by host"
        return "collectives" if self.ranks.has_collectives(self._device) else "messages"

    @property
    def overlaps(self) -> bool:
        """True if shards travel while this rank computes, so that they are worth prefetching."""
        return self._memory is None and self.ranks.size > 1

    def barrier(self, phase: str) -> None:
        """Waits until every rank's writes to its shards may be read: collective if ranks read each other's memory."""
        if self._memory is not None:
            self.ranks.barrier(False, phase)

    def open(self, flat: torch.Tensor, shard_numel: int) -> Window:
        """Collective: opens a window on each rank's buffer, which must stay where it is while the window is used."""
        return self._open(flat, shard_numel, flat.data_ptr())

    def open_detached(self, flat: torch.Tensor, shard: torch.Tensor) -> Window:
        """Collective: opens a window on a buffer whose own shard every rank keeps elsewhere, in ``shard``.

        That may be of another dtype: it is cast where another rank's memory is read, else by who copies it to ``flat``.
        """
        nbytes = shard.numel() * shard.element_size()
        return self._open(flat, shard.numel(), shard.data_ptr() - self.ranks.rank * nbytes, shard.dtype)

    def _open(self, flat: torch.Tensor, shard_numel: int, address: int, kept: torch.dtype | None = None) -> Window:
        self._opened += 1
        if self._memory is None:
            return Window(flat, shard_numel, self._opened)
        addresses = self.ranks.exchange([address], "exchanging addresses")
        peers = tuple((card[0], each) for card, (each,) in zip(self._cards, addresses, strict=True))
        return Window(flat, shard_numel, self._opened, peers, kept or flat.dtype)

    def holders(self, members: Sequence[int]) -> Holders:
        """Returns some ranks of the group, this one included: they read each other's memory where they can."""
        from .holders import Holders  # here, as nearly no training has holders

        is_near = bool(self._reach) and all(self._reach[one][other] for one in members for other in members)
        memory = (self._memory or PeerMemory()) if is_near else None
        return Holders(self.ranks, members, self._device, memory)

    def open_parts(self, part: torch.Tensor, holders: Holders) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Collective: exchanges the addresses of parts, which stay where they are.

        Returns the number of the window on them, and process numbers and addresses by holder, if they read memory.
        """
        self._opened += 1
        peers: tuple[tuple[int, int], ...] = ()
        if self._reach:  # all ranks of the group exchange, whatever their own holders do
            addresses = self.ranks.exchange([part.data_ptr() - holders.rank * part.nbytes], "exchanging addresses")
            peers = tuple((self._cards[each][0], addresses[each][0]) for each in holders.members)
        return self._opened, peers if holders.reads_memory else ()

    def all_gather(
        self, phase: str, limit: timedelta | None = None, kind: GatherKind = GatherKind.SCHEDULED
    ) -> AllGather:
        """Returns an all-gather for shards that are final on every rank.

        Args:
            limit: of each wait of the host, see :meth:`Ranks.wait`; the waits of NCCL have the group's timeout.
            kind: what it is for.
        """
        if self._memory is not None:
            return by_reading(self.ranks, self._memory)
        if self._hosts is not None and kind is GatherKind.SCHEDULED:
            from .all_gather_hosts import by_hosts

            return by_hosts(self.ranks, self._hosts, phase, limit)
        if kind is not GatherKind.SCHEDULED and not self.ranks.has_collectives(self._device):
            return by_asking(self.ranks, phase, limit, kind)
        return all_gather_between(self.ranks, self._device, phase, limit)

    def gather(self, phase: str, is_coded: bool = False) -> Gather:
        """Returns a gather for shards that are being written.

        Args:
            is_coded: True for windows with a code, which are messages on every connection.
        """
        is_coded &= self._hosts is None  # by host nothing reads the memory of all ranks
        moves = all_gather_between(self.ranks, self._device, phase) if is_coded else self.all_gather(phase)
        return Gather(self.ranks, moves, phase)

    def async_gather(self, phase: str) -> AsyncGather:
        """Returns a gather for shards that are being written, which need not be waited for as a whole.

        Where ranks read each other's memory there is none (``overlaps``): nothing would travel meanwhile.
        """
        assert self._memory is None
        return AsyncGather(self.ranks, self.all_gather(phase), phase, self._first)

    def all_to_all(self, phase: str) -> AllToAll:
        """Collective at its first call: returns the mechanism by which each rank sends each other one tensors."""
        if self._all_to_all is None:
            self._opened += 1  # a number, for the tag of its messages
            self._all_to_all = self._make_all_to_all(phase)
        return self._all_to_all

    def _make_all_to_all(self, phase: str) -> AllToAll:
        if self.ranks.size == 1:
            return all_to_all.to_itself(self.ranks)
        if self._memory is not None:
            return all_to_all.by_reading(self.ranks, self._memory, [card[0] for card in self._cards])
        if self.ranks.has_collectives(self._device):
            return all_to_all.by_collectives(self.ranks, phase)
        return all_to_all.by_messages(self.ranks, FIRST_TAG + self._opened, phase)

    def reduce_scatter(self, is_coded: bool = False) -> ReduceScatter:
        """Collective: returns the mechanism for rounds of reductions.

        Args:
            is_coded: True for :class:`.reduce_scatter.CodedReduction`, which are messages on every connection.
        """
        if self.ranks.size == 1:
            return NoReduceScatter()
        if self._hosts is not None:
            return self._reduce_scatter_by_host(self._hosts)
        if is_coded:
            if self.ranks.has_collectives(self._device):
                return CodedReduceScatter(self.ranks, self.traffic)
            return P2PReduceScatter(self.ranks, self.traffic, self._number)
        if self._memory is not None:
            board = PeerBoard(self.ranks, self._memory, tuple(card[0] for card in self._cards))
            return PeerReduceScatter(self.ranks, board, self.traffic)
        if self.ranks.has_collectives(self._device):
            return CollectiveReduceScatter(self.ranks, self.traffic)
        return P2PReduceScatter(self.ranks, self.traffic, self._number)

    def _reduce_scatter_by_host(self, hosts: Hosts) -> ReduceScatter:
        from .reduce_scatter_hosts import HostReduceScatter

        board = PeerBoard(self.ranks, hosts.memory, hosts.pids, hosts.near.members)
        near = PeerReduceScatter(self.ranks, board, self.traffic)
        between = P2PReduceScatter(hosts.column, self.traffic, self._number)
        return HostReduceScatter(near, between, hosts.column.members)


def all_gather_between(ranks: Ranks, device: torch.device, phase: str, limit: timedelta | None = None) -> AllGather:
    """Returns an all-gather for ranks that do not read each other's memory; ``limit``: see :meth:`Ranks.wait`."""
    if ranks.has_collectives(device):
        return by_collectives(ranks, phase)
    return by_messages(ranks, phase, limit)


class Gather:
    """A round of gathering after an update: ``start`` each window once this rank's shard is final, then ``finish``."""

    def __init__(self, ranks: Ranks, all_gather: AllGather, phase: str):
        self._ranks, self._all_gather, self._phase = ranks, all_gather, phase
        self.received = 0  # bytes

    def start(self, window: Window) -> None:
        if window.code is not None:
            self.received += self._all_gather.start_encoded(window, self._ranks.rank)
            return
        self._all_gather.start(window)
        self.received += window.nbytes_received

    def finish(self, failed: bool = False) -> None:
        """Waits until every started window holds every rank's shard, and no rank reads this rank's shard any more.

        Args:
            failed: True if this rank could not make its shards; the other ranks then raise without a timeout.

        Raises:
            CommunicationError: a rank failed, died or is late.
        """
        if self._ranks.size == 1:
            return
        if self._all_gather.reads_memory:
            self._ranks.barrier(failed, f"{self._phase} (waiting for every rank's update)")
            if not self._all_gather.ends:  # on no rank: nothing is read before a module needs it, as at stage 3
                return
        phase = f"{self._phase} (waiting for every rank's copy)"
        # A rank that wrote or freed its params before all have read them would give them other values. All must know
        # as well if one could not read.
        with together(riding_on(lambda also: self._ranks.barrier(failed or also, phase))):
            self._all_gather.finish()
