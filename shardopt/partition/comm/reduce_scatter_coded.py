"""Reduce-scatter of encoded gradients over a backend's collectives: an all-to-all of bytes, summed by the owners."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..streams import last_used
from .group import Pending
from .reduce_scatter import PHASE, Reduction
from .reduce_scatter_collective import CollectiveReduceScatter


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
        return dist.all_to_all_single(both[1].view(-1), both[0].view(-1), group=self._ranks.group, async_op=True)

    def _sum(self, reduction: Reduction, result: torch.Tensor) -> Any:
        messages = torch.stack(reduction.messages(self._ranks.size))  # zeros, in place of what this rank did not start
        return self._exchange(torch.stack([messages, messages]))

    def _finish_first(self) -> Reduction:
        reduction, both, pending = self._reductions.popleft()
        self._ranks.wait_on_stream(pending)
        reduction.add_up(list(both[1]))
        last_used(both)
        return reduction
