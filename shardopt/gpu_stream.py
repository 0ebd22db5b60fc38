"""The stream of a GPU on which a thread computes: asked for, and changed, by few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

_T = TypeVar("_T")


# By a device's index and the handle of a stream: torch makes an object of Python's anew each time that it is asked, in
# 3 us, and in autograd's thread in 20. Handles are CUDA's: one names the same stream as long as there is one.
_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}


def stream_of_thread(index: int) -> torch.cuda.Stream:
    """Returns the stream on which this thread computes on the GPU of this index: one object for each stream."""
    place = index, torch._C._cuda_getCurrentRawStream(index)
    found = _STREAMS.get(place)
    if found is None:
        found = _STREAMS[place] = torch.cuda.current_stream(index)
    return found


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the stream on which this thread computes; None on a CPU."""
    return stream_of_thread(device.index) if device.type == "cuda" else None


def call_on(stream: torch.cuda.Stream | None, call: Callable[..., _T], *arguments: object) -> _T:
    """Makes a call on a stream of this thread's device; None: on the current one."""
    if stream is None or stream is stream_of_thread(stream.device_index):
        return call(*arguments)
    with on_stream(stream):
        return call(*arguments)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within, this thread computes on a stream: torch's own context takes 60 calls of Python more."""
    if torch._C._cuda_getDevice() != stream.device_index:
        with torch.cuda.stream(stream):
            yield
        return
    before = stream_of_thread(stream.device_index)
    _make_current(stream)
    try:
        yield
    finally:
        _make_current(before)


def _make_current(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
