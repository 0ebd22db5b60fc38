"""The order between copies and kernels: one CUDA stream for copies to the device, one for copies to the host.

A mark is a point in a stream. A copy begins once the mark that it is given is reached, and never before the copies that
were put into its stream earlier. These five calls say all the order that the stores need. So tests can take the calls
at their word, and run each copy at once, or as late as the calls allow (``tests/support/late_copies.py``).
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..gpu_stream import on_stream, stream_of_thread

Mark = Any  # a torch.cuda.Event
Copy = tuple[torch.Tensor, torch.Tensor]  # into, source: both 1D, of one dtype and length

_ALIGNMENT = 256  # bytes; the start of each tensor in a slot


class Slot:
    """A staging buffer.

    Attributes:
        memory: 1D uint8.
        mark: after every use of the memory so far.
        staged: the tensors that lie in the memory now.
    """

    def __init__(self, memory: torch.Tensor, mark: Mark = None):
        self.memory, self.mark = memory, mark
        self.staged: list[torch.Tensor] = []

    @staticmethod
    def nbytes(like: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of memory that :meth:`stage` takes."""
        return sum(_padded(each.nbytes) for each in like)

    def stage(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sets and returns ``staged``: parts of the memory with the sizes and dtypes of these tensors."""
        self.staged, start = [], 0
        for each in like:
            self.staged.append(self.memory[start : start + each.nbytes].view(each.dtype))
            start += _padded(each.nbytes)
        return self.staged


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class CopyStreams:
    """Copies to the device and copies to the host, in order with kernels: two CUDA streams beside the current one."""

    def __init__(self, device: torch.device):
        self._index = device.index
        # Two streams: in one, a copy to the device would wait for the copy to the host before it.
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)

    def now(self) -> Mark:
        """Returns a mark after all kernels that were launched so far."""
        return self._mark(stream_of_thread(self._index))

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        mark = torch.cuda.Event()
        mark.record(stream)
        return mark

    def to_device(self, copies: Sequence[Copy], after: Mark) -> Mark:
        """Copies to the device; returns the mark after these copies."""
        return self._copy(self._in, copies, after)

    def to_host(self, copies: Sequence[Copy], after: Mark) -> Mark:
        """Copies to the host, in another stream than ``to_device``: the bus carries both directions at a time."""
        return self._copy(self._out, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy], after: Mark) -> Mark:
        stream.wait_event(after)
        with on_stream(stream):
            for into, source in copies:
                into.copy_(source, non_blocking=True)
        return self._mark(stream)

    def wait(self, mark: Mark) -> None:
        """Kernels that are launched from now on run after the mark."""
        stream_of_thread(self._index).wait_event(mark)

    def synchronize(self, mark: Mark) -> None:
        """The host waits for the mark."""
        mark.synchronize()
