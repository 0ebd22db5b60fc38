"""Masters and states in host memory, streamed through a ring of slots on the device, where the update runs.

::

    slot 0    load 0 | update 0 | store 0 | load 3 | ...         three CUDA streams at a time:
    slot 1           | load 1   | update 1 | store 1 | ...       copies to the device, kernels, copies to the host
    slot 2                      | load 2   | update 2 | ...

A slot is a staging buffer. A chunk is loaded into the slot that was used longest ago, after the copy that stores the
slot's last chunk, and after the last store of its own memory on the host.

The first chunks of a pass are those of the step before, as a rule. So a pass that ends loads those of the next one,
and the last pass those of the next step: they arrive while the next forward and backward run. Where backward updates
one bucket after the other, each is a pass. What others may have written to meanwhile is loaded anew.
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

# One that is loaded, one that is updated, one that is stored, and one more for a backward that updates: where its own
# kernels come in between, either direction of the bus would stand still while the other one is busy (test_timeline).
SLOTS = 4


class RingStore(Store):
    """Updates the chunks of a host store on a device."""

    tier = "host"

    def __init__(self, device: torch.device, streams: CopyStreams, host: HostStore):
        self._device, self._streams, self._host = device, streams, host
        self._slots: list[_Slot] = []  # the one that was used longest ago first
        self._slot_bytes = 0
        self.loads_ahead = True  # False while steps are measured: the next one must not find what this one loaded
        # Of each pass of this step so far, and of the step before, the first chunks, as many as there are slots.
        self._firsts: list[list[_Place]] = []
        self._firsts_before: list[list[_Place]] = []
        self._ahead: list[_LoadedAhead] = []  # in the slots, for the next pass
        self._num_stored = 0
        # Start of a chunk -> the number and the mark of the last copy to its memory on the host.
        self._stores: weakref.WeakKeyDictionary[ShardStorage, dict[int, tuple[int, Mark]]] = weakref.WeakKeyDictionary()
        self._waiting: deque[Chunk] = deque()
        self._staged: dict[Chunk, _Slot] = {}  # that a chunk's streams and gradients are loaded into
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
        self._firsts_before, self._firsts = self._firsts, []

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._staged = {}
        moving = [chunk for chunk in chunks if _moves(chunk)]
        self._waiting = deque(moving)
        # No chunks: these refer to gradients, which live no longer than the step.
        self._firsts.append([_place_of(chunk) for chunk in moving[:SLOTS] if chunk.names])
        if not moving:
            return  # what is loaded ahead is for a pass that has some
        self._make_slots()
        ahead, self._ahead = {each.slot: each for each in self._ahead}, []
        for slot in [*ahead, *(each for each in self._slots if each not in ahead)]:
            found = ahead.get(slot)
            self._load(slot, found is not None and bool(self._waiting) and found.is_still(self._waiting[0]))

    def _load_ahead(self) -> None:
        """Loads the first chunks of the next pass: of this step, as the step before had them, or of the next step."""
        following = (*self._firsts_before[len(self._firsts) :], *self._firsts)
        for slot, place in zip(list(self._slots), next(filter(None, following), ()), strict=False):
            home, start, stop, names = place
            if not home.is_shown:
                on_host = [home.view(name, start, stop) for name in names]
                copies = [*zip(slot.stage(on_host), on_host, strict=True)]
                slot.mark = self._streams.to_device(copies, self._last_use(slot, home, start))
                self._ahead.append(_LoadedAhead(slot, place, home.revision))
                self._was_used(slot)

    def _last_use(self, slot: _Slot, home: ShardStorage, start: int) -> Mark:
        """Returns the mark after all uses so far of a slot, and of a chunk's memory on the host."""
        number, stored = self._stores.get(home, {}).get(start, (0, None))
        if number <= slot.number:
            return slot.mark  # copies to the host run in order
        if not slot.number:
            # Its memory may be another's that kernels still use, and no copy of its own has waited for them.
            self._streams.to_device([], slot.mark)
        return stored

    def _was_used(self, slot: _Slot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)

    def _make_slots(self) -> None:
        nbytes = max((Slot.nbytes([*views_of(chunk), *chunk.gradients]) for chunk in self._waiting), default=0)
        if nbytes > self._slot_bytes:
            self.wait_for_copies()  # the allocator knows the kernels that still use the old slots, but not the copies
            self._ahead = []
            self._slots, self._slot_bytes = [], nbytes
        chunks = {place[:2] for of_pass in self._firsts for place in of_pass}  # each pass may have a single one
        while len(self._slots) < min(SLOTS, max(len(chunks), len(self._waiting))):
            # The allocator may hand out memory that kernels launched so far still use: the first copy waits for them.
            memory = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
            self._slots.append(_Slot(memory, self._streams.now()))

    def _load(self, slot: _Slot, has_streams: bool = False) -> None:
        """Loads the next chunk into a slot, or its gradients alone."""
        if self._waiting:
            chunk = self._waiting.popleft()
            self._staged[chunk], on_host = slot, [*views_of(chunk), *chunk.gradients]
            copies = [*zip(slot.stage(on_host), on_host, strict=True)][len(chunk.names) if has_streams else 0 :]
            if copies:
                after = slot.mark if has_streams else self._last_use(slot, chunk.home, chunk.start)
                slot.mark = self._streams.to_device(copies, after)
            self._read = slot.mark if chunk.gradients else self._read
            self._was_used(slot)

    def fetch(self, chunk: Chunk) -> Fetched:
        if not _moves(chunk):
            return Fetched((), chunk.param, ())
        slot, streams = self._staged[chunk], len(chunk.names)
        self._streams.wait(slot.mark)
        return Fetched(slot.staged[:streams], chunk.param, slot.staged[streams:])

    def write_back(self, chunk: Chunk) -> None:
        if _moves(chunk):
            slot = self._staged.pop(chunk)
            on_host = views_of(chunk) if chunk.beside is None else map(chunk.beside.__getitem__, chunk.names)
            pairs = zip(chunk.names, on_host, slot.staged, strict=False)  # without the gradients
            copies = [(into, staged) for name, into, staged in pairs if name not in chunk.unwritten]
            slot.mark = self._stored = self._streams.to_host(copies, self._streams.now())
            self._num_stored += 1
            slot.number = self._num_stored
            self._stores.setdefault(chunk.home, {})[chunk.start] = slot.number, slot.mark
            self._load(slot)

    def flush(self) -> None:
        """Waits until gradients were copied: after a step anybody may scale or zero them."""
        if self._read is not None:
            self._streams.synchronize(self._read)
            self._read = None
        if self.loads_ahead and not self._ahead:
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
        self._firsts, self._firsts_before, self._ahead = [], [], []
        self._stores.clear()

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


class _Slot(Slot):
    """A staging buffer.

    Attributes:
        number: of the last copy to the host of what lay in it; 0: none yet.
    """

    number = 0


class _Place(NamedTuple):
    """Where the streams of a chunk lie."""

    home: HostStorage
    start: int
    stop: int
    names: tuple[str, ...]


class _LoadedAhead(NamedTuple):
    """A chunk that the next pass will find in a slot, unless its home changed meanwhile."""

    slot: _Slot
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
