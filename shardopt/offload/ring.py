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
from collections.abc import Collection, Mapping, Sequence

import torch

from .lanes import Copy, Lanes, Mark
from .pinned import Pages
from .store import Chunk, Plane, ResidentHome

SLOTS = 3  # one brought, one updated, one taken away
_ALIGNMENT = 256  # bytes, of a stream in a slot
_FP32 = 4  # bytes


class RingHome(ResidentHome):
    """Streams in host memory. Whoever reads them waits for what is still on its way there."""

    def __init__(self, store: "RingStore", numel: int):
        super().__init__(numel, store.pages.zeros, store.tier)
        self._store = store

    def chunks(self) -> Sequence[tuple[int, int]]:
        numel = self._store.chunk_numel
        return [(start, min(start + numel, self._numel)) for start in range(0, self._numel, numel)]

    def ensure(self, planes: Mapping[str, Plane]) -> None:
        self._store.settle()
        super().ensure(planes)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._store.settle()
        return super().read(name, start, stop)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._store.settle()
        super().write(name, start, values)

    def renew(self, zeroed: Collection[str]) -> None:
        self._store.settle()
        before = list(self.streams.values())
        super().renew(zeroed)
        self._store.pages.give_back(before)

    def release(self) -> None:
        self._store.settle()
        self._store.pages.give_back(list(self.streams.values()))
        super().release()


class _Slot:
    """Memory on the device for one chunk of all streams."""

    def __init__(self, nbytes: int, device: torch.device, free: Mark):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free = free  # behind all that used the memory before

    def streams(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for tensors such as these."""
        found, start = [], 0
        for each in like:
            found.append(self.memory[start : start + each.nbytes].view(each.dtype))
            start += _padded(each.nbytes)
        return found


class _Turn:
    """A chunk's way through a slot."""

    def __init__(self, slot: _Slot, resting: Sequence[torch.Tensor]):
        self.slot, self.resting, self.streams = slot, resting, slot.streams(resting)
        self.here: Mark = None


class RingStore:
    """The homes of one optimizer on this rank, on a device that is not the host's memory."""

    tier = "host"
    is_final = True

    def __init__(self, device: torch.device, lanes: Lanes, pages: Pages, chunk_bytes: int):
        """``chunk_bytes`` of one fp32 stream in a chunk."""
        self.chunk_numel = max(chunk_bytes // _FP32 // 256, 1) * 256
        self.pages = pages
        self._device, self._lanes = device, lanes
        self._slots: list[_Slot] = []
        self._slot_bytes = 0
        self._waiting: deque[Chunk] = deque()
        self._turns: dict[Chunk, _Turn] = {}
        self._written: Mark = None  # behind the last copy to the host; None where the host has waited for it
        self._homes: weakref.WeakSet[RingHome] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> RingHome:
        assert device == self._device
        home = RingHome(self, numel)
        self._homes.add(home)
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._turns = {}
        self._waiting = deque(chunk for chunk in chunks if chunk.names)
        self._make_slots()
        for slot in self._slots:
            if self._written is not None:
                slot.free = self._written  # its own last copy is not behind this one
            self._enter(slot)

    def _make_slots(self) -> None:
        nbytes = max((sum(_padded(each.nbytes) for each in _resting(chunk)) for chunk in self._waiting), default=0)
        if nbytes > self._slot_bytes:
            self.settle()  # kernels may still use the old ones, which the allocator knows; copies it does not
            self._slots, self._slot_bytes = [], nbytes
        while len(self._slots) < min(SLOTS, len(self._waiting)):
            # The allocator hands out what kernels before this point may still use.
            self._slots.append(_Slot(self._slot_bytes, self._device, self._lanes.now()))

    def _enter(self, slot: _Slot) -> None:
        if self._waiting:
            chunk = self._waiting.popleft()
            turn = self._turns[chunk] = _Turn(slot, _resting(chunk))
            turn.here = self._lanes.bring([*map(Copy, turn.streams, turn.resting)], slot.free)

    def fetch(self, chunk: Chunk) -> Sequence[torch.Tensor]:
        if not chunk.names:
            return []
        turn = self._turns[chunk]
        self._lanes.join(turn.here)
        return turn.streams

    def write_back(self, chunk: Chunk) -> None:
        if chunk.names:
            turn = self._turns.pop(chunk)
            taken = self._lanes.take([*map(Copy, turn.resting, turn.streams)], self._lanes.now())
            turn.slot.free = self._written = taken
            self._enter(turn.slot)

    def flush(self) -> None:
        """The host does not wait: see :meth:`settle`."""

    def settle(self) -> None:
        """Until host memory holds what was written back."""
        written = self._written  # other ranks read in a thread of their own
        if written is not None:
            self._lanes.settle(written)
            self._written = None

    def begin(self) -> None:
        pass

    def commit(self) -> None:
        pass

    def roll_back(self) -> None:
        pass

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        return {"device": len(self._slots) * self._slot_bytes}

    def close(self) -> None:
        self.settle()
        for home in list(self._homes):
            home.release()
        self._slots, self._slot_bytes, self._turns = [], 0, {}


def _resting(chunk: Chunk) -> list[torch.Tensor]:
    """The chunk's part of each stream, where it rests."""
    home = chunk.home
    assert isinstance(home, RingHome)
    return [ResidentHome.read(home, name, chunk.start, chunk.stop) for name in chunk.names]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
