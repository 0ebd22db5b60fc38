"""Masters and states in a file: each chunk is read, updated, and written beside the copy that it replaces.

A step that fails anywhere changes nothing: its writes hold only once every rank has said that all of its own are on its
disk. Params are updated in place; a copy of their old values is kept until then.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import OffloadError
from ..store import Fetched, Store
from .checksum import compile_checksum
from .file_io import PAGE, padded
from .ownership import OwnedFile
from .pipeline import SLOTS, ChunkJob, Pipeline
from .segments import Segment, Segments

if TYPE_CHECKING:
    from ..store import Chunk, Plane
    from .file_io import TransferBuffer

_FP32 = 4  # bytes


# A segment, which of its items are read or written, and these items in memory, 1D.
_Span = tuple[Segment, slice, torch.Tensor]


def _copy_out(segment: Segment, items: slice, values: torch.Tensor, part: TransferBuffer) -> None:
    values.copy_(segment.items(part)[items])


def _copy_in(segment: Segment, items: slice, values: torch.Tensor, part: TransferBuffer) -> None:
    segment.items(part)[items].copy_(values)


class DiskStorage:
    """The streams of one shard: the chunks of each follow each other in the file, once for each of their two copies."""

    tier = "disk"
    device = torch.device("cpu")
    updates_on_host = False

    def __init__(self, store: DiskStore, numel: int, dtype: torch.dtype):
        self._store, self._segments, self._numel = store, store.segments, numel
        self._chunk_numel = store.chunk_bytes // _FP32
        self._num_chunks = -(-numel // self._chunk_numel)
        self.planes: dict[str, Plane] = {}
        self._offsets: dict[str, int] = {}  # in the file, of each stream
        self._extents: list[int] = []  # offsets of the ranges that were reserved
        self._dtype, self._kept = dtype, torch.empty(0, dtype=dtype)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.planes)

    @property
    def nbytes(self) -> dict[str, int]:
        return {name: plane.nbytes(self._numel) for name, plane in self.planes.items()}

    @property
    def kept(self) -> torch.Tensor:
        """Params before the step that is under way, 1D [numel]."""
        # Made at the first step: states that are offloaded and never updated cost no memory.
        if self._kept.numel() < self._numel:
            self._kept = torch.empty(self._numel, dtype=self._dtype)
        return self._kept

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    def ensure(self, planes: Mapping[str, Plane]) -> None:
        fresh = {name: plane for name, plane in planes.items() if name not in self.planes}
        if not fresh:
            return
        sizes = {name: 2 * self._num_chunks * self._pitch(plane) for name, plane in fresh.items()}
        offset = self._segments.reserve(sum(sizes.values()))
        if self._numel:  # an empty range would begin where the next one does, which another shard gives back
            self._extents.append(offset)
        for name, plane in fresh.items():
            self.planes[name], self._offsets[name] = plane, offset
            offset += sizes[name]

    def _pitch(self, plane: Plane) -> int:
        """Returns the bytes from one chunk of a stream to the next."""
        return padded(plane.nbytes(min(self._chunk_numel, self._numel)))

    def chunks(self) -> Sequence[tuple[int, int]]:
        starts = range(0, self._numel, self._chunk_numel)
        return [(start, min(start + self._chunk_numel, self._numel)) for start in starts]

    def segment(self, name: str, start: int) -> Segment:
        """Returns the segment that begins at element ``start`` of the shard."""
        plane = self.planes[name]
        pitch, count = self._pitch(plane), plane.items(min(self._chunk_numel, self._numel - start))
        offset = self._offsets[name] + start // self._chunk_numel * pitch
        return Segment(offset, self._num_chunks * pitch, plane.dtype, count)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        plane = self.planes[name]
        into = torch.empty(plane.items(stop) - start // plane.grain, dtype=plane.dtype)
        self.read_into(name, start, into)
        return into

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        spans = self._spans(name, start, into)
        jobs = [ChunkJob([segment.nbytes], [self._segments.loader(segment)], ()) for segment, _, _ in spans]
        with self._store.reading() as pipeline:
            pipeline.sweep(jobs, [partial(_copy_out, *span) for span in spans])

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        spans = self._spans(name, start, values)
        with self._store.transaction():
            jobs = []
            for segment, items, _ in spans:
                before = () if items == slice(0, segment.num_items) else (self._segments.loader(segment),)
                jobs.append(ChunkJob([segment.nbytes], before, [self._segments.writer(segment)]))
            self._store.pipeline.sweep(jobs, [partial(_copy_in, *span) for span in spans])

    def write_pieces(self, name: str, start: int, pieces: Iterable[torch.Tensor]) -> None:
        self.write(name, start, torch.cat(list(pieces)))

    def _spans(self, name: str, start: int, values: torch.Tensor) -> list[_Span]:
        """Returns the parts of segments that hold the items from element ``start`` on."""
        plane = self.planes[name]
        stop, taken, spans = min(start + values.numel() * plane.grain, self._numel), 0, []
        for first in range(start // self._chunk_numel * self._chunk_numel, stop, self._chunk_numel):
            low, high = max(start - first, 0), min(stop - first, self._chunk_numel)
            items = slice(low // plane.grain, plane.items(high))
            here = values[taken : taken + items.stop - items.start]
            spans.append((self.segment(name, first), items, here))
            taken += here.numel()
        return spans

    def renew(self, zeroed: Collection[str]) -> None:
        with self._store.transaction():
            for name in zeroed:
                for start, _ in self.chunks():
                    self._segments.forget(self.segment(name, start))

    def release(self) -> None:
        self._store.drop_ahead()
        for offset in reversed(self._extents):
            self._segments.give_back(offset)
        self.planes, self._offsets, self._extents, self._kept = {}, {}, [], self._kept[:0].clone()


class DiskStore(Store):
    """The storages of one optimizer on this rank, in one file of its own."""

    tier = "disk"
    is_final = False

    def __init__(self, root: Path, chunk_bytes: int, deadline: float):
        """
        Args:
            root: an existing directory, or one to be made.
            chunk_bytes: of one fp32 stream in a chunk, the size of one transfer.
            deadline: of each wait for the disk, in seconds.

        Raises:
            OffloadError: no file can be made there that is safe from others.
        """
        compile_checksum()
        self.chunk_bytes = padded(max(chunk_bytes, PAGE))
        self._owned = OwnedFile(root)
        self._file = self._owned.file
        self.segments = Segments(self._owned)
        self.pipeline = Pipeline(deadline)  # for steps and for writes
        self._reads, self._reading, self._deadline = Pipeline(deadline), threading.Lock(), deadline
        self._jobs: dict[Chunk, ChunkJob] = {}
        self._first: list[tuple[Segment, ...]] = []  # of the chunks that the last step fetched first
        self._ahead: dict[tuple[Segment, ...], ChunkJob] = {}  # begun for the next step, unless something is written
        self._fetched: list[Chunk] = []  # chunks whose params may have been updated
        self._homes: weakref.WeakSet[DiskStorage] = weakref.WeakSet()

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> DiskStorage:
        home = DiskStorage(self, numel, dtype)
        self._homes.add(home)
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        # Each backward of a step comes here, one in a forked child too: its error comes where it would use states.
        if self._ahead or self.is_open or not self._owned.is_ours:
            return
        jobs = {parts: self._job(parts) for parts in self._first}
        begun = self.pipeline.read_ahead(list(jobs.values()))
        self._ahead = {parts: job for parts, job in jobs.items() if job in begun}

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        moving = [chunk for chunk in chunks if chunk.names]
        self._first = self._first or [_segments_of(chunk) for chunk in moving[:SLOTS]]
        taken = self._take_ahead(moving)
        self._jobs = {}
        for number, chunk in enumerate(moving):
            parts = _segments_of(chunk)
            job = taken[number] if number < len(taken) else self._job(parts)
            named = zip(chunk.names, parts, strict=True)
            job.writes = [_nothing if name in chunk.unwritten else self.segments.writer(part) for name, part in named]
            self._jobs[chunk] = job
        self.drop_ahead()
        self.pipeline.prefetch(list(self._jobs.values()))

    def _take_ahead(self, chunks: Sequence[Chunk]) -> list[ChunkJob]:
        """Returns the jobs of the first chunks that were begun ahead, up to one that was not."""
        taken: list[ChunkJob] = []
        for chunk in chunks:
            job = self._ahead.get(_segments_of(chunk))
            # Behind a chunk that is not there yet a job would hold the slot that this chunk needs, for ever.
            if job is None or not self.pipeline.take(job):
                break
            taken.append(job)
        return taken

    def _job(self, parts: Sequence[Segment]) -> ChunkJob:
        # The newest values: a step may take several passes, which read what the passes before them wrote.
        return ChunkJob([part.nbytes for part in parts], [self.segments.loader(part) for part in parts], ())

    def drop_ahead(self) -> None:
        """Drops what was read for the next step."""
        self._ahead = {}
        self.pipeline.drop_ahead()

    def fetch(self, chunk: Chunk) -> Fetched:
        parts = self.pipeline.fetch(self._jobs[chunk]) if chunk.names else []
        if chunk.param is not None:
            _copy(_kept(chunk), chunk.param)
            self._fetched.append(chunk)
        streams = [segment.items(part) for segment, part in zip(_segments_of(chunk), parts, strict=True)]
        return Fetched(streams, chunk.param, chunk.gradients)

    def write_back(self, chunk: Chunk) -> None:
        if chunk.names:
            self.pipeline.write_back(self._jobs.pop(chunk))

    def flush(self) -> None:
        self.pipeline.flush()
        self._file.sync()

    # -- transactions -------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.segments.is_open

    def begin(self) -> None:
        """Begins a transaction.

        Raises:
            OffloadError: transfers of an earlier step do not end, or this process is a fork of the one that made the
                store.
        """
        self._open()
        self._first = []

    def _open(self) -> None:
        self._owned.check_process()
        self.pipeline.wait_idle()
        self.segments.begin()

    def commit(self) -> None:
        self.segments.commit()
        self._jobs, self._fetched = {}, []

    def roll_back(self) -> None:
        self.segments.drop()
        for chunk in self._fetched:
            assert chunk.param is not None
            _copy(chunk.param, _kept(chunk))
        self._jobs, self._ahead, self._fetched = {}, {}, []
        self.pipeline.abandon()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction of its own, or a part of the one that is open."""
        self.drop_ahead()
        if self.segments.is_open:
            yield
            return
        self._open()
        try:
            yield
            self._file.sync()
        except BaseException:
            self.roll_back()
            raise
        self.commit()

    @contextmanager
    def reading(self) -> Iterator[Pipeline]:
        """The pipeline for reads outside of a step, for one thread at a time: one thread answers other ranks.

        Raises:
            OffloadError: another thread does not end its read.
        """
        if not self._reading.acquire(timeout=self._deadline):
            raise OffloadError(
                f"make the call again later: the disk does not answer. Waited {self._deadline:g} s for another thread "
                f"that reads {self._file.name}. Nothing was changed."
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
        # A forked child has none of the threads that it would wait for: test_a_child_that_is_forked_in_a_backward.
        if self._owned.is_ours:
            with self.reading() as reads:
                reads.abandon()
                reads.wait_idle()
                self.pipeline.close()
                reads.close()
        self._owned.close()


def _segments_of(chunk: Chunk) -> tuple[Segment, ...]:
    return tuple([_home(chunk).segment(name, chunk.start) for name in chunk.names])


def _nothing(part: TransferBuffer) -> None:
    """Writes nothing of a stream that an update only read."""


def _home(chunk: Chunk) -> DiskStorage:
    assert isinstance(chunk.home, DiskStorage)
    return chunk.home


def _kept(chunk: Chunk) -> torch.Tensor:
    return _home(chunk).kept[chunk.start : chunk.stop]


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    # torch's copy_() would wake its threads, which then spin on the cores that the update needs.
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
