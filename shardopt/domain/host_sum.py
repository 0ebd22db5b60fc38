"""A sum of gradients that is offloaded to host memory between rounds.

::

    to host  | sum 0 | sum 1 | sum 2 |            the first backward of a step: each sum is copied to the host as
    ...              | 0     | 1     | 2          soon as it is reduced

    to device| 0     | 1     | 2     |            a later backward: each sum is copied to the device while the bucket
    reduce           | += 0  | += 1  | += 2       before it is reduced, added to there, and copied to the host again
    to host                  | 0     | 1     | 2

Within a round a sum is in a slot (a staging buffer on the device), which the next sum uses after the copy. A round
ends when all sums are in host memory: between rounds they are plain tensors, and who reads one has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..partition.comm.reduce_scatter import Reduction
from ..partition.gradient_buckets import Sink

if TYPE_CHECKING:
    from ..offload.gradients import HostLanding
    from ..offload.streams import Slot
    from ..partition.mesh import Mesh


class HostSum(Sink):
    """Keeps the sum in host memory between rounds; later backwards add to it on the device.

    Attributes:
        total: 1D [shard_numel], as :attr:`DeviceSum.total`.
    """

    is_on_host, stays = True, False

    def __init__(self, shard_numel: int, dtype: torch.dtype, mesh: Mesh, landing: HostLanding):
        """``mesh``: with one copy of the states: several copies would read each other's sums in mid-reduction."""
        assert mesh.replicate.size == 1
        self._landing = landing
        self.total = landing.zeros(shard_numel, dtype)
        self._slot: Slot | None = None  # while the sum is on the device

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [self.total]

    def prefetch(self) -> None:
        if self._slot is None:
            self._slot = self._landing.load(self.total)

    def _loaded(self) -> torch.Tensor:
        """The sum of earlier rounds, on the device."""
        self.prefetch()
        assert self._slot is not None
        self._landing.wait_loaded(self._slot)
        return self._slot.staged[0]

    def zero(self, part: slice) -> None:
        self._loaded()[part].zero_()

    def reduction(self, buffer: torch.Tensor, add: bool) -> Reduction:
        if add:
            return Reduction(buffer, self._loaded(), add)
        self._slot = self._landing.acquire(self.total)
        return Reduction(buffer, self._slot.staged[0], add)

    def use(self, reduction: Reduction) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None
        self._landing.offload(slot, self.total)

    def wait_for_copies(self) -> None:
        self._landing.wait_for_copies()

    def abandon(self) -> None:
        # A copy to the slot may be under way: the slot's memory must not be reused before it ends.
        self._landing.wait_for_copies()
        self._slot = None
