"""``torch.cuda`` with the streams of a book."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from shardopt.domain import remote_states, serve

from .book import Book
from .stream import Event, Stream


class _Runtime:
    """As ``torch.cuda.cudart()``: all memory can be registered."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
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
        "cudart": _Runtime,
        "synchronize": lambda device=None: book.host_waits(book.stream.clock),
    }
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for kept in (remote_states._STREAMS, serve._SERVERS):  # the process's own, which know nothing of this book
            stack.enter_context(patch.dict(kept, clear=True))
        yield
