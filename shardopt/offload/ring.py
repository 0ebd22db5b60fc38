"""Masters and states in host memory, streamed through a ring of slots on the device, where the update runs.

::

    slot 0    bring 0 | update 0 | take 0 | bring 3 | ...         three lanes at a time:
    slot 1            | bring 1  | update 1 | take 1 | ...        to the device, kernels, back to the host
    slot 2                       | bring 2  | update 2 | ...

A slot is brought its next chunk behind the copy that took its last one away, and the first one of a step behind the
last copy of the step before, which may be of the same memory. Not measured on a GPU yet.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from .host import HostStorage, HostStore, parts_of
from .store import Chunk, Fetched, FinalStore, ShardStorage
from .streams import Copy, CopyStreams, Mark

SLOTS = 3  # one brought, one updated, one taken away
_ALIGNMENT = 256  # bytes, of each tensor in a slot


class _Slot:
    """Memory on the device for one chunk of all streams, and of gradients that rest in host memory too."""

    def __init__(self, nbytes: int, device: torch.device, free: Mark):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free = free  # behind all that used the memory before

    def room(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for tensors such as these."""
        found, start = [], 0
        for each in like:
            found.append(self.memory[start : start + each.nbytes].view(each.dtype))
            start += _padded(each.nbytes)
        return found


class _Turn:
    """A chunk's way through a slot."""

    def __init__(self, slot: _Slot, resting: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]):
        self.slot, self.resting = slot, resting
        there = slot.room([*resting, *gradients])
        self.streams, self.gradients = there[: len(resting)], there[len(resting) :]
        self.here: Mark = None


class RingStore(FinalStore):
    """Has the chunks of a host store updated on a device."""

    tier = "host"

    def __init__(self, device: torch.device, streams: CopyStreams, host: HostStore):
        self._device, self._streams, self._host = device, streams, host
        self._slots: list[_Slot] = []
        self._slot_bytes = 0
        self._waiting: deque[Chunk] = deque()
        self._turns: dict[Chunk, _Turn] = {}
        self._written: Mark = None  # behind the last copy to the host; None where the host has waited for it
        self._read: Mark = None  # behind the last copy of gradients to the device, likewise
        settle = weakref.WeakMethod(self.settle)  # a cycle would keep slots, and pages registered that are gone

        def settle_if_there() -> None:
            method = settle()
            if method is not None:
                method()

        host.settle = settle_if_there

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostStorage:
        home = self._host.home(numel, dtype, device)
        self.step_here(home)
        return home

    def step_here(self, home: ShardStorage) -> None:
        """Its updates run on the device from now on."""
        home.device, home.is_apart = self._device, False

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._turns = {}
        self._waiting = deque(chunk for chunk in chunks if _moves(chunk))
        self._make_slots()
        for slot in self._slots:
            if self._written is not None:
                slot.free = self._written  # its own last copy is not behind this one
            self._enter(slot)

    def _make_slots(self) -> None:
        nbytes = max((_slot_bytes(chunk) for chunk in self._waiting), default=0)
        if nbytes > self._slot_bytes:
            self.settle()  # kernels may still use the old ones, which the allocator knows; copies it does not
            self._slots, self._slot_bytes = [], nbytes
        while len(self._slots) < min(SLOTS, len(self._waiting)):
            # The allocator hands out what kernels before this point may still use.
            self._slots.append(_Slot(self._slot_bytes, self._device, self._streams.now()))

    def _enter(self, slot: _Slot) -> None:
        if self._waiting:
            chunk = self._waiting.popleft()
            turn = self._turns[chunk] = _Turn(slot, parts_of(chunk), chunk.gradients)
            copies = [*map(Copy, turn.streams, turn.resting), *map(Copy, turn.gradients, chunk.gradients)]
            turn.here = self._streams.to_device(copies, slot.free)
            self._read = turn.here if chunk.gradients else self._read

    def fetch(self, chunk: Chunk) -> Fetched:
        if not _moves(chunk):
            return Fetched((), chunk.param, ())
        turn = self._turns[chunk]
        self._streams.wait(turn.here)
        return Fetched(turn.streams, chunk.param, turn.gradients)

    def write_back(self, chunk: Chunk) -> None:
        if _moves(chunk):
            turn = self._turns.pop(chunk)
            taken = self._streams.to_host([*map(Copy, turn.resting, turn.streams)], self._streams.now())
            turn.slot.free = self._written = taken
            self._enter(turn.slot)

    def flush(self) -> None:
        """Until gradients were read: behind a step they are whoever's who scales or zeroes them."""
        if self._read is not None:
            self._streams.synchronize(self._read)
            self._read = None

    def settle(self) -> None:
        """Until host memory holds what was written back."""
        written = self._written  # other ranks read in a thread of their own
        if written is not None:
            self._streams.synchronize(written)
            self._written = None

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        return {"device": len(self._slots) * self._slot_bytes}

    def drop_buffers(self) -> None:
        """Another step makes what it needs."""
        self.settle()
        self._slots, self._slot_bytes, self._turns = [], 0, {}

    def close(self) -> None:
        self.drop_buffers()
        self._host.close()


def _moves(chunk: Chunk) -> bool:
    """Whether anything of it is elsewhere."""
    return bool(chunk.names or chunk.gradients)


def _slot_bytes(chunk: Chunk) -> int:
    return sum(_padded(each.nbytes) for each in (*parts_of(chunk), *chunk.gradients))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
