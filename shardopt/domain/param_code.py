"""Params on the wire in 8 bits: each rank encodes its slice, and all ranks, that one too, compute with what arrives.

The slice itself stays as it is, and the next gather encodes it anew. So nothing that rounding takes adds up over steps,
and all ranks hold the same values. At stage 3 slices lie apart from buckets anyway; at stages 1 and 2
:class:`.exact_slice.ExactSlice` keeps them apart::

    rank 0    slice 0 -> message 0  \\            / decode 0 | decode 1          time ->
                                       exchange
    rank 1    slice 1 -> message 1  /            \\ decode 0 | decode 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .block_code import BlockCode
from .shard_tables import ShardTables

if TYPE_CHECKING:
    from ..kernels.formats import BlockFormat
    from ..partition.layout import BucketLayout


class ParamCode:
    """Encodes this rank's slice of one bucket's params, and decodes any rank's."""

    def __init__(
        self,
        layout: BucketLayout,
        rank: int,
        dtype: torch.dtype,
        format: BlockFormat,
        device: torch.device,
        shows: bool = False,
    ):
        """Compiles the kernels.

        Args:
            shows: True if this rank decodes its own slice as it encodes it.
        """
        self._code = BlockCode(layout.shard_numel, dtype, dtype, format, device, shows=shows)
        self._rank, self._shows = rank, shows
        self._tables = ShardTables(layout.pieces(rank), layout.shard_numel, device)
        self._numel = layout.shard_numel

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one slice."""
        return self._code.message_bytes

    def encode(self, shard: torch.Tensor, shown: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the message of this rank's slice; a code that ``shows`` puts what it holds into ``shown``."""
        assert (shown is not None) == self._shows
        return self._code.encode(shard, self._tables.gradients_in(shard), shown=shown)

    def decode(self, flat: torch.Tensor, messages: torch.Tensor) -> None:
        """Fills every rank's slice with what its message holds, but this one's where ``encode`` has done so."""
        slices = zip(flat.split(self._numel), messages.split(self.message_bytes), strict=True)
        for rank, (shard, message) in enumerate(slices):
            if rank != self._rank or not self._shows:
                self.decode_into(shard, message)

    def decode_into(self, target: torch.Tensor, message: torch.Tensor, first: int = 0) -> None:
        """Fills ``target`` with what the message of a slice holds, from element ``first`` on: whole blocks."""
        self._code.decode_into(target, (message,), first)

    def is_shown(self, shown: torch.Tensor, message: torch.Tensor, first: int) -> bool:
        """See :meth:`.block_code.BlockCode.is_shown`."""
        return self._code.is_shown(shown, message, first)
