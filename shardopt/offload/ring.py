"""Masters and states in host memory, streamed through a ring of slots on the device, where the update runs.

::

    slot 0    load 0 | update 0 | store 0 | load 3 | ...         three CUDA streams at a time:
    slot 1           | load 1   | update 1 | store 1 | ...       copies to the device, kernels, copies to the host
    slot 2                      | load 2   | update 2 | ...

A slot is a staging buffer. A chunk is loaded into a slot after the copy that stores the slot's last chunk. The first
load of a step waits for the last store of the step before, which may be of the same host memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .host import views_of
from .store import Fetched, Store
from .streams import Slot

if TYPE_CHECKING:
    from .host import HostStorage, HostStore
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
        self._waiting: deque[Chunk] = deque()
        self._staged: dict[Chunk, Slot] = {}  # that a chunk's streams and gradients are loaded into
        self._stored: Mark = None  # after the last copy to the host; None once the host has waited for it
        self._read: Mark = None  # after the last copy of gradients to the device, likewise
        # Weak: a cycle would keep slots alive, and pages registered whose memory is gone.
        wait = weakref.WeakMethod(self.wait_for_copies)

        def wait_if_alive() -> None:
            method = wait()
            if method is not None:
                method()

        host.wait_for_copies = wait_if_alive

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostStorage:
        home = self._host.home(numel, dtype, device)
        self.update_here(home)
        return home

    def update_here(self, home: ShardStorage) -> None:
        """Lets updates of this shard run on the device from now on."""
        home.device, home.updates_on_host = self._device, False

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._staged = {}
        self._waiting = deque(chunk for chunk in chunks if _moves(chunk))
        self._make_slots()
        for slot in self._slots:
            if self._stored is not None:
                # Another slot's last copy may be later than its own, and of the same host memory.
                slot.mark = self._stored
            self._load(slot)

    def _make_slots(self) -> None:
        nbytes = max((Slot.nbytes([*views_of(chunk), *chunk.gradients]) for chunk in self._waiting), default=0)
        if nbytes > self._slot_bytes:
            self.wait_for_copies()  # the allocator knows the kernels that still use the old slots, but not the copies
            self._slots, self._slot_bytes = [], nbytes
        while len(self._slots) < min(SLOTS, len(self._waiting)):
            # The allocator may hand out memory that kernels launched so far still use: the first copy waits for them.
            memory = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
            self._slots.append(Slot(memory, self._streams.now()))

    def _load(self, slot: Slot) -> None:
        if self._waiting:
            chunk = self._waiting.popleft()
            self._staged[chunk], on_host = slot, [*views_of(chunk), *chunk.gradients]
            slot.mark = self._streams.to_device([*zip(slot.stage(on_host), on_host, strict=True)], slot.mark)
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

    def wait_for_copies(self) -> None:
        """Waits until host memory holds what was written back."""
        stored = self._stored  # a local copy: a thread that answers other ranks calls this too
        if stored is not None:
            self._streams.synchronize(stored)
            self._stored = None

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        return {"device": len(self._slots) * self._slot_bytes}

    def free_buffers(self) -> None:
        """Frees all buffers. The next step makes those that it needs."""
        self.wait_for_copies()
        self._slots, self._slot_bytes, self._staged = [], 0, {}

    def close(self) -> None:
        self.free_buffers()
        self._host.close()


def _moves(chunk: Chunk) -> bool:
    """True if any part of the chunk must be copied."""
    return bool(chunk.names or chunk.gradients)
