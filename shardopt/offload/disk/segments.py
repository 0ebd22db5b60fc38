"""Chunks of streams in a file, each in two copies: what is written never overwrites what holds.

A table in memory says for each segment (one chunk of one stream) which copy holds and what its checksum is::

    file    header | exp_avg: chunk 0, 1, 2 | the other copy: 0, 1, 2 | exp_avg_sq: ...
    table                     ^  ^               ^                      what holds now: copies of several steps may mix

New values go to the other copy; the table follows when all that belongs together was written, in memory, in one go. The
file is worth nothing without the table: it dies with the process, and checkpoints are what lasts.
"""

from functools import partial
from typing import NamedTuple

from ...errors import OffloadError
from .checksum import checksum
from .file_io import PAGE, Part
from .ownership import OwnedFile
from .pipeline import Move


class Segment(NamedTuple):
    """One chunk of one stream in the file. Figures are bytes."""

    offset: int  # of its first copy
    stride: int  # from there to the second
    nbytes: int  # a whole number of pages

    def at(self, copy: int) -> int:
        return self.offset + copy * self.stride


class Held(NamedTuple):
    """What a segment holds."""

    copy: int
    checksum: int


Table = dict[Segment, Held | None]  # None, as what is not in it: zeros that were never written


class Segments:
    """Reads and writes segments of one file."""

    def __init__(self, owned: OwnedFile):
        self._owned = owned  # not closed while a transfer that nobody waits for any more still runs
        self._file = owned.file
        self._held: Table = {}
        self._pending: Table | None = None  # what was written since begin()
        self._end = PAGE  # of what is reserved
        self._ends: dict[int, int] = {}  # begin -> end of ranges in use
        self._free: dict[int, int] = {}  # end -> begin of ranges that were given back

    # -- what belongs together -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether what is written belongs to something larger."""
        return self._pending is not None

    def begin(self) -> None:
        assert self._pending is None
        self._pending = {}

    def commit(self) -> None:
        assert self._pending is not None
        self._held.update(self._pending)  # one call, which no signal can cut in two
        self._pending = None

    def drop(self) -> None:
        """Transfers that are still under way go on writing to a table that is gone."""
        self._pending = None

    # -- for a step: on threads, while others are read and written -------------------------------------------------

    def reader(self, segment: Segment) -> Move:
        """What reads the values from before ``begin``."""
        return partial(self._read, segment, self._held.get(segment))

    def writer(self, segment: Segment) -> Move:
        assert self._pending is not None
        return partial(self._write, segment, self._pending)

    # -- for all else -----------------------------------------------------------------------------------------------

    def loader(self, segment: Segment) -> Move:
        """What reads the values that were last written, also since ``begin``."""
        self._owned.check_process()
        held = self._held.get(segment)
        return partial(self._read, segment, held if self._pending is None else self._pending.get(segment, held))

    def forget(self, segment: Segment) -> None:
        """Zeros again."""
        assert self._pending is not None
        self._pending[segment] = None

    def _read(self, segment: Segment, held: Held | None, part: Part) -> None:
        if held is None:
            part.bytes.fill(0)
            return
        for _ in range(2):  # a second time, in case it was not the disk that was wrong
            self._file.read(part.memory, segment.at(held.copy))
            if checksum(part.words) == held.checksum:
                return
        raise OffloadError(
            f"{segment.nbytes} bytes at {segment.at(held.copy)} of {self._file.name} are not those that were written "
            "there: the disk lost them, or somebody wrote to the file. The update would have gone on from other "
            "states. Load a checkpoint (load_state_dict), and look after the disk."
        )

    def _write(self, segment: Segment, pending: Table, part: Part) -> None:
        held = self._held.get(segment)
        copy = 0 if held is None else 1 - held.copy
        self._file.write(part.memory, segment.at(copy))
        pending[segment] = Held(copy, checksum(part.words))

    # -- room ------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """Where a range of so many bytes begins, for which the disk has room."""
        begin = self._end
        if nbytes:
            self._file.reserve(begin, nbytes)
            self._end += nbytes
            self._ends[begin] = self._end
        return begin

    def give_back(self, begin: int) -> None:
        """The end of the file goes back to the system; what lies before others stays until they go."""
        end = self._ends.pop(begin)
        self._free[end] = begin
        self._held = {segment: held for segment, held in self._held.items() if not begin <= segment.offset < end}
        while self._end in self._free:
            self._end = self._free.pop(self._end)
        self._file.truncate(self._end)
