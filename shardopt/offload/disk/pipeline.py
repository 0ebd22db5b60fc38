"""Reads chunks ahead of an update and writes them after it, through a few slots.

::

    slot 0    read 0 | update 0 | write 0 | read 3 | ...
    slot 1           read 1 | update 1 | write 1 | ...
    slot 2                  read 2 | update 2 | ...

A slot is a staging buffer. A job is one chunk's way through a slot: read, update, write. Jobs enter in their order, as
slots become free. Their transfers run on a few threads, which release the GIL. An error of a transfer is raised by the
next call of the thread that updates.

The first jobs of a step may be read before it begins. Nobody waits for them then, and an error of theirs is raised
nowhere: the step reads that chunk again.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...errors import OffloadError
from .file_io import TransferBuffer

# Transfers under way, of 4 MiB each. 4 move as much in a step as plain direct I/O in the same memory. 8 make a step
# some percent slower (these threads compute checksums too, and the update needs the cores), 3 make it no faster.
THREADS = 4
# One for a read, one for the update, two for writes. With 5, 6 or 8 slots a step takes no measurably less time, and
# each slot holds a chunk of all states in memory.
SLOTS = 4

Move = Callable[[TransferBuffer], None]


class ChunkJob:
    """One chunk's way through a slot.

    Args:
        sizes: bytes of each part, whole pages.
        reads: each fills its part of the slot; empty if the chunk is not read.
        writes: each writes its part to the file; empty if the chunk is not written.
    """

    def __init__(self, sizes: Sequence[int], reads: Sequence[Move], writes: Sequence[Move]):
        self.sizes, self.reads, self.writes = sizes, reads, writes
        self.slot: TransferBuffer | None = None
        self.parts: list[TransferBuffer] = []
        self.is_read = threading.Event()
        self.left = len(reads)  # transfers of the current phase that have not ended
        self.is_ahead = False  # it is read before anybody needs it
        self.has_failed = False  # while it was ahead
        self.is_dropped = False  # its slot becomes free once it is read


class Pipeline:
    """Runs jobs. One thread at a time may call the methods."""

    def __init__(self, deadline: float):
        """``deadline`` of each wait, in seconds."""
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="shardopt-io")
        self._changed = threading.Condition()
        self._waiting: deque[ChunkJob] = deque()
        self._free: list[TransferBuffer] = []
        self._made = 0
        self._slot_bytes = 0
        self._ahead: list[ChunkJob] = []
        self._busy = 0  # transfers that the threads have not ended
        self._problem: Exception | None = None
        self._is_abandoned = False

    @property
    def buffer_bytes(self) -> int:
        return self._made * self._slot_bytes

    def read_ahead(self, jobs: Sequence[ChunkJob]) -> list[ChunkJob]:
        """Begins to read jobs that a later ``prefetch`` may have, into free slots. Returns those that it began."""
        with self._changed:
            fit = [job for job in jobs if sum(job.sizes) <= self._slot_bytes][: len(self._free)]
            for job in fit:
                job.is_ahead = True
            self._ahead += fit
            self._waiting.extend(fit)
            self._admit()
        return fit

    def take(self, job: ChunkJob) -> bool:
        """Returns whether a job that was begun ahead is as good as a new one: from now on its errors are raised."""
        with self._changed:
            if job.has_failed:
                return False
            job.is_ahead = False
            self._ahead.remove(job)
            return True

    def drop_ahead(self) -> None:
        """Drops what was begun ahead and not taken. Slots become free as reads that are under way end."""
        with self._changed:
            dropped, self._ahead = self._ahead, []
            for job in dropped:
                job.is_dropped = True
                if job.is_read.is_set():
                    self._end_phase(job)

    def prefetch(self, jobs: Sequence[ChunkJob]) -> None:
        """Begins to read these jobs, which ``fetch`` takes in this order, but for those that were taken."""
        largest = max((sum(job.sizes) for job in jobs), default=0)
        if largest > self._slot_bytes:
            self._free, self._made, self._slot_bytes = [], 0, largest
        while self._made < min(SLOTS, len(jobs)):
            self._free.append(TransferBuffer.allocate(self._slot_bytes))
            self._made += 1
        with self._changed:
            self._waiting.extend([job for job in jobs if job.slot is None])
            self._admit()

    def _admit(self) -> None:
        """Lets jobs enter while slots are free. The caller holds the lock."""
        while self._waiting and self._free:
            job = self._waiting.popleft()
            job.slot = self._free.pop()
            job.parts = job.slot.split(job.sizes)
            self._hand_over(job, job.reads)

    def _hand_over(self, job: ChunkJob, moves: Sequence[Move]) -> None:
        job.left = len(moves)
        self._busy += len(moves)
        if not moves:
            self._end_phase(job)
            return
        for move, part in zip(moves, job.parts, strict=True):
            try:
                self._pool.submit(self._run, job, move, part)
            except RuntimeError:
                # Python's thread pools refuse work once the main thread has ended, and another rank may still read
                # states here. Test: test_at_the_end_of_a_script.
                if threading.main_thread().is_alive():
                    raise
                self._run(job, move, part)

    def _run(self, job: ChunkJob, move: Move, part: TransferBuffer) -> None:
        problem: Exception | None = None
        try:
            if self._problem is None and not self._is_abandoned:
                move(part)
        except Exception as error:
            problem = error
        with self._changed:
            if job.is_ahead:
                job.has_failed |= problem is not None
            else:
                self._problem = self._problem or problem
            self._busy -= 1
            job.left -= 1
            if not job.left:
                self._end_phase(job)
            self._changed.notify_all()

    def _end_phase(self, job: ChunkJob) -> None:
        if not job.is_read.is_set():
            job.is_read.set()
            if not job.is_dropped:
                return
        if not self._is_abandoned:
            assert job.slot is not None
            if len(job.slot.bytes) == self._slot_bytes:  # else slots have become larger since it was begun ahead
                self._free.append(job.slot)
            job.slot, job.parts = None, []
            self._admit()

    def fetch(self, job: ChunkJob) -> list[TransferBuffer]:
        """Returns the parts of the job, once they are read."""
        self._wait(lambda: job.is_read.is_set() or self._problem is not None, "a chunk to be read")
        self._raise_problem()
        return job.parts

    def write_back(self, job: ChunkJob) -> None:
        with self._changed:
            self._hand_over(job, job.writes)

    def flush(self) -> None:
        """Waits until everything is written."""
        self._wait(lambda: not self._busy, "chunks to be written")
        self._raise_problem()

    def sweep(self, jobs: Sequence[ChunkJob], acts: Sequence[Move]) -> None:
        """Runs jobs of one part each from read to write; calls ``acts`` in between, on the calling thread.

        Frees the slots that it makes: states that are offloaded and not updated take no memory.

        Raises:
            OffloadError: a transfer failed or does not end; no further one begins.
        """
        self.wait_idle()
        had_slots = self._made > 0
        try:
            self.prefetch(jobs)
            for job, act in zip(jobs, acts, strict=True):
                (part,) = self.fetch(job)
                act(part)
                self.write_back(job)
            self.flush()
        except BaseException:
            self.abandon()
            raise
        if not had_slots:
            self._drop_slots()

    def abandon(self) -> None:
        """Begins no more transfers and drops what was read. ``wait_idle`` waits for transfers that still run."""
        with self._changed:
            self._is_abandoned = True
            self._waiting.clear()
            self._ahead = []
            self._drop_slots()  # slots of jobs that were read but not written would never become free

    def _drop_slots(self) -> None:
        self._free, self._made, self._slot_bytes = [], 0, 0

    def wait_idle(self) -> None:
        """Waits until no transfer runs any more that was abandoned, or dropped.

        Raises:
            OffloadError: a transfer does not end.
        """
        self._wait(lambda: self._busy == self._busy_ahead(), "transfers of an earlier step to end")
        self._problem, self._is_abandoned = None, False

    def _busy_ahead(self) -> int:
        return sum(job.left for job in self._ahead if not job.is_read.is_set())

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(until, self._deadline):
                raise OffloadError(
                    f"make the call again later: the disk does not answer. Waited {self._deadline:g} s for {what}. "
                    "Nothing was changed."
                )

    def close(self) -> None:
        """Returns once no transfer runs: a closed descriptor may become the descriptor of another file.

        Raises:
            OffloadError: a transfer does not end; nothing was closed.
        """
        self.abandon()
        self.wait_idle()
        self._pool.shutdown(wait=False)
