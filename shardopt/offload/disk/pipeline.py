"""Reading ahead of an update and writing behind it, through a few slots of memory.

::

    slot 0    read 0 | update 0 | write 0 | read 3 | ...
    slot 1           read 1 | update 1 | write 1 | ...
    slot 2                  read 2 | update 2 | ...

A turn is one chunk's way through a slot. Turns enter in their order, as slots come free; their transfers run on a few
threads, which release the GIL. What fails is raised by the next call of the thread that updates.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...errors import OffloadError
from .file_io import Buffer, Part

# Transfers in flight, of 4 MiB each. With as many as this a step moves what plain direct I/O does in the same memory; 8
# made it some percent slower (checksums are made on these threads too, and the update wants the cores), 3 no faster.
THREADS = 4
# One read, one updated, two written. With 5, 6 or 8 a step took no less time that could be told from noise; each is a
# chunk of all states in memory.
SLOTS = 4

Move = Callable[[Part], None]


class Turn:
    """One chunk's way.

    Args:
        sizes: bytes of each of its parts, whole pages.
        reads: fill their part of the slot; none where it is not read.
        writes: take it away; none where it is not written.
    """

    def __init__(self, sizes: Sequence[int], reads: Sequence[Move], writes: Sequence[Move]):
        self.sizes, self.reads, self.writes = sizes, reads, writes
        self.slot: Buffer | None = None
        self.parts: list[Part] = []
        self.is_read = threading.Event()
        self.left = len(reads)  # transfers of the phase that it is in


class Pipeline:
    """Runs turns. One thread at a time calls its methods."""

    def __init__(self, deadline: float):
        """``deadline`` of each wait, in seconds."""
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="shardopt-io")
        self._changed = threading.Condition()
        self._waiting: deque[Turn] = deque()
        self._free: list[Buffer] = []
        self._made = 0
        self._slot_bytes = 0
        self._busy = 0  # transfers that were handed to the threads
        self._problem: Exception | None = None
        self._is_abandoned = False

    @property
    def buffer_bytes(self) -> int:
        return self._made * self._slot_bytes

    def prefetch(self, turns: Sequence[Turn]) -> None:
        """These will be fetched, in this order."""
        largest = max((sum(turn.sizes) for turn in turns), default=0)
        if largest > self._slot_bytes:
            self._free, self._made, self._slot_bytes = [], 0, largest
        while self._made < min(SLOTS, len(turns)):
            self._free.append(Buffer(self._slot_bytes))
            self._made += 1
        with self._changed:
            self._waiting.extend(turns)
            self._admit()

    def _admit(self) -> None:
        """Under the lock: turns enter while there are slots."""
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            turn.slot = self._free.pop()
            turn.parts = turn.slot.parts(turn.sizes)
            self._hand_over(turn, turn.reads)

    def _hand_over(self, turn: Turn, moves: Sequence[Move]) -> None:
        turn.left = len(moves)
        self._busy += len(moves)
        if not moves:
            self._end_phase(turn)
            return
        for move, part in zip(moves, turn.parts, strict=True):
            self._pool.submit(self._run, turn, move, part)

    def _run(self, turn: Turn, move: Move, part: Part) -> None:
        problem: Exception | None = None
        try:
            if self._problem is None and not self._is_abandoned:
                move(part)
        except Exception as error:
            problem = error
        with self._changed:
            self._problem = self._problem or problem
            self._busy -= 1
            turn.left -= 1
            if not turn.left:
                self._end_phase(turn)
            self._changed.notify_all()

    def _end_phase(self, turn: Turn) -> None:
        if not turn.is_read.is_set():
            turn.is_read.set()
            return
        if not self._is_abandoned:
            assert turn.slot is not None
            self._free.append(turn.slot)
            turn.slot, turn.parts = None, []
            self._admit()

    def fetch(self, turn: Turn) -> list[Part]:
        """Its parts, read."""
        self._wait(lambda: turn.is_read.is_set() or self._problem is not None, "a chunk to be read")
        self._raise_problem()
        return turn.parts

    def write_back(self, turn: Turn) -> None:
        with self._changed:
            self._hand_over(turn, turn.writes)

    def flush(self) -> None:
        """Until everything is written."""
        self._wait(lambda: not self._busy, "chunks to be written")
        self._raise_problem()

    def sweep(self, turns: Sequence[Turn], acts: Sequence[Move]) -> None:
        """Turns of one part from their reads to the end of their writes, and in between these on the calling thread.

        Slots that it makes go with it: states that only rest take no memory.

        Raises:
            OffloadError: a transfer failed, or does not end: none is begun any more.
        """
        self.settle()
        had_slots = self._made > 0
        try:
            self.prefetch(turns)
            for turn, act in zip(turns, acts, strict=True):
                (part,) = self.fetch(turn)
                act(part)
                self.write_back(turn)
            self.flush()
        except BaseException:
            self.abandon()
            raise
        if not had_slots:
            self._drop_slots()

    def abandon(self) -> None:
        """Nothing more is begun, and what was read is dropped; ``settle`` waits for what still runs."""
        with self._changed:
            self._is_abandoned = True
            self._waiting.clear()
            self._drop_slots()  # those of turns that were read and never written would not come back

    def _drop_slots(self) -> None:
        self._free, self._made, self._slot_bytes = [], 0, 0

    def settle(self) -> None:
        """Until nothing runs that was abandoned.

        Raises:
            OffloadError: it does not end.
        """
        self._wait(lambda: not self._busy, "transfers of an earlier step to end")
        self._problem, self._is_abandoned = None, False

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(until, self._deadline):
                raise OffloadError(
                    f"waited {self._deadline:g} s for {what}: the disk does not answer. Nothing was changed; make the "
                    "call again once it does."
                )

    def close(self) -> None:
        """Nothing runs any more when it returns: a descriptor that is closed then may become another file's.

        Raises:
            OffloadError: a transfer does not end; nothing was closed.
        """
        self.abandon()
        self.settle()
        self._pool.shutdown(wait=False)
