"""Chunks of streams in a file, each in two copies: a write never overwrites the copy that holds.

A table in memory says for each segment (one chunk of one stream) which copy holds, and its checksum::

    file    header | exp_avg: chunk 0, 1, 2 | the other copy: 0, 1, 2 | exp_avg_sq: ...
    table                     ^  ^               ^                      what holds now: copies of several steps may mix

New values go to the other copy. The table follows, in one call in memory, when all writes of a transaction have ended.
The file is worthless without the table: it dies with the process, and only checkpoints last.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import OffloadError
from .checksum import checksum
from .file_io import PAGE, padded

if TYPE_CHECKING:
    from .file_io import TransferBuffer
    from .ownership import OwnedFile
    from .pipeline import Move


class Segment(NamedTuple):
    """One chunk of one stream in the file, on pages of its own."""

    offset: int  # in bytes: of its first copy
    stride: int  # in bytes: from there to the second
    dtype: torch.dtype
    num_items: int

    @property
    def nbytes(self) -> int:
        """A whole number of pages."""
        return padded(self.num_items * self.dtype.itemsize)

    def at(self, copy: int) -> int:
        return self.offset + copy * self.stride

    def items(self, part: TransferBuffer) -> torch.Tensor:
        """Returns the items of the segment that was read into this buffer, 1D."""
        return part.items(self.dtype, self.num_items)


Held = tuple[int, int]  # which copy of a segment is valid, and its checksum
Table = dict[Segment, Held | None]  # None, or no entry: zeros that were never written


class Segments:
    """Reads and writes segments of one file."""

    def __init__(self, owned: OwnedFile):
        self._owned = owned  # kept: its file must not be closed while an abandoned transfer still runs
        self._file = owned.file
        self._held: Table = {}
        self._pending: Table | None = None  # writes since begin()
        self._end = PAGE  # end of the reserved part of the file
        self._ends: dict[int, int] = {}  # start -> end of ranges in use
        self._free: dict[int, int] = {}  # end -> start of ranges that were given back

    # -- transactions ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True within a transaction."""
        return self._pending is not None

    def begin(self) -> None:
        assert self._pending is None
        self._pending = {}

    def commit(self) -> None:
        assert self._pending is not None
        self._held.update(self._pending)  # one call, which no signal can cut in two
        self._pending = None

    def drop(self) -> None:
        """Drops the transaction. Transfers that still run write to a table that nobody reads."""
        self._pending = None

    # -- for a step: on threads, while other segments move ----------------------------------------------------------

    def writer(self, segment: Segment) -> Move:
        assert self._pending is not None
        return partial(self._write, segment, self._pending)

    # -- for all else -----------------------------------------------------------------------------------------------

    def loader(self, segment: Segment) -> Move:
        """Returns the call that reads the newest values, also those since ``begin``."""
        self._owned.check_process()
        held = self._held.get(segment)
        return partial(self._read, segment, held if self._pending is None else self._pending.get(segment, held))

    def forget(self, segment: Segment) -> None:
        """Makes the segment zeros again."""
        assert self._pending is not None
        self._pending[segment] = None

    def _read(self, segment: Segment, held: Held | None, part: TransferBuffer) -> None:
        if held is None:
            part.bytes.fill(0)
            return
        copy, expected = held
        for _ in range(2):  # a second time: the first read may have failed on the bus, with intact data on the disk
            self._file.read(part.memory, segment.at(copy))
            if checksum(part.words) == expected:
                return
        raise OffloadError(
            "load a checkpoint (load_state_dict) and check the disk: "
            f"{segment.nbytes} bytes at {segment.at(copy)} of {self._file.name} are not those that were written "
            "there: the disk lost them, or somebody wrote to the file. The update would have used wrong states."
        )

    def _write(self, segment: Segment, pending: Table, part: TransferBuffer) -> None:
        held = self._held.get(segment)
        copy = 0 if held is None else 1 - held[0]
        self._file.write(part.memory, segment.at(copy))
        pending[segment] = copy, checksum(part.words)

    # -- room ------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """Reserves disk space for a range; returns its offset."""
        begin = self._end
        if nbytes:
            self._file.reserve(begin, nbytes)
            self._end += nbytes
            self._ends[begin] = self._end
        return begin

    def give_back(self, begin: int) -> None:
        """Frees a range. The system gets it back once no range after it is in use."""
        end = self._ends.pop(begin)
        self._free[end] = begin
        self._held = {segment: held for segment, held in self._held.items() if not begin <= segment.offset < end}
        while self._end in self._free:
            self._end = self._free.pop(self._end)
        self._file.truncate(self._end)
