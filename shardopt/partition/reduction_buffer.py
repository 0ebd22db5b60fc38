"""A buffer in which a bucket's gradients are reduced, and their views in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .streams import StreamUses

if TYPE_CHECKING:
    from .gradient_buckets import GradientBucket


class ReductionBuffer(StreamUses):
    """Memory for a bucket's gradients while they are reduced: from a pool, or the gradient's own.

    Attributes:
        buckets: those that have views in it.
    """

    def __init__(self, memory: torch.Tensor, is_pooled: bool):
        super().__init__(memory.device)
        self.memory, self.numel, self.is_pooled = memory, memory.numel(), is_pooled  # 1D
        # The views of some of a bucket's gradients, by their indices. Making one takes longer than a small copy.
        self._views: dict[tuple[GradientBucket, tuple[int, ...]], list[torch.Tensor]] = {}
        self.buckets: set[GradientBucket] = set()

    def fill(
        self,
        bucket: GradientBucket,
        grads: Mapping[int, torch.Tensor],
        strides: Sequence[tuple[int, ...]],
        share: float,
    ) -> None:
        """Copies gradients to their places, multiplied by ``share``.

        Args:
            grads: by index in the bucket; of the params' shapes, any float dtype.
            strides: of each of the bucket's params.
        """
        if not grads:
            return
        if self.has_streams:
            self.occupy()  # another stream may have waited for an earlier reduction of this buffer
        place = bucket, tuple(grads)
        if place not in self._views:
            self.buckets.add(bucket)
            self._views[place] = [
                self.memory.as_strided(grad.size(), strides[index], bucket.offsets[index])
                for index, grad in grads.items()
            ]
        if share == 1.0:
            torch._foreach_copy_(self._views[place], list(grads.values()))
        else:
            for view, grad in zip(self._views[place], grads.values(), strict=True):
                torch.mul(grad, share, out=view)  # in the gradient's dtype, then rounded to the buffer's
