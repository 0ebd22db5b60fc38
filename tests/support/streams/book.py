"""The book: which stream is current, which memory is where, and every action with the bytes that it uses."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .clocks import Agent, Clock, Hosts
from .counts import BLOCKING_COPIES, COPIES, HOST_WAITS, Counts, site
from .record import COMPUTE, HOST, TO_DEVICE, TO_HOST, Cost, Record
from .regions import Region, Regions, Use
from .stream import Stream

Span = tuple[int, int]  # addresses of bytes [start, end)


class _Here(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.makes_on_device: bool | None = None  # where the call of torch that runs makes tensors; None: as its inputs


class Book:
    """Of one machine."""

    def __init__(self) -> None:
        self.hosts = Hosts()
        self.regions = Regions(self.hosts)
        self.counts = Counts()
        self.streams: dict[int, Stream] = {}  # by id
        self.default = Stream(self, "the default stream")
        self.record: Record | None = None  # of what is done from now on
        self._here = _Here()

    # -- who acts --------------------------------------------------------------------------------------------------

    @property
    def host(self) -> Agent:
        return self.hosts.here

    @property
    def stream(self) -> Stream:
        """The current one of this thread."""
        return self._here.stream or self.default

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self._here.stream = self._here.stream, stream or self._here.stream
        try:
            yield
        finally:
            self._here.stream = before

    def make_current(self, stream_id: int, **_: int) -> None:
        self._here.stream = self.streams[stream_id]

    @contextmanager
    def making(self, on_device: bool) -> Iterator[None]:
        """Within, torch makes tensors there."""
        before, self._here.makes_on_device = self._here.makes_on_device, on_device
        try:
            yield
        finally:
            self._here.makes_on_device = before

    @property
    def makes_on_device(self) -> bool | None:
        return self._here.makes_on_device

    # -- where memory is -------------------------------------------------------------------------------------------

    def region(self, tensor: Tensor, is_device: bool | None = None) -> Region:
        """The memory of a tensor. Memory that is new here is host memory, unless ``is_device``."""
        with torch._C.DisableTorchFunction():
            storage = torch._C.TensorBase.untyped_storage(tensor)
        found = self.regions.known(storage)
        if found is None:
            self.stream.follow(self.host.clock)
            found = self.regions.add(storage, bool(is_device), self.stream if is_device else self.host)
        elif is_device is not None:
            found.is_device, found.owner = is_device, self.stream if is_device else self.host
        return found

    def is_on_device(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            found = self.regions.known(torch._C.TensorBase.untyped_storage(tensor))
        return found is not None and found.is_device

    # -- what is done ----------------------------------------------------------------------------------------------

    def act(
        self,
        what: str,
        reads: Iterable[Span],
        writes: Iterable[Span],
        agent: Agent | None = None,
        cost: Cost | None = None,
    ) -> None:
        """An action of a stream, by default the current one: it comes after all that the host did until now."""
        agent = agent or self.stream
        agent.follow(self.host.clock)
        time, where = agent.tick(), site()
        if self.record is not None:
            reads, writes = list(reads), list(writes)
            engine = HOST if agent is self.host else COMPUTE
            self.record.act(agent, self.host, what, cost or Cost(engine, length(reads) + length(writes)))
        what = what if where is None else f"{what} ({where})"
        for spans, is_write in ((reads, False), (writes, True)):
            for start, end in spans:
                region = self.regions.at(start)
                if region is not None:
                    self.regions.use(region, Use(start, end, agent, time, is_write, what))

    def copy(self, into: Tensor, source: Tensor, blocking: bool) -> None:
        """Between host and device; ``into`` has its values already."""
        up = self.region(into).is_device
        self.act("a copy", [span(source)], [span(into)], cost=Cost(TO_DEVICE if up else TO_HOST, source.nbytes))
        for tensor in (into, source):
            if self.region(tensor).is_pinned:
                self.region(tensor).recorded.append(self.stream)
        self.counts.note(BLOCKING_COPIES if blocking else COPIES)
        if blocking:
            self._follow(self.stream.clock, "a blocking copy")

    def host_waits(self, clock: Clock) -> None:
        self.counts.note(HOST_WAITS)
        self._follow(clock, "a wait of the host")

    def _follow(self, clock: Clock, what: str) -> None:
        self.host.follow(clock)
        if self.record is not None:
            self.record.call(self.host, what, clock)

    @property
    def races(self) -> Sequence[str]:
        return list(self.regions.races)


def length(spans: Iterable[Span]) -> int:
    """Of them together, in bytes."""
    return sum(end - start for start, end in spans)


def span(tensor: Tensor) -> Span:
    """From the first byte to the last one."""
    with torch._C.DisableTorchFunction():
        if not tensor.numel():
            return 0, 0
        start = torch._C.TensorBase.data_ptr(tensor)
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return start, start + (last + 1) * tensor.element_size()
