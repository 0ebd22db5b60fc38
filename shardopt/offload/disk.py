"""Masters and states in a file: read chunk by chunk, updated, and written beside what they replace.

A step that fails anywhere has changed nothing: what it wrote counts only once every rank has said that all it wrote is
on its disk. Params are updated where they lie, and kept until then to be put back.
"""

import ctypes
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .checksum import compile_checksum
from .file_io import PAGE, padded
from .ownership import OwnedFile
from .pipeline import Pipeline, Turn
from .segments import Segment, Segments
from .store import Chunk

_FP32 = 4  # bytes


class DiskHome:
    """The streams of one shard, by name: where in the file they begin."""

    def __init__(self, store: "DiskStore", numel: int, dtype: torch.dtype):
        self._store, self._segments, self._numel = store, store.segments, numel
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
            offset = self._segments.reserve(2 * self._stride * len(fresh))
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
            with self._segments.scratch(segment) as part:
                self._segments.load(segment, part)
                values[first + low - start : first + high - start] = part.floats(high)[low:]
        return values

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        stop = start + values.numel()
        with self._store.together():
            for first, low, high in self._covering(start, stop):
                segment = self.segment(name, first)
                with self._segments.scratch(segment) as part:
                    if low or first + high < min(first + self._chunk_numel, self._numel):
                        self._segments.load(segment, part)
                    part.floats(high)[low:] = values[first + low - start : first + high - start]
                    self._segments.save(segment, part)

    def renew(self, zeroed: Collection[str]) -> None:
        with self._store.together():
            for name in zeroed:
                for start, _ in self.chunks():
                    self._segments.forget(self.segment(name, start))

    def release(self) -> None:
        for offset in reversed(self._extents):
            self._segments.give_back(offset)
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
        self.segments = Segments(self._owned, self.chunk_bytes)
        self._pipeline = Pipeline(deadline)
        self._turns: dict[Chunk, Turn] = {}
        self._fetched: list[Chunk] = []  # whose params may have been updated
        self._kept_bytes = 0

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> DiskHome:
        assert device.type == "cpu"
        home = DiskHome(self, numel, dtype)
        self._kept_bytes += home.kept.nbytes
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._turns = {chunk: self._turn(chunk) for chunk in chunks if chunk.names}
        self._pipeline.prefetch(list(self._turns.values()))

    def _turn(self, chunk: Chunk) -> Turn:
        home = chunk.home
        assert isinstance(home, DiskHome)
        parts = [home.segment(name, chunk.start) for name in chunk.names]
        return Turn(
            [part.nbytes for part in parts], [*map(self.segments.reader, parts)], [*map(self.segments.writer, parts)]
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
        self._pipeline.settle()
        self.segments.begin()

    def commit(self) -> None:
        self.segments.commit()
        self._turns, self._fetched = {}, []

    def roll_back(self) -> None:
        self.segments.drop()
        for chunk in self._fetched:
            _copy(chunk.param, _kept(chunk))
        self._turns, self._fetched = {}, []
        self._pipeline.abandon()

    @contextmanager
    def together(self) -> Iterator[None]:
        """As between ``begin`` and ``commit``; within these, a part of what they enclose."""
        if self.segments.is_open:
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

    @property
    def buffer_bytes(self) -> int:
        return self._kept_bytes + self._pipeline.buffer_bytes + self.segments.scratch_bytes

    def close(self) -> None:
        self._pipeline.close()
        self._owned.close()


def _kept(chunk: Chunk) -> torch.Tensor:
    assert isinstance(chunk.home, DiskHome)
    return chunk.home.kept[chunk.start : chunk.stop]


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    # torch would wake its own threads, which then spin on the cores that the update needs.
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
