"""Reduce-scatter by the backend's own reduce-scatter or all-reduce, or by its all-to-all of encoded gradients."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CommunicationError
from ..streams import last_used
from . import collectives
from .group import Pending
from .reduce_scatter import PHASE, ReduceScatter, Reduction, accumulate
from .roll_call import RankStatus, RollCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .group import Ranks, Traffic
    from .reduce_scatter import Blank


class CollectiveReduceScatter(ReduceScatter):
    """Sums in the dtype of the buffer. NCCL runs on its own stream.

    Sums in fp16 are of gradients divided by the number of ranks, as DDP's are: fp16 ends at 65,504, and the plain sum
    of 64 ranks would reach that 64 times as early. The number is rounded up to a power of two, so that dividing and
    multiplying again is exact, but for subnormals.
    """

    on_stream = True

    def __init__(self, ranks: Ranks, traffic: Traffic):
        assert ranks.group is not None
        self._ranks, self._traffic, self._group = ranks, traffic, ranks.group
        self._reductions: deque[tuple[Reduction, torch.Tensor, Pending]] = deque()
        self._abandoned: list[tuple[Reduction, torch.Tensor, Pending]] = []
        self._roll_call = RollCall(ranks, PHASE)
        self._owes_status = False  # the other ranks wait for this rank's status, or will

    def share(self, dtype: torch.dtype) -> float:
        # Test: test_sums_in_fp16_overflow_no_sooner_than_their_mean in tests/partition/test_collective_sums.py.
        return 1.0 / (1 << (self._ranks.size - 1).bit_length()) if dtype is torch.float16 else 1.0

    def start_round(self, round_number: int, closure: int = 0) -> None:
        # Abandoned collectives may still write to sums of this round, and read buffers that are freed now. So the
        # stream waits for them, and the allocator keeps the memory until then. Test: the scenario "left" of
        # tests/mutation/waits.py.
        for reduction, result, pending in self._abandoned:
            self._ranks.wait_on_stream(pending)
            last_used(reduction.buffer)
            last_used(result)
        self._abandoned.clear()
        self._owes_status = True

    def start(self, reduction: Reduction) -> None:
        buffer, target = reduction.buffer.dtype, reduction.target.dtype
        direct = buffer == target and not reduction.add and self.share(buffer) == 1.0
        result = reduction.target if direct else torch.empty_like(reduction.slice_of(0))
        self._traffic.gradients += (self._ranks.size - 1) * reduction.target.numel() * reduction.buffer.element_size()
        self._reductions.append((reduction, result, Pending(PHASE, (self._sum(reduction, result),))))

    def _sum(self, reduction: Reduction, result: torch.Tensor) -> Any:
        if reduction.is_whole:
            return collectives.all_reduce(result.copy_(reduction.buffer), group=self._group)
        return collectives.reduce_scatter(result, reduction.buffer, group=self._group)

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        return [self._finish_first() for _ in range(len(self._reductions) - limit)]

    def finish(self) -> list[Reduction]:
        self._owes_status = False
        self._roll_call.send(RankStatus.ISSUED)
        self._roll_call.wait_for_all()
        return self.drain(0, math.inf)

    def abandon_round(self, round_number: int, rest: Sequence[Blank] | None) -> None:
        self._abandoned += self._reductions
        self._reductions.clear()
        if not self._owes_status:
            return
        self._owes_status = False
        status = RankStatus.STUCK
        try:
            if rest is not None:
                self._issue(rest)
                status = RankStatus.LEFT
        except RuntimeError:  # no memory for zeros, say: the error that ended the round says more
            pass
        with suppress(CommunicationError):  # another rank is gone
            self._roll_call.send(status)
            if status is RankStatus.STUCK:
                self._ranks.give_up("this rank left its collectives to the other ranks")

    def _issue(self, rest: Sequence[Blank]) -> None:
        """Issues reductions of zeros, whose sums are not used: all of them in the same memory."""
        if not rest:
            return
        most = max(max(each.buffer_numel, each.target_numel) * each.dtype.itemsize for each in rest)
        zeros, sums = (torch.zeros(most, dtype=torch.uint8, device=rest[0].device) for _ in range(2))
        for each in rest:
            buffer = zeros.view(each.dtype)[: each.buffer_numel]
            target = sums.view(each.dtype)[: each.target_numel]
            reduction = Reduction(buffer, target, add=False)
            self._abandoned.append((reduction, target, Pending(PHASE, (self._sum(reduction, target),))))

    def _finish_first(self) -> Reduction:
        reduction, result, pending = self._reductions.popleft()
        self._ranks.wait_on_stream(pending)
        if result is not reduction.target:
            accumulate(reduction.target, result, reduction.add, 1.0 / self.share(result.dtype))
            last_used(result)
        return reduction


class CodedReduceScatter(CollectiveReduceScatter):
    """Exchanges messages of :class:`.reduce_scatter.CodedReduction`, and sums in fp32 and in the order of ranks.

    Statuses travel and rounds are left as with the backend's own reduce-scatter.
    """

    def share(self, dtype: torch.dtype) -> float:
        return 1.0  # no sum is taken in the dtype of the buffer

    def start(self, reduction: Reduction) -> None:
        messages = torch.stack(reduction.messages(self._ranks.size))
        both = torch.stack([messages, torch.empty_like(messages)])  # 3D [sent or received, rank, bytes]
        self._traffic.gradients += (self._ranks.size - 1) * messages[0].nbytes
        self._reductions.append((reduction, both, Pending(PHASE, (self._exchange(both),))))

    def _exchange(self, both: torch.Tensor) -> Any:
        return collectives.all_to_all(both[1].view(-1), both[0].view(-1), group=self._group)

    def _sum(self, reduction: Reduction, result: torch.Tensor) -> Any:
        messages = torch.stack(reduction.messages(self._ranks.size))  # zeros, in place of what this rank did not start
        return self._exchange(torch.stack([messages, messages]))

    def _finish_first(self) -> Reduction:
        reduction, both, pending = self._reductions.popleft()
        self._ranks.wait_on_stream(pending)
        reduction.add_up(list(both[1]))
        last_used(both)
        return reduction
