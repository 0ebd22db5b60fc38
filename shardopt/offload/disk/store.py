"""Masters and states in a file: read chunk by chunk, updated, and written beside what they replace.

A step that fails anywhere has changed nothing: what it wrote counts only once every rank has said that all it wrote is
on its disk. Params are updated where they lie, and kept until then to be put back.
"""

import ctypes
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ...errors import OffloadError
from ..store import Chunk, Fetched, Plane
from .checksum import compile_checksum
from .file_io import PAGE, Part, padded
from .ownership import OwnedFile
from .pipeline import Pipeline, Turn
from .segments import Segment, Segments

_FP32 = 4  # bytes


class _Stream(NamedTuple):
    """Where a plane lies in the file: its chunks one after the other, each on pages of its own, in two copies."""

    plane: Plane
    offset: int
    pitch: int  # bytes from one chunk to the next
    stride: int  # bytes from the first copy to the second


class _Span(NamedTuple):
    """What of a segment is read or written."""

    segment: Segment
    dtype: torch.dtype
    items: slice  # of the segment
    is_whole: bool  # whether these are all of it
    values: torch.Tensor  # 1D, in memory


def _take(span: _Span, part: Part) -> None:
    span.values.copy_(part.items(span.dtype, span.items.stop)[span.items.start :])


def _put(span: _Span, part: Part) -> None:
    part.items(span.dtype, span.items.stop)[span.items.start :].copy_(span.values)


class DiskHome:
    """The streams of one shard, by name."""

    tier = "disk"
    device = torch.device("cpu")
    is_apart = False

    def __init__(self, store: "DiskStore", numel: int, dtype: torch.dtype):
        self._store, self._segments, self._numel = store, store.segments, numel
        self._chunk_numel = store.chunk_bytes // _FP32
        self._streams: dict[str, _Stream] = {}
        self._extents: list[int] = []  # where what was reserved begins
        self._dtype, self._kept = dtype, torch.empty(0, dtype=dtype)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._streams)

    @property
    def nbytes(self) -> dict[str, int]:
        return {name: stream.plane.nbytes(self._numel) for name, stream in self._streams.items()}

    @property
    def kept(self) -> torch.Tensor:
        """1D [numel]: params before the step that is under way."""
        if self._kept.numel() < self._numel:  # until a first step, states that only rest there cost no memory
            self._kept = torch.empty(self._numel, dtype=self._dtype)
        return self._kept

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    @property
    def planes(self) -> dict[str, Plane]:
        return {name: stream.plane for name, stream in self._streams.items()}

    def ensure(self, planes: Mapping[str, Plane]) -> None:
        fresh = {name: plane for name, plane in planes.items() if name not in self._streams}
        if not fresh:
            return
        pitches = {name: padded(plane.nbytes(min(self._chunk_numel, self._numel))) for name, plane in fresh.items()}
        strides = {name: pitch * len(self.chunks()) for name, pitch in pitches.items()}
        offset = self._segments.reserve(2 * sum(strides.values()))
        if self._numel:  # nothing at all begins where the next range does, which is another's to give back
            self._extents.append(offset)
        for name, plane in fresh.items():
            self._streams[name] = _Stream(plane, offset, pitches[name], strides[name])
            offset += 2 * strides[name]

    def chunks(self) -> Sequence[tuple[int, int]]:
        starts = range(0, self._numel, self._chunk_numel)
        return [(start, min(start + self._chunk_numel, self._numel)) for start in starts]

    def segment(self, name: str, start: int) -> Segment:
        """The one that begins at element ``start`` of the shard."""
        plane, offset, pitch, stride = self._streams[name]
        nbytes = padded(plane.nbytes(min(self._chunk_numel, self._numel - start)))
        return Segment(offset + start // self._chunk_numel * pitch, stride, nbytes)

    def items(self, name: str, part: Part, elements: int) -> torch.Tensor:
        """What of a segment's memory is of its first ``elements``."""
        plane = self._streams[name].plane
        return part.items(plane.dtype, plane.items(elements))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        plane = self._streams[name].plane
        into = torch.empty(plane.items(stop) - start // plane.grain, dtype=plane.dtype)
        self.read_into(name, start, into)
        return into

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        spans = self._spans(name, start, into)
        turns = [Turn([each.segment.nbytes], [self._segments.loader(each.segment)], ()) for each in spans]
        with self._store.reading() as pipeline:
            pipeline.sweep(turns, [partial(_take, each) for each in spans])

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        spans = self._spans(name, start, values)
        with self._store.together():
            turns = []
            for each in spans:
                before = () if each.is_whole else (self._segments.loader(each.segment),)
                turns.append(Turn([each.segment.nbytes], before, [self._segments.writer(each.segment)]))
            self._store.pipeline.sweep(turns, [partial(_put, each) for each in spans])

    def _spans(self, name: str, start: int, values: torch.Tensor) -> list["_Span"]:
        """Where items from element ``start`` on lie."""
        plane = self._streams[name].plane
        stop, taken, spans = min(start + values.numel() * plane.grain, self._numel), 0, []
        for first in range(start // self._chunk_numel * self._chunk_numel, stop, self._chunk_numel):
            last = min(first + self._chunk_numel, self._numel)
            low, high = max(start - first, 0), min(stop, last) - first
            items = slice(low // plane.grain, plane.items(high))
            is_whole = not low and first + high == last
            here = values[taken : taken + items.stop - items.start]
            spans.append(_Span(self.segment(name, first), plane.dtype, items, is_whole, here))
            taken += here.numel()
        return spans

    def renew(self, zeroed: Collection[str]) -> None:
        with self._store.together():
            for name in zeroed:
                for start, _ in self.chunks():
                    self._segments.forget(self.segment(name, start))

    def release(self) -> None:
        for offset in reversed(self._extents):
            self._segments.give_back(offset)
        self._streams, self._extents, self._kept = {}, [], self._kept[:0].clone()


class DiskStore:
    """The homes of one optimizer on this rank, in one file of its own."""

    tier = "disk"
    is_final = False
    note: str | None = None

    def __init__(self, root: Path, chunk_bytes: int, deadline: float):
        """
        Args:
            root: an existing directory, or one to be made.
            chunk_bytes: of one fp32 stream in a chunk: what one transfer moves.
            deadline: of each wait for the disk, in seconds.

        Raises:
            OffloadError: no file can be made there that is safe from others.
        """
        compile_checksum()
        self.chunk_bytes = padded(max(chunk_bytes, PAGE))
        self._owned = OwnedFile(root)
        self._file = self._owned.file
        self.segments = Segments(self._owned)
        self.pipeline = Pipeline(deadline)  # of steps, and of what is written
        self._reads, self._reading, self._deadline = Pipeline(deadline), threading.Lock(), deadline
        self._turns: dict[Chunk, Turn] = {}
        self._fetched: list[Chunk] = []  # whose params may have been updated
        self._homes: weakref.WeakSet[DiskHome] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> DiskHome:
        home = DiskHome(self, numel, dtype)
        self._homes.add(home)
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._turns = {chunk: self._turn(chunk) for chunk in chunks if chunk.names}
        self.pipeline.prefetch(list(self._turns.values()))

    def _turn(self, chunk: Chunk) -> Turn:
        home = chunk.home
        assert isinstance(home, DiskHome)
        parts = [home.segment(name, chunk.start) for name in chunk.names]
        return Turn(
            [part.nbytes for part in parts], [*map(self.segments.reader, parts)], [*map(self.segments.writer, parts)]
        )

    def fetch(self, chunk: Chunk) -> Fetched:
        parts = self.pipeline.fetch(self._turns[chunk]) if chunk.names else []
        if chunk.param is not None:
            _copy(_kept(chunk), chunk.param)
            self._fetched.append(chunk)
        home = chunk.home
        assert isinstance(home, DiskHome)
        elements = chunk.stop - chunk.start
        streams = [home.items(name, part, elements) for name, part in zip(chunk.names, parts, strict=False)]
        return Fetched(streams, chunk.param, chunk.gradients)

    def write_back(self, chunk: Chunk) -> None:
        if chunk.names:
            self.pipeline.write_back(self._turns.pop(chunk))

    def flush(self) -> None:
        self.pipeline.flush()
        self._file.sync()

    # -- what belongs together -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """
        Raises:
            OffloadError: transfers of an earlier step do not end, or this is a fork of the process that made the store.
        """
        self._owned.check_process()
        self.pipeline.settle()
        self.segments.begin()

    def commit(self) -> None:
        self.segments.commit()
        self._turns, self._fetched = {}, []

    def roll_back(self) -> None:
        self.segments.drop()
        for chunk in self._fetched:
            assert chunk.param is not None
            _copy(chunk.param, _kept(chunk))
        self._turns, self._fetched = {}, []
        self.pipeline.abandon()

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

    @contextmanager
    def reading(self) -> Iterator[Pipeline]:
        """For what is read beside a step: by one thread at a time, of which one answers to other ranks.

        Raises:
            OffloadError: another one does not come to an end.
        """
        if not self._reading.acquire(timeout=self._deadline):
            raise OffloadError(
                f"waited {self._deadline:g} s for another thread that reads {self._file.name}: the disk does not "
                "answer. Nothing was changed; make the call again once it does."
            )
        try:
            yield self._reads
        finally:
            self._reading.release()

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        kept = sum(home.kept_bytes for home in self._homes)
        return {"host": kept + self.pipeline.buffer_bytes + self._reads.buffer_bytes}

    def close(self) -> None:
        with self.reading() as reads:
            reads.abandon()
            reads.settle()
            self.pipeline.close()
            reads.close()
        self._owned.close()


def _kept(chunk: Chunk) -> torch.Tensor:
    assert isinstance(chunk.home, DiskHome)
    return chunk.home.kept[chunk.start : chunk.stop]


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    # torch would wake its own threads, which then spin on the cores that the update needs.
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
