"""Ranks that share one GPU, over gloo: params and gradients travel through host memory. For tests alone."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from shardopt.partition.comm.all_gather import MessageWire, Window, Wire
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.reduce_scatter import Job, Scatter
from shardopt.partition.comm.reduce_scatter_p2p import MessageScatter
from shardopt.partition.comm.traffic import Traffic
from shardopt.partition.comm.transport import Transport


@contextmanager
def through_host() -> Iterator[None]:
    """Within, optimizers that are bound move tensors of any device over gloo."""
    with patch.object(Transport, "of", lambda ranks, device, use_neighbours: HostTransport(ranks, device)):
        yield


class HostTransport(Transport):
    def wire(self, phase: str) -> Wire:
        return super().wire(phase) if self.ranks.size == 1 else StagedWire(self.ranks, phase)

    def scatter(self) -> Scatter:
        if self.ranks.size == 1:
            return super().scatter()
        return StagedScatter(self.ranks, self.traffic, self._number)


class StagedWire:
    """Sends copies in host memory."""

    reads_memory = on_stream = False

    def __init__(self, ranks: Ranks, phase: str):
        self._messages = MessageWire(ranks, phase)
        self._staged: list[tuple[Window, Window]] = []

    def start(self, window: Window) -> None:
        copy = Window(window.flat.cpu(), window.shard_numel, window.number)
        self._staged.append((window, copy))
        self._messages.start(copy)

    def finish(self) -> None:
        self._messages.finish()
        for window, copy in self._staged:
            window.flat.copy_(copy.flat)


class StagedScatter:
    """Sums copies in host memory."""

    tells = on_stream = False

    def __init__(self, ranks: Ranks, traffic: Traffic, number: int):
        self._messages = MessageScatter(ranks, traffic, number)
        self._jobs: deque[tuple[Job, Job]] = deque()

    def begin(self, round_number: int) -> None:
        self._messages.begin(round_number)
        self._jobs.clear()

    def start(self, job: Job) -> None:
        staged = Job(job.buffer.cpu(), job.target.cpu(), job.add)
        self._messages.start(staged)
        self._jobs.append((job, staged))

    def progress(self) -> list[torch.Tensor]:
        return []

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        return self._give_back(self._messages.settle(limit, patience))

    def finish(self) -> list[torch.Tensor]:
        return self._give_back(self._messages.finish())

    def _give_back(self, settled: list[torch.Tensor]) -> list[torch.Tensor]:
        free = []
        for _ in settled:
            job, staged = self._jobs.popleft()
            job.target.copy_(staged.target)
            free.append(job.buffer)
        return free

    def watch(self, closure: int) -> None:
        pass

    def fail(self, closure: int) -> None:
        pass

    def leave(self, round_number: int) -> None:
        self._messages.leave(round_number)

    def catch_up(self, round_number: int) -> None:
        pass
