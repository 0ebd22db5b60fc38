"""``torch.cuda`` with the streams of a book."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from shardopt import gpu_stream
from shardopt.domain import remote_states
from shardopt.offload import pinned
from shardopt.remote import serve

from .book import Book
from .counts import PINNINGS
from .stream import Event, Stream


class _Runtime:
    """As ``torch.cuda.cudart()``: all memory can be registered."""

    def __init__(self, book: Book):
        self._book = book

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._book.counts.note(PINNINGS)
        if self._book.record is not None:
            self._book.record.call(self._book.host, "pinning", pinned=nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


@contextmanager
def stand_in(book: Book) -> Iterator[None]:
    """Within, ``torch.cuda`` is this one."""
    numbers = itertools.count(1)

    def stream(device: Any = None, priority: int = 0) -> Stream:
        return Stream(book, f"stream {next(numbers)}")

    stream.priority_range = lambda: (0, -5)  # type: ignore[attr-defined]
    names: dict[str, Any] = {
        "Stream": stream,
        "Event": lambda *_, **__: Event(book),
        "stream": book.on,
        "current_stream": lambda device=None: book.stream,
        "default_stream": lambda device=None: book.default,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_device_capability": lambda device=None: (9, 0),
        "cudart": lambda: _Runtime(book),
        "synchronize": lambda device=None: book.host_waits(book.stream.clock),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(pinned, "_PAGE", 1))  # what is tiny here stands for whole pages
        for name, value in names.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        raw: dict[str, Any] = {
            "getCurrentRawStream": lambda index: id(book.stream),
            "getDevice": lambda: 0,
            "setStream": book.make_current,
        }
        for name, value in raw.items():
            stack.enter_context(patch.object(torch._C, f"_cuda_{name}", value, create=True))
        # The process's own, which know nothing of this book.
        for kept in (gpu_stream._STREAMS, remote_states._STREAMS, serve._SERVERS):
            stack.enter_context(patch.dict(kept, clear=True))
        yield
