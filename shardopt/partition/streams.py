"""Who may touch a buffer when: the only place that knows of streams and events.

A buffer of the reducer is written by whichever stream autograd runs a param's node on, read by the collective, and
written again for another bucket. On a CPU everything happens in the order in which it is called; on a GPU each stream
has an order of its own, and what one stream left is joined by the next one that comes:

* ``mark``: the current stream has used the buffer. An event on that stream, because the host is ahead of it.
* ``join``: the current stream waits for all marks of others. A mark of the same stream needs no waiting.

A collective starts behind the stream that is current when it is called and, waited for, ends ahead of the stream that
is current then. So ``join`` before it and ``mark`` after the wait order it among the rest. A pool keeps its buffers'
memory. What is not pooled (a gradient that was as good as a buffer, a collective's result) goes back to torch's
allocator, which knows only the stream that it was made on: ``last_used`` names the one that the wait ordered behind the
collective.
"""

from typing import Any, Protocol

import torch


class Order(Protocol):
    """The uses of one buffer."""

    def mark(self) -> None: ...

    def join(self) -> None: ...


class HostOrder:
    """Calls are in order by themselves."""

    def mark(self) -> None:
        pass

    def join(self) -> None:
        pass


class StreamOrder:
    """One event for each stream that used the buffer."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events: dict[Any, torch.cuda.Event] = {}

    def mark(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        event = self._events.setdefault(stream, torch.cuda.Event())
        event.record(stream)

    def join(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        for other, event in self._events.items():
            if other != stream:
                stream.wait_event(event)


class Buffer:
    """Memory that holds a bucket's gradients while they are reduced: lent from a pool, or the gradient's own."""

    def __init__(self, memory: torch.Tensor, is_pooled: bool):
        self.memory, self.is_pooled = memory, is_pooled  # 1D
        self.order: Order = StreamOrder(memory.device) if memory.device.type == "cuda" else HostOrder()


def last_used(memory: torch.Tensor) -> None:
    """No other use of the memory, once it is given back, comes before what the current stream has been given to do."""
    if memory.device.type == "cuda":
        memory.record_stream(torch.cuda.current_stream(memory.device))
