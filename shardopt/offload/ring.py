"""Masters and states in host memory, streamed through a ring of slots on the device, where the update runs.

::

    slot 0    load 0 | update 0 | store 0 | load 3 | ...         three CUDA streams at a time:
    slot 1           | load 1   | update 1 | store 1 | ...       copies to the device, kernels, copies to the host
    slot 2                      | load 2   | update 2 | ...

A slot is a staging buffer. A chunk is loaded into a slot after the copy that stores the slot's last chunk. The first
load of a step waits for the last store of the step before, which may be of the same host memory.

The first chunks of a step are those of the step before, as a rule. So a step loads them again when it ends: they
arrive while the next forward and backward run, and the next step finds them in its slots. What others may have written
to meanwhile is loaded anew.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .host import HostStorage, views_of
from .store import Fetched, Store
from .streams import Slot

if TYPE_CHECKING:
    from .host import HostStore
    from .store import Chunk, ShardStorage
    from .streams import CopyStreams, Mark

SLOTS = 3  # one that is loaded, one that is updated, one that is stored


class RingStore(Store):
    """Updates the chunks of a host store on a device."""

    tier = "host"

    def __init__(self, device: torch.device, streams: CopyStreams, host: HostStore):
        self._device, self._streams, self._host = device, streams, host
        self._slots: list[Slot] = []
        self._slot_bytes = 0
        self.loads_ahead = True  # False while steps are measured: the next one must not find what this one loaded
        self._passes = self._passes_before = 1  # of this step so far, and of the step before: as most rules have
        self._first: list[_Place] = []  # of the chunks of this step's first pass, as many as there are slots
        self._ahead: list[_LoadedAhead] = []  # in the slots, for the next step
        self._waiting: deque[Chunk] = deque()
        self._staged: dict[Chunk, Slot] = {}  # that a chunk's streams and gradients are loaded into
        self._stored: Mark = None  # after the last copy to the host; None once the host has waited for it
        self._read: Mark = None  # after the last copy of gradients to the device, likewise
        # Weak: a cycle would keep slots alive, and pages registered whose memory is gone.
        host.wait_for_stores = _if_alive(self.wait_for_copies)
        host.order_stores = _if_alive(self._order_stores)

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostStorage:
        home = self._host.home(numel, dtype, device)
        self.update_here(home)
        return home

    def update_here(self, home: ShardStorage) -> None:
        """Lets updates of this shard run on the device from now on."""
        home.device, home.updates_on_host = self._device, False

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._passes_before, self._passes = self._passes, 0

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._staged = {}
        moving = [chunk for chunk in chunks if _moves(chunk)]
        self._waiting = deque(moving)
        if not self._passes:
            # No chunks: these refer to gradients, which live no longer than the step.
            self._first = [_place_of(chunk) for chunk in moving[:SLOTS] if chunk.names]
        self._passes += 1
        used = set(self._slots)
        self._make_slots()
        ahead, self._ahead = {each.slot: each for each in self._ahead}, []
        for slot in self._slots:
            found = ahead.get(slot)
            if found is not None and self._waiting and found.is_still(self._waiting[0]):
                self._load(slot, has_streams=True)
                continue
            if self._stored is not None and slot in used:  # the memory of others may still be used by kernels
                # Another slot's last copy may be later than its own, and of the same host memory.
                slot.mark = self._stored
            self._load(slot)

    def _load_ahead(self) -> None:
        """Loads the first chunks of this step again, for the next one."""
        for slot, place in zip(self._slots, self._first, strict=False):
            home, start, stop, names = place
            if not home.is_shown:
                on_host = [home.view(name, start, stop) for name in names]
                after = slot.mark if self._stored is None else self._stored
                slot.mark = self._streams.to_device([*zip(slot.stage(on_host), on_host, strict=True)], after)
                self._ahead.append(_LoadedAhead(slot, place, home.revision))

    def _make_slots(self) -> None:
        nbytes = max((Slot.nbytes([*views_of(chunk), *chunk.gradients]) for chunk in self._waiting), default=0)
        if nbytes > self._slot_bytes:
            self.wait_for_copies()  # the allocator knows the kernels that still use the old slots, but not the copies
            self._ahead = []
            self._slots, self._slot_bytes = [], nbytes
        while len(self._slots) < min(SLOTS, len(self._waiting)):
            # The allocator may hand out memory that kernels launched so far still use: the first copy waits for them.
            memory = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
            self._slots.append(Slot(memory, self._streams.now()))

    def _load(self, slot: Slot, has_streams: bool = False) -> None:
        """Loads the next chunk into a slot, or its gradients alone."""
        if self._waiting:
            chunk = self._waiting.popleft()
            self._staged[chunk], on_host = slot, [*views_of(chunk), *chunk.gradients]
            copies = [*zip(slot.stage(on_host), on_host, strict=True)][len(chunk.names) if has_streams else 0 :]
            if copies:
                slot.mark = self._streams.to_device(copies, slot.mark)
            self._read = slot.mark if chunk.gradients else self._read

    def fetch(self, chunk: Chunk) -> Fetched:
        if not _moves(chunk):
            return Fetched((), chunk.param, ())
        slot, streams = self._staged[chunk], len(chunk.names)
        self._streams.wait(slot.mark)
        return Fetched(slot.staged[:streams], chunk.param, slot.staged[streams:])

    def write_back(self, chunk: Chunk) -> None:
        if _moves(chunk):
            slot = self._staged.pop(chunk)
            pairs = zip(chunk.names, views_of(chunk), slot.staged, strict=False)  # without the gradients
            copies = [(on_host, staged) for name, on_host, staged in pairs if name not in chunk.unwritten]
            slot.mark = self._stored = self._streams.to_host(copies, self._streams.now())
            self._load(slot)

    def flush(self) -> None:
        """Waits until gradients were copied: after a step anybody may scale or zero them."""
        if self._read is not None:
            self._streams.synchronize(self._read)
            self._read = None
        if self.loads_ahead and self._passes == self._passes_before:
            self._load_ahead()

    def wait_for_copies(self) -> None:
        """Waits until host memory holds what was written back, and nothing is read from it."""
        stored = self._stored
        for mark in (stored, *[each.slot.mark for each in self._ahead]):
            if mark is not None:
                self._streams.synchronize(mark)
        # Only now, and not a later one: a thread that answers other ranks calls this too, while steps go on.
        if self._stored is stored:
            self._stored = None

    def _order_stores(self) -> None:
        """Kernels that are launched from now on read what was written back."""
        stored = self._stored
        if stored is not None:
            self._streams.wait(stored)

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        return {"device": len(self._slots) * self._slot_bytes}

    def free_buffers(self) -> None:
        """Frees all buffers. The next step makes those that it needs."""
        self.wait_for_copies()
        self._slots, self._slot_bytes, self._staged = [], 0, {}
        self._first, self._ahead = [], []

    def close(self) -> None:
        self.free_buffers()
        self._host.close()


def _if_alive(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


class _Place(NamedTuple):
    """Where the streams of a chunk lie."""

    home: HostStorage
    start: int
    stop: int
    names: tuple[str, ...]


class _LoadedAhead(NamedTuple):
    """A chunk that the next step will find in a slot, unless its home changed meanwhile."""

    slot: Slot
    place: _Place
    revision: int  # of its home

    def is_still(self, chunk: Chunk) -> bool:
        home = self.place.home
        return self.place == _place_of(chunk) and home.revision == self.revision and not home.is_shown


def _place_of(chunk: Chunk) -> _Place:
    assert isinstance(chunk.home, HostStorage)
    return _Place(chunk.home, chunk.start, chunk.stop, chunk.names)


def _moves(chunk: Chunk) -> bool:
    """True if any part of the chunk must be copied."""
    return bool(chunk.names or chunk.gradients)
