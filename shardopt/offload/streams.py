"""The order between copies and kernels: one CUDA stream for copies to the device, one for copies to the host.

A mark is a point in a stream. A copy begins once the mark that it is given is reached, and never before the copies that
were put into its stream earlier. These five calls say all the order that the stores need. So tests can take the calls
at their word, and run each copy at once, or as late as the calls allow (``tests/support/late_copies.py``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

Mark = Any


class Copy(NamedTuple):
    """Both tensors are 1D, of one dtype and length."""

    into: torch.Tensor
    source: torch.Tensor


class CopyStreams(Protocol):
    """Copies to the device and copies to the host, in order with kernels."""

    def now(self) -> Mark:
        """Returns a mark after all kernels that were launched so far."""

    def to_device(self, copies: Sequence[Copy], after: Mark) -> Mark:
        """Copies to the device; returns the mark after these copies."""

    def to_host(self, copies: Sequence[Copy], after: Mark) -> Mark:
        """Copies to the host, in another stream than ``to_device``: the bus carries both directions at a time."""

    def wait(self, mark: Mark) -> None:
        """Kernels that are launched from now on run after the mark."""

    def synchronize(self, mark: Mark) -> None:
        """The host waits for the mark."""


class CudaCopyStreams:
    """Two CUDA streams beside the current one."""

    def __init__(self, device: torch.device):
        self._device = device
        # Two streams: in one, a copy to the device would wait for the copy to the host before it.
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)

    def now(self) -> torch.cuda.Event:
        return self._mark(torch.cuda.current_stream(self._device))

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(stream)
        return mark

    def to_device(self, copies: Sequence[Copy], after: torch.cuda.Event) -> torch.cuda.Event:
        return self._copy(self._in, copies, after)

    def to_host(self, copies: Sequence[Copy], after: torch.cuda.Event) -> torch.cuda.Event:
        return self._copy(self._out, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy], after: torch.cuda.Event) -> torch.cuda.Event:
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            for into, source in copies:
                into.copy_(source, non_blocking=True)
        return self._mark(stream)

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()
