"""CUDA's streams and events, of which only the order is there."""

from typing import TYPE_CHECKING, Any

from .clocks import Agent, Clock

if TYPE_CHECKING:
    from .book import Book


class Stream(Agent):
    """As ``torch.cuda.Stream``."""

    def __init__(self, book: "Book", name: str):
        super().__init__(name)
        self._book, self.device_index, self.device_type = book, 0, 1
        self.stream_id = id(self)
        book.streams[self.stream_id] = self

    def wait_event(self, event: "Event") -> None:
        self.follow(event.clock)

    def wait_stream(self, other: "Stream") -> None:
        self.follow(other.clock)

    def synchronize(self) -> None:
        self._book.host_waits(self.clock)


class Event:
    """As ``torch.cuda.Event``. One that was never recorded orders nothing."""

    def __init__(self, book: "Book"):
        self._book = book
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self.clock = dict((stream or self._book.stream).clock)

    def wait(self, stream: Any = None) -> None:
        (stream or self._book.stream).wait_event(self)

    def query(self) -> bool:
        """The host that asks until it is told yes has waited."""
        self._book.host_waits(self.clock)
        return True

    def synchronize(self) -> None:
        self._book.host_waits(self.clock)
