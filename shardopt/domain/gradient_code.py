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

from collections.abc import Collection, Sequence
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
        owners: Sequence[int] | None = None,
    ):
        """Compiles the kernels.

        Args:
            layout: of the params in a whole buffer, over the slices that travel.
            dtype: of the buffer.
            owners: the ranks whose slices lie in the buffer; None: all.
        """
        owners = range(layout.num_shards) if owners is None else owners
        self.residual, self._made_of = residual, (layout, format, device)
        self._of_sums: GradientCode | None = None
        self._numel = layout.shard_numel
        keeps_rest = residual is not None
        self._code = BlockCode(layout.shard_numel, dtype, torch.float32, format, device, keeps_rest, sums=True)
        self._pieces = [layout.pieces(rank) for rank in owners]
        self._slices = [layout.shard_slice(rank) for rank in owners]
        self._tables = [ShardTables(each, layout.shard_numel, device) for each in self._pieces]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that stay allocated."""
        return [] if self.residual is None else [self.residual.values]

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one slice."""
        return self._code.message_bytes

    def of_sums(self, owners: Sequence[int]) -> GradientCode:
        """See :meth:`.reduce_scatter.Code.of_sums`. They share the residual."""
        if self._of_sums is None:
            layout, format, device = self._made_of
            self._of_sums = GradientCode(layout, torch.float32, format, device, self.residual, owners)
        return self._of_sums

    def encode(self, buffer: torch.Tensor, params: Collection[int] | None) -> list[torch.Tensor]:
        """See :meth:`.reduce_scatter.Code.encode`."""
        if self.residual is not None:
            self.residual.uses.occupy()
        messages = []
        for at, (pieces, tables, here) in enumerate(zip(self._pieces, self._tables, self._slices, strict=True)):
            grads = buffer[at * self._numel : (at + 1) * self._numel]
            residual = None if self.residual is None else self.residual.values[here]
            rows = [
                row
                for row, piece in enumerate(pieces)
                if (piece.param in params if params is not None else bool(grads[piece.local].any()))
            ]
            messages.append(self._code.encode(grads, tables.gradients_in(grads, rows) if rows else None, residual))
        return messages

    def decode_into(self, target: torch.Tensor, messages: Sequence[torch.Tensor], first: int) -> None:
        """See :meth:`.reduce_scatter.Code.decode_into`."""
        self._code.decode_into(target, messages, first)
