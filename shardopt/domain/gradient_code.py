"""Gradients on the wire in 8 or 4 bits: quantized by each rank (``block_code.py``), summed in fp32 by a slice's owner.

With *error feedback* each rank keeps what quantizing took from its gradients (``residual.py``), and adds it to those of
its next backward, so that over steps everything arrives::

    value = gradient + residual
    sent = value                        from here on what its codes hold
    residual = value - sent

A param without a gradient on this rank sends zeros, and its residual stays. A block with an Inf or a NaN has no
residual afterwards: the step that it spoils is skipped.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from .block_code import BlockCode
from .shard_tables import ShardTables

if TYPE_CHECKING:
    from ..kernels.formats import BlockFormat
    from ..partition.layout import BucketLayout
    from .residual import Residual


class GradientCode:
    """Encodes the gradients of one bucket for the wire, and decodes what other ranks sent.

    Attributes:
        residual: what quantizing has taken from this rank's gradients; None without error feedback.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        format: BlockFormat,
        device: torch.device,
        residual: Residual | None = None,
    ):
        """Compiles the kernels.

        Args:
            layout: of the params in the buffer, over the slices that travel.
            dtype: of the buffer.
        """
        self.residual = residual
        self._code = BlockCode(layout.shard_numel, dtype, torch.float32, format, device, residual is not None)
        self._pieces = [layout.pieces(rank) for rank in range(layout.num_shards)]
        self._slices = [layout.shard_slice(rank) for rank in range(layout.num_shards)]
        self._tables = [ShardTables(each, layout.shard_numel, device) for each in self._pieces]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that stay allocated."""
        return [] if self.residual is None else [self.residual.values]

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one slice."""
        return self._code.message_bytes

    def encode(self, buffer: torch.Tensor, params: Collection[int]) -> list[torch.Tensor]:
        """See :meth:`.reduce_scatter.Code.encode`."""
        if self.residual is not None:
            self.residual.uses.occupy()
        messages = []
        for pieces, tables, here in zip(self._pieces, self._tables, self._slices, strict=True):
            grads, residual = buffer[here], None if self.residual is None else self.residual.values[here]
            there = {
                row: (grads[piece.shard_start :], piece.start)
                for row, piece in enumerate(pieces)
                if piece.param in params
            }
            messages.append(self._code.encode(grads, tables.gradients(there) if there else None, residual))
        return messages

    def decode_into(self, target: torch.Tensor, message: torch.Tensor, first: int, add: bool) -> None:
        """See :meth:`.reduce_scatter.Code.decode_into`."""
        self._code.decode_into(target, message, first, add)
