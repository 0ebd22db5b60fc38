"""How ranks reach each other: mechanisms for reducing and gathering, chosen once, the same on all ranks.

========================  ==================================================================================
tensors, group            gathering; reducing
========================  ==================================================================================
one rank                  :class:`NoWire`; :class:`NoScatter`
NCCL, or any but gloo     :class:`CollectiveWire`, in place; :class:`CollectiveScatter`
CPU, ranks of one machine :class:`NeighbourWire`; :class:`NeighbourScatter`: they read each other's memory
CPU, gloo                 :class:`MessageWire`; :class:`MessageScatter`: straight to every rank (4x faster
                          than gloo's all-gather; its reduce-scatter is slower than its all-reduce)
CUDA, gloo                refused: it has neither collectives nor messages for tensors of a GPU
========================  ==================================================================================

A wire moves what is already final (stage 3 gathers params so). A :class:`Gather` is a round behind an update, in which
every rank first has to hear that the others' shards are written, and last that nobody reads its own any more.
"""

import weakref

import torch
import torch.distributed as dist

from ...errors import BindingError, CommunicationError
from .all_gather import (
    CollectiveWire,
    MessageWire,
    NeighbourWire,
    NoWire,
    Window,
    Wire,
)
from .group import Ranks
from .peer_board import Board
from .peer_memory import Neighbours
from .reduce_scatter import NoScatter, Scatter
from .reduce_scatter_collective import CollectiveScatter
from .reduce_scatter_p2p import MessageScatter
from .reduce_scatter_peer import NeighbourScatter
from .traffic import Traffic

_WINDOWS = 1 << 20  # numbers of one transport's windows

_TRANSPORTS: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()  # how many there were


class Transport:
    """Opens windows and chooses mechanisms for one group of ranks."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        neighbours: Neighbours | None = None,
        cards: tuple[tuple[int, ...], ...] = (),
    ):
        self.ranks, self._device = ranks, device
        self._neighbours, self._cards = neighbours, cards
        # Messages of several optimizers in one group must not be taken for one another.
        self._number = 0 if ranks.group is None else _TRANSPORTS.get(ranks.group, 0)
        if ranks.group is not None:
            _TRANSPORTS[ranks.group] = self._number + 1
        self._opened = self._number % 512 * _WINDOWS
        self.traffic = Traffic()

    @staticmethod
    def of(ranks: Ranks, device: torch.device, use_neighbours: bool) -> "Transport":
        """Collective: finds out whether the ranks can read each other's memory.

        Raises:
            BindingError: the group has no backend that carries tensors of this device, on all ranks.
        """
        if ranks.size > 1 and device.type != "cpu" and not ranks.carries(device):
            raise BindingError(
                "call init_process_group() without a backend, or with one for this device too, such as "
                f'"cpu:gloo,cuda:nccl": params are on {device}, of which the {ranks.size} ranks\' group carries no '
                "shards and no gradients (gloo does not), so nothing was bound."
            )
        if ranks.size == 1 or device.type != "cpu" or not use_neighbours:
            return Transport(ranks, device)
        neighbours = Neighbours()
        cards = tuple(tuple(card) for card in ranks.exchange(neighbours.card(), device, "looking for neighbours"))
        able = all(neighbours.can_read(card) for card in cards)
        everyone = ranks.exchange([int(able)], device, "agreeing on neighbours")
        if not all(each for (each,) in everyone):
            return Transport(ranks, device)
        return Transport(ranks, device, neighbours, cards)

    @property
    def name(self) -> str:
        """What carries params and gradients, for people."""
        if self.ranks.size == 1:
            return "none"
        if self._neighbours is not None:
            return "neighbours"
        return "collectives" if self.ranks.has_collectives(self._device) else "messages"

    @property
    def overlaps(self) -> bool:
        """Whether shards travel while this rank computes, so that they are worth asking for early."""
        return self._neighbours is None and self.ranks.size > 1

    def settle(self, phase: str) -> None:
        """Collective where ranks read each other's memory: until what every rank wrote to its shards may be read."""
        if self._neighbours is not None:
            meet(self.ranks, False, phase)

    def open(self, flat: torch.Tensor, shard_numel: int) -> Window:
        """Collective: a window on each rank's buffer, which must stay where it is as long as the window is used."""
        return self._open(flat, shard_numel, flat.data_ptr())

    def open_apart(self, flat: torch.Tensor, shard: torch.Tensor) -> Window:
        """Collective: a window on a buffer whose own shard every rank keeps elsewhere, in ``shard``."""
        nbytes = shard.numel() * shard.element_size()
        return self._open(flat, shard.numel(), shard.data_ptr() - self.ranks.rank * nbytes)

    def _open(self, flat: torch.Tensor, shard_numel: int, address: int) -> Window:
        self._opened += 1
        if self._neighbours is None:
            return Window(flat, shard_numel, self._opened)
        addresses = self.ranks.exchange([address], flat.device, "exchanging addresses")
        peers = tuple((card[0], each) for card, (each,) in zip(self._cards, addresses, strict=True))
        return Window(flat, shard_numel, self._opened, peers)

    def wire(self, phase: str) -> Wire:
        """For shards that are final on every rank."""
        if self.ranks.size == 1:
            return NoWire()
        if self._neighbours is not None:
            return NeighbourWire(self.ranks, self._neighbours)
        if self.ranks.has_collectives(self._device):
            return CollectiveWire(self.ranks, phase)
        return MessageWire(self.ranks, phase)

    def gather(self, phase: str) -> "Gather":
        """For shards that are being written."""
        return Gather(self.ranks, self.wire(phase), phase)

    def scatter(self) -> Scatter:
        """Collective: the mechanism for rounds of reduction."""
        if self.ranks.size == 1:
            return NoScatter()
        if self._neighbours is not None:
            board = Board(self.ranks, self._neighbours, tuple(card[0] for card in self._cards))
            return NeighbourScatter(self.ranks, board, self.traffic)
        if self.ranks.has_collectives(self._device):
            return CollectiveScatter(self.ranks, self.traffic)
        return MessageScatter(self.ranks, self.traffic, self._number)


class Gather:
    """A round of gathering: ``start`` each window when this rank's shard of it is final, then ``finish``."""

    def __init__(self, ranks: Ranks, wire: Wire, phase: str):
        self._ranks, self._wire, self._phase = ranks, wire, phase
        self.received = 0  # bytes

    def start(self, window: Window) -> None:
        self._wire.start(window)
        self.received += window.nbytes_received

    def finish(self, failed: bool = False) -> None:
        """Until every window that was started holds every rank's shard, and no rank needs ours any more.

        Args:
            failed: this rank could not make its shards; the others are told instead of being left to wait.

        Raises:
            CommunicationError: a rank failed, died or is late.
        """
        if self._ranks.size == 1:
            return
        if self._wire.on_stream:
            # The others are not told, which would cost a wait of the host for the device; they meet the deadline.
            self._wire.finish()
            return
        if self._wire.reads_memory:
            meet(self._ranks, failed, f"{self._phase} (waiting for every rank's update)")
        problem = None
        try:
            self._wire.finish()
        except CommunicationError as error:
            problem = error
        # No rank may write or free its params before all have read them; and all must know that one could not.
        try:
            meet(self._ranks, failed or problem is not None, f"{self._phase} (waiting for every rank's copy)")
        finally:
            if problem is not None:
                raise problem


def meet(ranks: Ranks, failed: bool, phase: str) -> None:
    """A barrier that tells whether every rank came to it well."""
    reports = ranks.exchange([int(failed)], torch.device("cpu"), phase)
    if any(each for (each,) in reports):
        raise CommunicationError(f"while {phase}: rank {[each for (each,) in reports].index(1)} could not go on.")
