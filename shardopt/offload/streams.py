"""The order between copies and kernels: two lanes beside the one that computes.

A mark is a point in a lane. What is put into a lane begins once the mark that it is given was reached, and never before
what was put there earlier. All order of the ring is said with these five calls, so that tests can take them at their
word: run a copy at once, or as late as they allow.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

Mark = Any


class Copy(NamedTuple):
    """Both 1D, of one dtype and length."""

    into: torch.Tensor
    source: torch.Tensor


class Lanes(Protocol):
    """Copies to the device, kernels, copies back."""

    def now(self) -> Mark:
        """Behind all kernels so far."""

    def bring(self, copies: Sequence[Copy], behind: Mark) -> Mark:
        """Copies to the device; the mark behind them."""

    def take(self, copies: Sequence[Copy], behind: Mark) -> Mark:
        """Copies from the device, in a lane of their own: the bus goes both ways at a time."""

    def join(self, mark: Mark) -> None:
        """Kernels from now on run behind the mark."""

    def settle(self, mark: Mark) -> None:
        """The host waits for the mark."""


class CudaLanes:
    """Two streams beside the current one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._in = torch.cuda.Stream(device)  # a copy to the device must not wait for the one back before it
        self._out = torch.cuda.Stream(device)

    def now(self) -> torch.cuda.Event:
        return self._mark(torch.cuda.current_stream(self._device))

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(stream)
        return mark

    def bring(self, copies: Sequence[Copy], behind: torch.cuda.Event) -> torch.cuda.Event:
        return self._copy(self._in, copies, behind)

    def take(self, copies: Sequence[Copy], behind: torch.cuda.Event) -> torch.cuda.Event:
        return self._copy(self._out, copies, behind)

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy], behind: torch.cuda.Event) -> torch.cuda.Event:
        stream.wait_event(behind)
        with torch.cuda.stream(stream):
            for into, source in copies:
                into.copy_(source, non_blocking=True)
        return self._mark(stream)

    def join(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def settle(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()
