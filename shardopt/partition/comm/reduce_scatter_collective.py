"""Reduction by the backend's own reduce-scatter, or all-reduce."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..streams import last_used
from .group import Pending, Ranks
from .reduce_scatter import PHASE, Job, take
from .traffic import Traffic


class CollectiveScatter:
    """The backend's own, which sums in the dtype of the buffer; NCCL's runs on its own stream."""

    tells, on_stream = False, True

    def __init__(self, ranks: Ranks, traffic: Traffic):
        self._ranks, self._traffic = ranks, traffic
        self._jobs: deque[tuple[Job, torch.Tensor, Pending]] = deque()

    def begin(self, round_number: int) -> None:
        self._jobs.clear()

    def start(self, job: Job) -> None:
        direct = job.buffer.dtype == job.target.dtype and not job.add
        result = job.target if direct else torch.empty_like(job.slice_of(0))
        self._traffic.gradients += (self._ranks.size - 1) * job.target.numel() * job.buffer.element_size()
        self._jobs.append((job, result, Pending(PHASE, (self._sum(job, result),))))

    def _sum(self, job: Job, result: torch.Tensor) -> Any:
        if job.is_whole:
            return dist.all_reduce(result.copy_(job.buffer), group=self._ranks.group, async_op=True)
        return _reduce_scatter_single()(result, job.buffer, group=self._ranks.group, async_op=True)

    def progress(self) -> list[torch.Tensor]:
        return []

    def settle(self, limit: int, patience: float) -> list[torch.Tensor]:
        return [self._give_back() for _ in range(len(self._jobs) - limit)]

    def finish(self) -> list[torch.Tensor]:
        return [self._give_back() for _ in range(len(self._jobs))]

    def _give_back(self) -> torch.Tensor:
        job, result, pending = self._jobs.popleft()
        self._ranks.wait(pending)  # orders the current stream behind the reduction; the host goes on
        if result is not job.target:
            take(job.target, result, job.add)
            last_used(result)
        return job.buffer

    def watch(self, closure: int) -> None:
        pass

    def fail(self, closure: int) -> None:
        pass

    def leave(self, round_number: int) -> None:
        pass

    def catch_up(self, round_number: int) -> None:
        pass


def _reduce_scatter_single() -> Callable[..., Any]:
    # Renamed in torch 2.13; the older name warns there.
    newer = getattr(dist, "reduce_scatter_single", None)
    return newer if newer is not None else dist.reduce_scatter_tensor
