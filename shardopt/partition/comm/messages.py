"""What this rank has begun in a group and waits for there: by it ranks tell that they run apart.

Messages count by their tag, collectives by their group. Two ranks that make the same calls in one order cannot both
wait for what the other one has not begun; two that do would wait until a deadline::

    rank 0   evaluates: waits in the 7th gather of a unit, which rank 1 has not begun            time ->
    rank 1   waits in the 12th collective of the group, which rank 0 has not begun

:mod:`shardopt.remote.apart` asks the other ranks where they are. A forward that no backward follows has sent nothing
but its gathers: ranks that never run it complete them, so that it ends, and the group can be used on. A gather that
trains, of a unit that no schedule has, is completed with right values.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .notes import note_of

if TYPE_CHECKING:
    import torch.distributed as dist

_FIRST_LOOK = 1.0  # seconds that a rank waits before it asks the others where they are
_FIRST_LOOK_IN_TRAINING = 0.1  # until the next step each use of a new unit may wait so long
_LAST_PAUSE = 16.0  # between two looks; it doubles from look to look


class AskingGather:
    """A gather that other ranks may not run, from its beginning to the end of its wait.

    Attributes:
        trains: False in a forward that no backward follows. True: ranks that do not run it complete it with their
            slices.
        number: among the messages of this tag.
        nbytes: of what it sends to each rank, and receives from each.
        verdict: why ranks run apart, once the others complete this gather with anything; None: its values are right.
    """

    def __init__(self, book: Book, phase: str, tag: int, peers: Sequence[int], nbytes: int, trains: bool):
        self.trains = trains
        self.phase, self.tag, self.peers, self.nbytes = phase, tag, tuple(dict.fromkeys(peers)), nbytes
        self.number = book.counts[tag]
        self.verdict: str | None = None
        self._book, self._pause = book, _FIRST_LOOK_IN_TRAINING if trains else _FIRST_LOOK
        self._looks_at = time.monotonic() + self._pause
        self._looking: threading.Thread | None = None
        book.asking[self.tag] = self

    def look(self) -> None:
        """Asks the other ranks where they are, by a thread, if this rank has waited for a while."""
        now, is_looking = time.monotonic(), self._looking is not None and self._looking.is_alive()
        # The newest can tell where ranks are; whose unit is gathered here, only its own optimizer knows. Test:
        # test_a_unit_that_is_new_to_the_schedule_is_used_by_some_ranks in tests/partition/test_ranks_apart.py.
        inquirers = self._book.inquirers[::-1]  # a copy: another thread may close an optimizer
        if now < self._looks_at or is_looking or not inquirers:
            return
        self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._looks_at = now + self._pause
        self._looking = threading.Thread(target=self._ask, args=(inquirers,), name="shardopt-apart", daemon=True)
        self._looking.start()

    def _ask(self, inquirers: Sequence[Callable[[AskingGather], bool]]) -> None:
        for inquire in inquirers if self.trains else inquirers[:1]:
            if inquire(self):
                break

    def forget(self) -> None:
        """Is called once it has been waited for."""
        self._book.asking.pop(self.tag, None)


class Book:
    """What this rank has begun in one group.

    Attributes:
        counts: of messages to all ranks, by tag.
        completed: by tag and rank: of gathers of that rank that this one completed, and did not run.
        asking: by tag: gathers that are under way, and that other ranks may not run.
        inquirers: of each optimizer, the newest one last: asks the other ranks about one of these. It returns False if
            another one may know.
    """

    def __init__(self) -> None:
        self.counts, self.completed = Counter[int](), Counter[tuple[int, int]]()
        self.asking: dict[int, AskingGather] = {}
        self.inquirers: list[Callable[[AskingGather], bool]] = []
        self.messages = 0  # sent and received
        self.boards = 0  # notice boards in memory: what a rank shows there counts by tags below 0

    def note(self, tag: int, count: int) -> None:
        """Notes that this rank has begun messages of a tag to all ranks: so many are sent and received."""
        self.counts[tag] += 1
        self.messages += count

    def begun_with(self, tag: int, rank: int) -> int:
        """Returns how many messages of a tag this rank has begun with another one."""
        return self.counts[tag] + self.completed[tag, rank]


# By thread: the group in which it waits, the tag of the message (None: a collective), what it is for, and how many
# of this tag the others must have begun (None: as many as this rank has).
WAITS: dict[int, tuple[dist.ProcessGroup, int | None, str, int | None]] = {}


@contextmanager
def waiting(
    group: dist.ProcessGroup | None,
    tag: int | None,
    phase: str,
    asking: AskingGather | None = None,
    number: int | None = None,
) -> Iterator[None]:
    """A context in which this thread waits for other ranks."""
    thread = threading.get_ident()
    if group is not None:
        WAITS[thread] = group, tag, phase, number
    try:
        yield
    finally:
        WAITS.pop(thread, None)
        if asking is not None:
            asking.forget()


def book_of(group: dist.ProcessGroup) -> Book:
    """Returns what this rank has begun in a group."""
    return note_of(group, Book)


def collectives_in(group: dist.ProcessGroup) -> int:
    """Returns how many collectives of host memory this rank has begun in a group, by whatever library."""
    backend: Any = group._get_backend(torch.device("cpu"))  # not begun(): it counts a backend of two devices twice
    return int(backend._get_sequence_number_for_group()) - book_of(group).messages
