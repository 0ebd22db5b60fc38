"""A wire moves shards that are final to every rank: one mechanism for each kind of connection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .group import Pending, Ranks
from .peer_memory import Neighbours

# Of messages that carry shards: above those that carry gradients.
_FIRST_TAG = 1 << 30


@dataclass(frozen=True)
class Window:
    """A buffer of which every rank owns one shard, and where the others keep theirs."""

    flat: torch.Tensor  # 1D [size * shard_numel]
    shard_numel: int
    number: int  # which other windows do not have; the same on all ranks
    peers: tuple[tuple[int, int], ...] = ()  # by rank: process number, address of its buffer

    def shard(self, rank: int) -> torch.Tensor:
        return self.flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    @property
    def nbytes_received(self) -> int:
        return (self.flat.numel() - self.shard_numel) * self.flat.element_size()


class Wire(Protocol):
    """Moves shards that are final into windows, whose own shard is in place.

    Attributes:
        reads_memory: ours is read while other ranks ``finish``, so that it must be final before and stay until then.
        on_stream: the host does not wait, the current stream does.
    """

    reads_memory: bool
    on_stream: bool

    def start(self, window: Window) -> None: ...

    def finish(self) -> None:
        """Until every window that was started holds every rank's shard.

        Raises:
            CommunicationError: a rank died or is late.
        """


class NoWire:
    """One rank owns everything."""

    reads_memory = on_stream = False

    def start(self, window: Window) -> None:
        pass

    def finish(self) -> None:
        pass


class MessageWire:
    """Shards sent straight to every rank, under way while something else is computed.

    Messages carry the window: where ranks ask for windows in other orders, none takes one for another.
    """

    reads_memory = on_stream = False

    def __init__(self, ranks: Ranks, phase: str):
        self._ranks, self._phase = ranks, phase
        self._pending: list[Pending] = []

    def start(self, window: Window) -> None:
        if window.shard_numel:
            shards = [window.shard(rank) for rank in range(self._ranks.size)]
            own = [shards[self._ranks.rank]] * self._ranks.size
            tag = _FIRST_TAG + window.number
            self._pending.append(self._ranks.exchange_slices(own, shards, tag, self._phase))

    def finish(self) -> None:
        for pending in self._pending:
            self._ranks.wait(pending)


class NeighbourWire:
    """Reads every other rank's shard out of its memory."""

    reads_memory, on_stream = True, False

    def __init__(self, ranks: Ranks, neighbours: Neighbours):
        self._ranks, self._neighbours = ranks, neighbours
        self._windows: list[Window] = []

    def start(self, window: Window) -> None:
        self._windows.append(window)

    def finish(self) -> None:
        for window in self._windows:
            # Every rank starts with another neighbour, so that no memory is read by all at once.
            for step in range(1, self._ranks.size):
                owner = (self._ranks.rank + step) % self._ranks.size
                pid, base = window.peers[owner]
                target = window.shard(owner)
                self._neighbours.read(pid, base + target.data_ptr() - window.flat.data_ptr(), target)


class CollectiveWire:
    """The backend's all-gather. NCCL's runs on its own stream; the wait orders the current stream behind it."""

    reads_memory, on_stream = False, True

    def __init__(self, ranks: Ranks, phase: str):
        self._ranks, self._phase = ranks, phase
        self._pending: list[Pending] = []

    def start(self, window: Window) -> None:
        if window.shard_numel:
            work = _all_gather_single()(
                window.flat, window.shard(self._ranks.rank), group=self._ranks.group, async_op=True
            )
            self._pending.append(Pending(self._phase, (work,)))

    def finish(self) -> None:
        for pending in self._pending:
            self._ranks.wait(pending)


def _all_gather_single() -> Callable[..., Any]:
    # Renamed in torch 2.13; the older name warns there.
    newer = getattr(dist, "all_gather_single", None)
    return newer if newer is not None else dist.all_gather_into_tensor
