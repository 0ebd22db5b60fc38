"""Reduce-scatter by the backend's own reduce-scatter, or all-reduce."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..streams import last_used
from .group import Pending, Ranks, Traffic
from .reduce_scatter import PHASE, ReduceScatter, Reduction, accumulate


class CollectiveReduceScatter(ReduceScatter):
    """Sums in the dtype of the buffer. NCCL runs on its own stream.

    Sums in fp16 are of gradients divided by the number of ranks, as DDP's are: fp16 ends at 65,504, and the plain sum
    of 64 ranks would reach that 64 times as early. The number is rounded up to a power of two, so that dividing and
    multiplying again is exact, but for subnormals.
    """

    on_stream = True

    def __init__(self, ranks: Ranks, traffic: Traffic):
        self._ranks, self._traffic = ranks, traffic
        self._reductions: deque[tuple[Reduction, torch.Tensor, Pending]] = deque()

    def share(self, dtype: torch.dtype) -> float:
        # Test: test_sums_in_fp16_overflow_no_sooner_than_their_mean in tests/partition/test_collective_sums.py.
        return 1.0 / (1 << (self._ranks.size - 1).bit_length()) if dtype is torch.float16 else 1.0

    def start_round(self, round_number: int) -> None:
        self._reductions.clear()

    def start(self, reduction: Reduction) -> None:
        buffer, target = reduction.buffer.dtype, reduction.target.dtype
        direct = buffer == target and not reduction.add and self.share(buffer) == 1.0
        result = reduction.target if direct else torch.empty_like(reduction.slice_of(0))
        self._traffic.gradients += (self._ranks.size - 1) * reduction.target.numel() * reduction.buffer.element_size()
        self._reductions.append((reduction, result, Pending(PHASE, (self._sum(reduction, result),))))

    def _sum(self, reduction: Reduction, result: torch.Tensor) -> Any:
        if reduction.is_whole:
            return dist.all_reduce(result.copy_(reduction.buffer), group=self._ranks.group, async_op=True)
        return _reduce_scatter_single()(result, reduction.buffer, group=self._ranks.group, async_op=True)

    def drain(self, limit: int, patience: float) -> list[torch.Tensor]:
        return [self._give_back() for _ in range(len(self._reductions) - limit)]

    def finish(self) -> list[torch.Tensor]:
        return self.drain(0, math.inf)

    def _give_back(self) -> torch.Tensor:
        reduction, result, pending = self._reductions.popleft()
        self._ranks.wait_on_stream(pending)
        if result is not reduction.target:
            accumulate(reduction.target, result, reduction.add, 1.0 / self.share(result.dtype))
            last_used(result)
        return reduction.buffer


def _reduce_scatter_single() -> Callable[..., Any]:
    # Renamed in torch 2.13; the older name warns there.
    newer = getattr(dist, "reduce_scatter_single", None)
    return newer if newer is not None else dist.reduce_scatter_tensor
