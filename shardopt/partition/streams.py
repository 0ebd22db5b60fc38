"""Who may use a reduction buffer when: the only place that knows CUDA streams and events of reductions.

[Note: Streams of a reduction] A buffer of the reducer is written by the stream on which autograd runs a param's node,
read by the collective, and written again for another bucket. On a CPU everything happens in the order of the calls. On
a GPU each stream has an order of its own, and each stream that comes to a buffer waits for those that used it before:

* ``mark``: the current stream has used the buffer. This records an event on it: the host is ahead of the stream.
* ``join``: the current stream waits for the marks of all other streams. Its own marks need no waiting.
* ``occupy``: a join, and a mark of all that the stream does with the buffer until another stream comes to it.

A collective starts after the stream that is current when it is called. Once waited for, it ends before what the then
current stream does next. So ``join`` before it and ``mark`` after the wait order it among the other uses. A pool keeps
the memory of its buffers. Other memory (a gradient that serves as the buffer, a collective's result) goes back to
torch's allocator, which knows only the stream on which the memory was allocated: ``last_used`` names the stream that
waited for the collective.

The round is opened by the first hook that runs, on the stream of its param. There the sums of earlier rounds are made
ready to be added to. That use is marked too, and each reduction joins it before it starts.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gpu_stream import stream_of_thread


class StreamUses:
    """The streams that have used some memory, and up to where.

    Attributes:
        has_streams: False on a CPU, where no call has anything to do.
    """

    def __init__(self, device: torch.device):
        self._index, self.has_streams = device.index, device.type == "cuda"
        self._events: dict[Any, torch.cuda.Event] = {}  # by stream that used the memory; empty on a CPU
        self._user: torch.cuda.Stream | None = None  # whose use goes on: it has no mark yet

    def mark(self) -> None:
        """Notes that the current stream has used the memory, after all that it waited for: no other use goes on."""
        if self.has_streams:
            stream = stream_of_thread(self._index)
            self._record(stream)
            self._user = None

    def join(self) -> None:
        """The current stream waits for the other streams that used the memory."""
        if self._events or self._user is not None:
            stream = stream_of_thread(self._index)
            self._join_on(stream)

    def occupy(self) -> None:
        """Joins, and notes that the current stream uses the memory from now on.

        The use is marked once another stream comes. Many gradients fill one bucket, nearly always on one stream, and
        an event for each would take the host's time for nothing.
        """
        if not self.has_streams:
            return
        stream = stream_of_thread(self._index)
        if stream is not self._user:
            self._join_on(stream)
            self._user = stream

    def _join_on(self, stream: torch.cuda.Stream) -> None:
        if self._user is not None and self._user is not stream:
            self._record(self._user)
            self._user = None
        for other, event in self._events.items():
            if other is not stream:
                stream.wait_event(event)

    def _record(self, stream: torch.cuda.Stream) -> None:
        if stream not in self._events:
            self._events[stream] = torch.cuda.Event()
        self._events[stream].record(stream)


def last_used(memory: torch.Tensor) -> None:
    """Keeps the allocator from reusing the memory before the current stream's work so far has ended."""
    if memory.device.type == "cuda":
        memory.record_stream(stream_of_thread(memory.device.index))
