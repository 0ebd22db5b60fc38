"""Masters and states in a file: read chunk by chunk, updated, and written beside what they replace.

Each stream lies in the file twice, and a table in memory says for each chunk which copy holds and what its checksum
is. New values go to the other copy::

    file    header | exp_avg: chunk 0, 1, 2 | the other copy: 0, 1, 2 | exp_avg_sq: ...
    table                     ^  ^               ^                      what holds now: copies of several steps may mix

So a step that fails anywhere has changed nothing: the table is written to last, in memory, in one go, once every rank
has said that all it wrote is on its disk. Params are updated where they lie, and kept until then to be put back. The
file is worth nothing without the table: it dies with the process, and checkpoints are what lasts.
"""

import ctypes
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import OffloadError
from .checksum import checksum, compile_checksum
from .file_io import PAGE, Buffer, Part, padded
from .ownership import OwnedFile
from .pipeline import Pipeline, Turn
from .store import Chunk

_FP32 = 4  # bytes


class Segment(NamedTuple):
    """One chunk of one stream in the file. Figures are bytes."""

    offset: int  # of its first copy
    stride: int  # from there to the second
    nbytes: int  # a whole number of pages

    def at(self, copy: int) -> int:
        return self.offset + copy * self.stride


class Held(NamedTuple):
    """What a segment holds now."""

    copy: int
    checksum: int


Table = dict[Segment, Held | None]  # None, as what is not in it: zeros that were never written


class DiskHome:
    """The streams of one shard, by name: where in the file they begin."""

    def __init__(self, store: "DiskStore", numel: int, dtype: torch.dtype):
        self._store, self._numel = store, numel
        self._chunk_numel = store.chunk_bytes // _FP32
        self._offsets: dict[str, int] = {}
        self._extents: list[int] = []  # where what was reserved begins
        self.kept = torch.empty(numel, dtype=dtype)  # 1D: params before the step that is under way

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._offsets)

    @property
    def nbytes(self) -> dict[str, int]:
        return dict.fromkeys(self._offsets, self._numel * _FP32)

    @property
    def _stride(self) -> int:
        return padded(self._numel * _FP32)

    def ensure(self, names: Iterable[str]) -> None:
        fresh = [name for name in dict.fromkeys(names) if name not in self._offsets]
        if fresh:
            offset = self._store.reserve(2 * self._stride * len(fresh))
            self._extents.append(offset)
            self._offsets.update({name: offset + 2 * self._stride * index for index, name in enumerate(fresh)})

    def chunks(self) -> Sequence[tuple[int, int]]:
        starts = range(0, self._numel, self._chunk_numel)
        return [(start, min(start + self._chunk_numel, self._numel)) for start in starts]

    def segment(self, name: str, start: int) -> Segment:
        """The one that begins at element ``start`` of the shard."""
        nbytes = padded(min(self._chunk_numel, self._numel - start) * _FP32)
        return Segment(self._offsets[name] + start * _FP32, self._stride, nbytes)

    def _covering(self, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """(first element of a segment, from, to) within it, for every segment that [start, stop) touches."""
        for first in range(start // self._chunk_numel * self._chunk_numel, stop, self._chunk_numel):
            yield first, max(start - first, 0), min(stop - first, self._chunk_numel)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=torch.float32)
        for first, low, high in self._covering(start, stop):
            segment = self.segment(name, first)
            with self._store.scratch(segment) as part:
                self._store.load(segment, part)
                values[first + low - start : first + high - start] = part.floats(high)[low:]
        return values

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        stop = start + values.numel()
        with self._store.together():
            for first, low, high in self._covering(start, stop):
                segment = self.segment(name, first)
                with self._store.scratch(segment) as part:
                    if low or first + high < min(first + self._chunk_numel, self._numel):
                        self._store.load(segment, part)
                    part.floats(high)[low:] = values[first + low - start : first + high - start]
                    self._store.save(segment, part)

    def renew(self, zeroed: Collection[str]) -> None:
        with self._store.together():
            for name in zeroed:
                for start, _ in self.chunks():
                    self._store.forget(self.segment(name, start))

    def release(self) -> None:
        for offset in reversed(self._extents):
            self._store.give_back(offset)
        self._offsets, self._extents = {}, []


class DiskStore:
    """The homes of one optimizer on this rank, in one file of its own."""

    tier = "disk"
    is_final = False

    def __init__(self, root: Path, chunk_bytes: int, deadline: float):
        """
        Args:
            root: an existing directory, or one to be made.
            chunk_bytes: of one stream in a chunk: what one transfer moves.
            deadline: of each wait for the disk, in seconds.

        Raises:
            OffloadError: no file can be made there that is safe from others.
        """
        compile_checksum()
        self.chunk_bytes = padded(max(chunk_bytes, PAGE))
        self._owned = OwnedFile(root)
        self._file = self._owned.file
        self._pipeline = Pipeline(deadline)
        self._end = PAGE  # of what is reserved
        self._free: dict[int, int] = {}  # end -> begin of ranges that homes gave back
        self._ends: dict[int, int] = {}  # begin -> end of what they have
        self._held: Table = {}
        self._pending: Table | None = None  # what was written since begin()
        self._turns: dict[Chunk, Turn] = {}
        self._fetched: list[Chunk] = []  # whose params may have been updated
        self._kept_bytes = 0
        self._scratch: Buffer | None = None
        self._scratch_is_used = threading.Lock()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> DiskHome:
        assert device.type == "cpu"
        home = DiskHome(self, numel, dtype)
        self._kept_bytes += home.kept.nbytes
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        assert self._pending is not None
        self._turns = {chunk: self._turn(chunk, self._pending) for chunk in chunks if chunk.names}
        self._pipeline.prefetch(list(self._turns.values()))

    def _turn(self, chunk: Chunk, pending: Table) -> Turn:
        home = chunk.home
        assert isinstance(home, DiskHome)
        segments = [home.segment(name, chunk.start) for name in chunk.names]
        return Turn(
            [segment.nbytes for segment in segments],
            [partial(self._read, segment, self._held.get(segment)) for segment in segments],
            [partial(self._write, segment, pending) for segment in segments],
        )

    def fetch(self, chunk: Chunk) -> Sequence[torch.Tensor]:
        parts = self._pipeline.fetch(self._turns[chunk]) if chunk.names else []
        _copy(_kept(chunk), chunk.param)
        self._fetched.append(chunk)
        return [part.floats(chunk.stop - chunk.start) for part in parts]

    def write_back(self, chunk: Chunk) -> None:
        if chunk.names:
            self._pipeline.write_back(self._turns.pop(chunk))

    def flush(self) -> None:
        self._pipeline.flush()
        self._file.sync()

    # -- what belongs together -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """
        Raises:
            OffloadError: transfers of an earlier step do not end.
        """
        assert self._pending is None
        self._pipeline.settle()
        self._pending = {}

    def commit(self) -> None:
        assert self._pending is not None
        self._held.update(self._pending)  # one call, which no signal can cut in two
        self._pending, self._turns, self._fetched = None, {}, []

    def roll_back(self) -> None:
        # Transfers that are still under way go on writing to the table that is dropped here.
        self._pending, self._turns = None, {}
        for chunk in self._fetched:
            _copy(chunk.param, _kept(chunk))
        self._fetched = []
        self._pipeline.abandon()

    @contextmanager
    def together(self) -> Iterator[None]:
        """As between ``begin`` and ``commit``; within these, a part of what they enclose."""
        if self._pending is not None:
            yield
            return
        self.begin()
        try:
            yield
            self._file.sync()
        except BaseException:
            self.roll_back()
            raise
        self.commit()

    # -- segments --------------------------------------------------------------------------------------------------

    @contextmanager
    def scratch(self, segment: Segment) -> Iterator[Part]:
        """Memory for one segment, outside of steps."""
        with self._scratch_is_used:
            if self._scratch is None:
                self._scratch = Buffer(self.chunk_bytes)
            (part,) = self._scratch.parts([segment.nbytes])
            yield part

    def load(self, segment: Segment, part: Part) -> None:
        """What was last written, also since ``begin``."""
        held = self._held.get(segment)
        self._read(segment, held if self._pending is None else self._pending.get(segment, held), part)

    def save(self, segment: Segment, part: Part) -> None:
        assert self._pending is not None
        self._write(segment, self._pending, part)

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

    @property
    def buffer_bytes(self) -> int:
        scratch = 0 if self._scratch is None else self._scratch.nbytes
        return self._kept_bytes + self._pipeline.buffer_bytes + scratch

    def close(self) -> None:
        self._pipeline.close()
        self._owned.close()


def _kept(chunk: Chunk) -> torch.Tensor:
    assert isinstance(chunk.home, DiskHome)
    return chunk.home.kept[chunk.start : chunk.stop]


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    # torch would wake its own threads, which then spin on the cores that the update needs.
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
