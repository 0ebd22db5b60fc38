"""What quantizing has taken from one rank's gradients of a bucket, and has not been sent yet: error feedback.

Every rank has a residual of its own, of the whole bucket. A checkpoint holds the sum of all ranks' residuals, each
slice written by the rank that owns it, so that it loads at any number of ranks. A save therefore *settles* them, in the
run that goes on as in one that resumes: both then have the same bits::

    rank 0    a0 b0    ->  a0+a1   0            owns a           time ->
    rank 1    a1 b1    ->  0       b0+b1        owns b
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..partition.layout import BucketLayout
from ..partition.memory import zeros
from ..partition.streams import StreamUses

if TYPE_CHECKING:
    from ..partition.comm.all_to_all import AllToAll
    from ..partition.comm.group import Ranks
    from ..partition.gradient_buckets import GradientBucket
    from .domain import Domain
    from .param import ParamRecord

_PHASE = "settling what quantized gradients owe"


class Residual:
    """The residual of one bucket on this rank.

    Attributes:
        values: 1D, as long as the bucket's buffer, bf16.
    """

    def __init__(self, layout: BucketLayout, ranks: Ranks, device: torch.device):
        """
        Args:
            layout: of the params in the buffer.
            ranks: that reduce the bucket's gradients.
        """
        self.values = zeros(layout.numel, torch.bfloat16, device)
        self._layout, self._ranks = layout, ranks
        owners = BucketLayout((layout.numel,), ranks.size)
        self._owned = [owners.shard_slice(rank) for rank in range(ranks.size)]
        # Backwards may run on other streams than the last one, and than a save.
        self.uses = StreamUses(device)
        self.uses.mark()

    def own_part(self, index: int) -> tuple[int, torch.Tensor]:
        """Returns the part of param ``index`` that this rank owns: its first element in the param, and a view of it."""
        first, owned = self._layout.offsets[index], self._owned[self._ranks.rank]
        end = first + self._layout.numels[index]
        start = min(max(first, owned.start), end)
        return start - first, self.values[start : max(start, min(end, owned.stop))]

    def zero(self) -> None:
        """Forgets what is owed."""
        self.uses.occupy()
        self.values.zero_()

    def settle(self, exchange: AllToAll) -> None:
        """Collective: the owner of each slice takes over what all ranks owe of it, summed in fp32, in rank order."""
        self.uses.occupy()
        rank, slices = self._ranks.rank, [self.values[each] for each in self._owned]
        mine = slices[rank]
        others = [mine if other == rank else torch.empty_like(mine) for other in range(self._ranks.size)]
        exchange.start(slices, others, _PHASE)()
        total = torch.zeros_like(mine, dtype=torch.float32)
        for each in others:
            total += each
        self.values.zero_()
        mine.copy_(total)


def residuals_of(domain: Domain) -> list[Residual]:
    """Returns those of all buckets, the same number on all ranks; empty without error feedback."""
    buckets = () if domain.reducer is None else domain.reducer.buckets
    return [found for bucket in buckets if (found := _of_bucket(bucket)) is not None]


def residual_of(domain: Domain | None, entry: ParamRecord | None) -> tuple[int, torch.Tensor] | None:
    """Returns this rank's part of what is owed of a param, see :meth:`Residual.own_part`; None if nothing is kept."""
    if domain is None or entry is None or domain.reducer is None:
        return None
    found = _of_bucket(domain.reducer.buckets[entry.shard.number])
    return None if found is None else found.own_part(entry.index)


def _of_bucket(bucket: GradientBucket) -> Residual | None:
    found: Residual | None = getattr(bucket.code, "residual", None)
    return found


def settle(domain: Domain) -> None:
    """Collective: settles the residuals of all buckets."""
    found = residuals_of(domain)
    if found:
        assert domain.links is not None
        transport = domain.links.shards if domain.mesh.shard.size > 1 else domain.links.replicas
        exchange = transport.all_to_all(_PHASE)
        for each in found:
            each.settle(exchange)
