"""Updates on the CPU of params that are on a device: gradients come down, params go up, and nothing else moves.

::

    down      | grads 0 | grads 1 | grads 2 | grads 3 | ...        through slots of pinned host memory
    CPU                 | update 0    | update 1    | update 2
    up                                | params 0    | params 1     into the params, which whoever reads them waits for

For a bf16 param with fp32 masters and states that is 2 bytes down and 2 up, where streaming the states through the
device takes 12 and 12. The update writes to a copy of this rank's params in host memory, of which only what it wrote
goes up. Params that an update begins with (no fp32 master is kept) come down before it. Gradients that rest in host
memory are read there.

Around a store of host memory or of a disk. A disk's updates count only when all ranks have voted, and so its params go
up with the vote. Not measured on a GPU yet.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .pinned import Pages
from .store import Chunk, Fetched, ShardStorage, Store
from .streams import Copy, CopyStreams, Mark

SLOTS = 3  # one updated from, two on their way
_ALIGNMENT = 64  # bytes, of each gradient in a slot: a line of cache


class _Turn(NamedTuple):
    """A chunk on its way to the update."""

    inside: Chunk  # with params in host memory
    slot: torch.Tensor  # 1D uint8
    gradients: list[torch.Tensor]  # in the slot
    here: Mark


class CpuStepStore:
    """Has chunks that rest in host memory or on a disk updated on the CPU."""

    note: str | None = None

    def __init__(self, streams: CopyStreams, pages: Pages, rests: Store):
        """``rests`` fetches chunks into host memory."""
        self.tier, self.is_final = rests.tier, rests.is_final
        self._streams, self._pages, self._rests = streams, pages, rests
        # Where updates write this rank's params, 1D in host memory.
        self._params: weakref.WeakKeyDictionary[ShardStorage, torch.Tensor] = weakref.WeakKeyDictionary()
        self._slots: list[torch.Tensor] = []
        self._waiting: deque[tuple[Chunk, Chunk]] = deque()
        self._behind: Mark = None  # what makes the gradients
        self._turns: dict[Chunk, _Turn] = {}
        self._unsent: list[tuple[Chunk, Chunk]] = []  # whose params wait for the vote
        self._sent: Mark = None  # behind the last copy of params to the device

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ShardStorage:
        home = self._rests.home(numel, dtype, torch.device("cpu"))
        self.step_here(home)
        return home

    def step_here(self, home: ShardStorage) -> None:
        """Its updates run on the CPU from now on."""
        home.device, home.is_apart = torch.device("cpu"), True

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._end_turns()
        inside = [self._inside(chunk) for chunk in chunks]
        self._rests.prefetch(inside)
        self._make_slots(max((_slot_bytes(chunk) for chunk in chunks), default=0), len(chunks))
        self._waiting, self._behind = deque(zip(chunks, inside, strict=True)), self._streams.now()
        for slot in self._slots:
            self._enter(slot)

    def _inside(self, chunk: Chunk) -> Chunk:
        if chunk.param is None:
            return chunk
        if chunk.home not in self._params:
            numel = chunk.home.chunks()[-1][1]
            self._params[chunk.home] = self._pages.zeros(numel, chunk.param.dtype)
        return replace(chunk, param=self._params[chunk.home][chunk.start : chunk.stop])

    def _make_slots(self, nbytes: int, most: int) -> None:
        if self._slots and self._slots[0].numel() < nbytes:
            self._pages.give_back(self._slots)
            self._slots = []
        nbytes = self._slots[0].numel() if self._slots else nbytes
        while len(self._slots) < min(SLOTS, most):
            self._slots.append(self._pages.zeros(nbytes, torch.uint8))

    def _enter(self, slot: torch.Tensor) -> None:
        if not self._waiting:
            return
        chunk, inside = self._waiting.popleft()
        gradients, start = [], 0
        for each in chunk.gradients:
            gradients.append(slot[start : start + each.nbytes].view(each.dtype))
            start += _padded(each.nbytes)
        copies = [*map(Copy, gradients, chunk.gradients)]
        if chunk.param is not None and inside.param is not None and chunk.reads_param:
            copies.append(Copy(inside.param, chunk.param))
        self._turns[chunk] = _Turn(inside, slot, gradients, self._streams.to_host(copies, self._behind))

    def fetch(self, chunk: Chunk) -> Fetched:
        turn = self._turns[chunk]
        # Gradients come behind kernels that run behind the last step's params: those are no longer on their way up.
        self._streams.synchronize(turn.here)
        streams, param, _ = self._rests.fetch(turn.inside)
        return Fetched(streams, param, turn.gradients)

    def write_back(self, chunk: Chunk) -> None:
        turn = self._turns.pop(chunk)
        self._rests.write_back(turn.inside)
        self._enter(turn.slot)
        if self.is_final:
            self._send(chunk, turn.inside)
        else:
            self._unsent.append((chunk, turn.inside))

    def _send(self, chunk: Chunk, inside: Chunk) -> None:
        if chunk.param is not None and inside.param is not None:
            copies = [Copy(chunk.param[each], inside.param[each]) for each in chunk.written]
            # Behind all that still reads the params; what is asked for from now on reads these.
            self._sent = self._streams.to_device(copies, self._streams.now())
            self._streams.wait(self._sent)

    def flush(self) -> None:
        self._rests.flush()

    def begin(self) -> None:
        self._rests.begin()

    def commit(self) -> None:
        self._rests.commit()
        for chunk, inside in self._unsent:
            self._send(chunk, inside)
        self._unsent = []

    def roll_back(self) -> None:
        self._rests.roll_back()
        self._unsent = []

    def _end_turns(self) -> None:
        """Until nothing is copied that a step which failed had asked for."""
        for turn in self._turns.values():
            self._streams.synchronize(turn.here)
        self._turns = {}
        self._waiting.clear()

    def settle(self) -> None:
        """Until nothing is copied: also params of the last step."""
        self._end_turns()
        if self._sent is not None:
            self._streams.synchronize(self._sent)
            self._sent = None

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        found = dict(self._rests.buffer_bytes)
        own = (*self._params.values(), *self._slots)
        return {**found, "host": found.get("host", 0) + sum(each.nbytes for each in own)}

    def drop_buffers(self) -> None:
        """Another step makes what it needs."""
        self.settle()
        self._pages.give_back([*self._params.values(), *self._slots])
        self._params.clear()
        self._slots = []

    def close(self) -> None:
        self.drop_buffers()
        self._rests.close()


def _slot_bytes(chunk: Chunk) -> int:
    return sum(_padded(each.nbytes) for each in chunk.gradients)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
