"""For debugging: every reduction and every gathering at once, one at a time, and compared with a second, plain one.

``Tuning(debug=True)`` puts these in place of the mechanisms that they hold. A difference is a bug in shardopt, a
backend or the machine: a buffer that was used too early, or too late.
"""

import torch

from ..errors import CommunicationError
from .collectives import Ranks
from .scatter import Job, Scatter
from .wire import Window, Wire


class CheckedScatter:
    """Settles each job before the next one starts."""

    tells = False  # ranks wait in the second reduction as well

    def __init__(self, ranks: Ranks, inner: Scatter):
        self._ranks, self._inner, self.on_stream = ranks, inner, inner.on_stream
        self._free: list[torch.Tensor] = []

    def begin(self, round_number: int) -> None:
        self._free = []
        self._inner.begin(round_number)

    def start(self, job: Job) -> None:
        total = torch.zeros_like(job.target, dtype=torch.float32)
        buffers = [torch.zeros_like(job.buffer) for _ in range(self._ranks.size)]
        buffers[self._ranks.rank].copy_(job.buffer)
        for rank, buffer in enumerate(buffers):
            self._ranks.broadcast([buffer], "checking a reduction", rank)
        for buffer in buffers:
            total += Job(buffer, job.target, job.add).slice_of(self._ranks.rank)
        expected = (job.target + total if job.add else total).to(job.target.dtype)
        self._inner.start(job)
        self._free += self._inner.finish()
        _compare(job.target, expected, "a reduction of gradients")

    def progress(self) -> list[torch.Tensor]:
        free, self._free = self._free, []
        return free

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        return self.progress()

    def finish(self) -> list[torch.Tensor]:
        return self.progress()

    def watch(self, closure: int) -> None:
        self._inner.watch(closure)

    def fail(self, closure: int) -> None:
        self._inner.fail(closure)

    def leave(self, round_number: int) -> None:
        self._inner.leave(round_number)

    def catch_up(self, round_number: int) -> None:
        self._inner.catch_up(round_number)


class CheckedWire:
    """Finishes each window before the next one starts."""

    def __init__(self, ranks: Ranks, inner: Wire):
        self._ranks, self._inner = ranks, inner
        self.reads_memory, self.on_stream = inner.reads_memory, inner.on_stream

    def start(self, window: Window) -> None:
        expected = window.flat.clone()
        for rank in range(self._ranks.size):
            shard = expected[rank * window.shard_numel : (rank + 1) * window.shard_numel]
            self._ranks.broadcast([shard], "checking a gathering", rank)
        self._inner.start(window)
        self._inner.finish()
        _compare(window.flat, expected, "a gathering")

    def finish(self) -> None:
        pass


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    same = (found == expected) | (found.isnan() & expected.isnan())
    if not bool(same.all()):
        at = int(same.logical_not().nonzero()[0])
        raise CommunicationError(
            f"{what} gave {float(found[at])!r} at element {at} of {found.numel()}, a plain one {float(expected[at])!r}:"
            " a buffer was used too early or too late, which is a bug. Please report it with this message."
        )
