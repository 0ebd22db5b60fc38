"""A buffer in which a bucket's gradients are reduced, and their views in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .streams import StreamUses

if TYPE_CHECKING:
    from .gradient_buckets import GradientBucket


class ReductionBuffer(StreamUses):
    """Memory for a bucket's gradients while they are reduced: from a pool, or the gradient's own."""

    def __init__(self, memory: torch.Tensor, is_pooled: bool):
        super().__init__(memory.device)
        self.memory, self.is_pooled = memory, is_pooled  # 1D
        # The views of a bucket's gradients, by index. Making one takes longer than a small copy.
        self._views: dict[GradientBucket, dict[int, torch.Tensor]] = {}

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
        self.occupy()  # another stream may have waited for an earlier reduction of this buffer
        views = self._views.setdefault(bucket, {})
        for index in grads.keys() - views.keys():
            views[index] = self.memory.as_strided(grads[index].size(), strides[index], bucket.offsets[index])
        if share == 1.0:
            torch._foreach_copy_([views[index] for index in grads], list(grads.values()))
        else:
            for index, grad in grads.items():
                torch.mul(grad, share, out=views[index])  # in the gradient's dtype, then rounded to the buffer's
