"""All-gather: moves final shards to every rank. One mechanism for each kind of connection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .group import Pending, Ranks
from .peer_memory import PeerMemory

# First tag of messages that carry shards: above the tags of messages that carry gradients.
_FIRST_TAG = 1 << 30


@dataclass(frozen=True)
class Window:
    """A buffer of which every rank owns one shard, and the addresses of the other ranks' buffers."""

    flat: torch.Tensor  # 1D [size * shard_numel]
    shard_numel: int
    number: int  # unique among windows; the same on all ranks
    # By rank: process number, address of its buffer; empty if ranks do not read each other's memory.
    peers: tuple[tuple[int, int], ...] = ()

    def shard(self, rank: int) -> torch.Tensor:
        return self.flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    @property
    def nbytes_received(self) -> int:
        return (self.flat.numel() - self.shard_numel) * self.flat.element_size()


class AllGather(Protocol):
    """Moves final shards into windows, whose own shard is in place.

    Attributes:
        reads_memory: True if other ranks read our shard during their ``finish``: it must be final before, and stay
            until all of them are done.
        on_stream: True if the current stream waits for the shards and the host does not.
    """

    reads_memory: bool
    on_stream: bool

    def start(self, window: Window) -> None: ...

    def finish(self) -> None:
        """Waits until every started window holds every rank's shard.

        Raises:
            CommunicationError: a rank died or is late.
        """


class NoAllGather:
    """For one rank, which owns everything."""

    reads_memory = on_stream = False

    def start(self, window: Window) -> None:
        pass

    def finish(self) -> None:
        pass


class P2PAllGather:
    """Sends shards straight to every rank, while this rank computes.

    Message tags name the window: ranks may start windows in different orders.
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


class PeerAllGather:
    """Reads every other rank's shard from its memory."""

    reads_memory, on_stream = True, False

    def __init__(self, ranks: Ranks, memory: PeerMemory):
        self._ranks, self._memory = ranks, memory
        self._windows: list[Window] = []

    def start(self, window: Window) -> None:
        self._windows.append(window)

    def finish(self) -> None:
        for window in self._windows:
            # Every rank starts with another peer, so that not all ranks read one memory at a time.
            for step in range(1, self._ranks.size):
                owner = (self._ranks.rank + step) % self._ranks.size
                pid, base = window.peers[owner]
                target = window.shard(owner)
                self._memory.read(pid, base + target.data_ptr() - window.flat.data_ptr(), target)


class CollectiveAllGather:
    """The backend's all-gather. NCCL runs it on its own stream; ``finish`` makes the current stream wait for it."""

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
