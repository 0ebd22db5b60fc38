"""How a bucket's shards reach every rank: one mechanism for each kind of wire, chosen once, the same on all ranks.

========================  ==============================================================================
tensors, group            mechanism
========================  ==============================================================================
CUDA, NCCL                :class:`NcclGather`: NCCL's all-gather, in place
CPU, ranks of one machine :class:`NeighbourGather`: every rank reads the others' memory
CPU, otherwise            :class:`MessageGather`: a broadcast by each owner (4x faster than gloo's all-gather)
CUDA, gloo                :class:`StagedGather`: the same, through host memory
========================  ==============================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from .collectives import Pending, Ranks
from .neighbours import Neighbours


@dataclass(frozen=True)
class Window:
    """A buffer of which every rank owns one shard, and where the others keep theirs."""

    flat: torch.Tensor  # 1D [size * shard_numel]
    shard_numel: int
    peers: tuple[tuple[int, int], ...] = ()  # by rank: process number, address of its buffer

    def shard(self, rank: int) -> torch.Tensor:
        return self.flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]


class Gather(Protocol):
    """A round of gathering: ``start`` each window when this rank's shard of it is final, then ``finish``."""

    def start(self, window: Window) -> None: ...

    def finish(self, failed: bool = False) -> None:
        """Until every window that was started holds every rank's shard, and no rank needs ours any more.

        Args:
            failed: this rank could not make its shards; the others are told instead of being left to wait.

        Raises:
            CommunicationError: a rank failed, died or is late.
        """


class Transport:
    """Opens windows and rounds for one group of ranks."""

    def __init__(self, ranks: Ranks, neighbours: Neighbours | None, cards: tuple[tuple[int, ...], ...]):
        self.ranks = ranks
        self._neighbours = neighbours
        self._cards = cards

    @staticmethod
    def of(ranks: Ranks, device: torch.device, use_neighbours: bool) -> "Transport":
        """Collective: finds out whether the ranks can read each other's memory."""
        if ranks.size == 1 or device.type != "cpu" or not use_neighbours:
            return Transport(ranks, None, ())
        neighbours = Neighbours()
        cards = tuple(tuple(card) for card in ranks.exchange(neighbours.card(), device, "looking for neighbours"))
        able = all(neighbours.can_read(card) for card in cards)
        everyone = ranks.exchange([int(able)], device, "agreeing on neighbours")
        return Transport(ranks, neighbours if all(each for (each,) in everyone) else None, cards)

    @property
    def name(self) -> str:
        return "neighbours" if self._neighbours is not None else "messages"

    def open(self, flat: torch.Tensor, shard_numel: int) -> Window:
        """Collective: a window on each rank's buffer, which must stay where it is as long as the window is used."""
        if self._neighbours is None:
            return Window(flat, shard_numel)
        addresses = self.ranks.exchange([flat.data_ptr()], flat.device, "exchanging addresses")
        return Window(
            flat, shard_numel, tuple((card[0], each) for card, (each,) in zip(self._cards, addresses, strict=True))
        )

    def gather(self, device: torch.device, phase: str) -> Gather:
        """A round for windows on ``device``."""
        if self.ranks.size == 1:
            return NoGather()
        if self._neighbours is not None:
            return NeighbourGather(self.ranks, phase, self._neighbours)
        if device.type == "cpu":
            return MessageGather(self.ranks, phase)
        return NcclGather(self.ranks, phase) if self.ranks.carries(device) else StagedGather(self.ranks, phase)


class NoGather:
    """One rank owns everything."""

    def start(self, window: Window) -> None:
        pass

    def finish(self, failed: bool = False) -> None:
        pass


class MessageGather:
    """Broadcasts by each owner, under way while the next shard is updated."""

    def __init__(self, ranks: Ranks, phase: str):
        self._ranks, self._phase = ranks, phase
        self._pending: list[Pending] = []

    def start(self, window: Window) -> None:
        if window.shard_numel:
            self._pending.append(
                self._ranks.broadcast_each([window.shard(rank) for rank in range(self._ranks.size)], self._phase)
            )

    def finish(self, failed: bool = False) -> None:
        for pending in self._pending:
            self._ranks.wait(pending)
        _meet(self._ranks, failed, self._phase)


def _meet(ranks: Ranks, failed: bool, phase: str) -> None:
    """A barrier that tells whether every rank came to it well."""
    reports = ranks.exchange([int(failed)], torch.device("cpu"), phase)
    if any(each for (each,) in reports):
        raise CommunicationError(f"while {phase}: rank {[each for (each,) in reports].index(1)} could not go on.")


class NeighbourGather:
    """Reads every other rank's shard out of its memory, between two barriers."""

    def __init__(self, ranks: Ranks, phase: str, neighbours: Neighbours):
        self._ranks, self._phase, self._neighbours = ranks, phase, neighbours
        self._windows: list[Window] = []

    def start(self, window: Window) -> None:
        self._windows.append(window)

    def finish(self, failed: bool = False) -> None:
        if not self._windows:
            return
        _meet(self._ranks, failed, f"{self._phase} (waiting for every rank's update)")
        problem = self._read_all()
        # No rank may write or free its params before all have read them; and all must know that one could not.
        try:
            _meet(self._ranks, problem is not None, f"{self._phase} (waiting for every rank's copy)")
        finally:
            if problem is not None:
                raise problem

    def _read_all(self) -> CommunicationError | None:
        try:
            for window in self._windows:
                # Every rank starts with another neighbour, so that no memory is read by all at once.
                for step in range(1, self._ranks.size):
                    owner = (self._ranks.rank + step) % self._ranks.size
                    pid, base = window.peers[owner]
                    target = window.shard(owner)
                    self._neighbours.read(pid, base + target.data_ptr() - window.flat.data_ptr(), target)
        except CommunicationError as error:
            return error
        return None


class NcclGather:
    """NCCL's all-gather, on its own stream; the wait orders the current stream behind it."""

    def __init__(self, ranks: Ranks, phase: str):
        self._ranks, self._phase = ranks, phase
        self._pending: list[Pending] = []

    def start(self, window: Window) -> None:
        if window.shard_numel:
            work = _all_gather_single()(
                window.flat, window.shard(self._ranks.rank), group=self._ranks.group, async_op=True
            )
            self._pending.append(Pending(self._phase, (work,)))

    def finish(self, failed: bool = False) -> None:
        # The others are not told, which would cost a wait of the host for the device; they meet the deadline.
        for pending in self._pending:
            self._ranks.wait(pending)


class StagedGather:
    """CUDA tensors over a group that carries only CPU tensors: several ranks on one GPU, for tests of correctness."""

    def __init__(self, ranks: Ranks, phase: str):
        self._messages = MessageGather(ranks, phase)
        self._staged: list[tuple[Window, Window]] = []

    def start(self, window: Window) -> None:
        copy = Window(window.flat.cpu(), window.shard_numel)
        self._staged.append((window, copy))
        self._messages.start(copy)

    def finish(self, failed: bool = False) -> None:
        self._messages.finish(failed)
        for window, copy in self._staged:
            window.flat.copy_(copy.flat)


def _all_gather_single() -> Callable[..., Any]:
    # Renamed in torch 2.13; the older name warns there.
    newer = getattr(dist, "all_gather_single", None)
    return newer if newer is not None else dist.all_gather_into_tensor
