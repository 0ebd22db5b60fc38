"""The disk: transfers of chunks, which begin when a slot is free and end when a fetch or a flush asks for them."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from shardopt.offload.disk.file_io import TransferBuffer
from shardopt.offload.disk.pipeline import SLOTS, ChunkJob, Pipeline

from .book import Book
from .record import DISK, Cost


class _Transfers:
    """Of one pipeline."""

    def __init__(self) -> None:
        self.reads: dict[ChunkJob, int] = {}  # numbers of works
        self.writes: deque[int] = deque()
        self.waiting: deque[ChunkJob] = deque()


@contextmanager
def written_down(book: Book) -> Iterator[None]:
    """Within, transfers are works of a record."""
    read_ahead, prefetch, fetch = Pipeline.read_ahead, Pipeline.prefetch, Pipeline.fetch
    write_back, flush = Pipeline.write_back, Pipeline.flush
    of: dict[Pipeline, _Transfers] = {}

    def read(known: _Transfers, after: Sequence[int]) -> None:
        if known.waiting and book.record is not None:
            job = known.waiting.popleft()
            cost = Cost(DISK, sum(job.sizes) if job.reads else 0)
            known.reads[job] = book.record.beside(book.host, "a chunk is read", cost, after)

    def begun_ahead(pipeline: Pipeline, jobs: Sequence[ChunkJob]) -> list[ChunkJob]:
        known, begun = of.setdefault(pipeline, _Transfers()), read_ahead(pipeline, jobs)
        known.waiting = deque(begun)
        for _ in begun:
            read(known, ())
        return begun

    def prefetched(pipeline: Pipeline, jobs: Sequence[ChunkJob]) -> None:
        known, taken = of.setdefault(pipeline, _Transfers()), [job for job in jobs if job.slot is not None]
        known.waiting = deque(job for job in jobs if job.slot is None)
        for _ in range(SLOTS - len(taken)):
            read(known, ())
        prefetch(pipeline, jobs)

    def fetched(pipeline: Pipeline, job: ChunkJob) -> list[TransferBuffer]:
        if book.record is not None and job in of[pipeline].reads:
            book.record.call(book.host, "a wait for the disk", after=[of[pipeline].reads.pop(job)])
        return fetch(pipeline, job)

    def written_back(pipeline: Pipeline, job: ChunkJob) -> None:
        if book.record is not None:
            cost = Cost(DISK, sum(job.sizes) if job.writes else 0)
            write = book.record.beside(book.host, "a chunk is written", cost)
            of[pipeline].writes.append(write)
            read(of[pipeline], [write])
        write_back(pipeline, job)

    def flushed(pipeline: Pipeline) -> None:
        if book.record is not None and pipeline in of:
            book.record.call(book.host, "a wait for the disk", after=of[pipeline].writes)
            of[pipeline].writes.clear()
        flush(pipeline)

    with ExitStack() as stack:
        calls = {"read_ahead": begun_ahead, "prefetch": prefetched, "fetch": fetched}
        for name, call in {**calls, "write_back": written_back, "flush": flushed}.items():
            stack.enter_context(patch.object(Pipeline, name, call))
        yield


__all__ = ["written_down"]
