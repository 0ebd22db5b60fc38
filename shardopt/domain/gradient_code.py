"""Gradients in 8 bits on the wire: quantized by each rank in blocks of 256, summed in fp32 by the owner of a slice.

Encoding and decoding are passes of no rule, for which the kernels of a step are compiled: the bits are the same from
native code and from Triton, and those of states in 8 bits (``kernels/formats.py``)::

    encode    state_sent = grad                   sent: codes, and an fp32 scale a block
    decode    param = sent                        the first rank's message
              param = param + sent                those of the others, in the order of ranks

A message is the codes of a slice, then its scales, as bytes. Blocks of a block format hold elements of one param, so
that padding and other params change no scale. A block with an Inf or a NaN arrives as NaN throughout.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ..kernels.formats import FP32, format_of
from ..kernels.launch import backend_of
from ..kernels.spec import Spec
from ..kernels.tables import BLOCK, Gradients, Streams, Tables
from ..rules.passes import Pass
from .shard_tables import ShardTables

if TYPE_CHECKING:
    from ..kernels.formats import BlockFormat
    from ..partition.layout import BucketLayout

_SENT = "sent"
_NO_SCALARS = torch.zeros(1, 1)


def _pass(name: str, source: str, written: tuple[str, ...], writes_param: bool) -> Pass:
    return Pass(name, (_SENT,), (), source, written, (), (), (), writes_param, ())


_ENCODE = _pass("encode", f"state_{_SENT} = grad", (_SENT,), writes_param=False)
_DECODE = _pass("decode", f"param = state_{_SENT}", (), writes_param=True)
_DECODE_AND_ADD = _pass("decode_and_add", f"param = param + state_{_SENT}", (), writes_param=True)


class GradientCode:
    """Encodes the gradients of one bucket for the wire, and decodes what other ranks sent."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, format: BlockFormat, device: torch.device):
        """Compiles the kernels.

        Args:
            layout: of the params in the buffer, over the slices that travel.
            dtype: of the buffer.
        """
        grad = format_of(dtype, "a buffer of gradients")
        self._encode = Spec((_ENCODE,), grad, grad, None, (format,))
        self._decode = Spec((_DECODE, _DECODE_AND_ADD), FP32, FP32, None, (format,))
        self._numel, self._device, self._backend = layout.shard_numel, device, backend_of(device)
        self._pieces = [layout.pieces(rank) for rank in range(layout.num_shards)]
        self._tables = [ShardTables(each, self._numel, device) for each in self._pieces]
        for spec in (self._encode, self._decode):
            self._backend.prepare(spec, device, aligned=True)

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one slice."""
        return message_bytes(self._numel)

    def encode(self, buffer: torch.Tensor, params: Collection[int]) -> list[torch.Tensor]:
        """See :meth:`.reduce_scatter.Code.encode`."""
        messages = []
        for number, (pieces, tables) in enumerate(zip(self._pieces, self._tables, strict=True)):
            grads = buffer[number * self._numel : (number + 1) * self._numel]
            there = {
                row: (grads[piece.shard_start :], piece.start)
                for row, piece in enumerate(pieces)
                if piece.param in params
            }
            # Kernels write neither padding nor params without a gradient, which decode to zeros.
            message = torch.zeros(self.message_bytes, dtype=torch.uint8, device=self._device)
            if there:
                streams = self._streams(grads, message, 0, self._numel)
                self._backend.run(self._encode, 0, streams, Tables(tables.gradients(there), _NO_SCALARS))
            messages.append(message)
        return messages

    def decode_into(self, target: torch.Tensor, message: torch.Tensor, first: int, add: bool) -> None:
        """See :meth:`.reduce_scatter.Code.decode_into`."""
        numel = target.numel()
        if numel == 0:
            return
        blocks = numel // BLOCK
        rows = torch.tensor([[target.data_ptr(), numel]], dtype=torch.int64)
        row_of_block = torch.zeros(blocks, dtype=torch.int32, device=self._device)
        streams = self._streams(target, message, first, first + numel)
        gradients = Gradients(row_of_block, rows, target.data_ptr() % 16 == 0)
        self._backend.run(self._decode, int(add), streams, Tables(gradients, _NO_SCALARS))

    def _streams(self, param: torch.Tensor, message: torch.Tensor, start: int, stop: int) -> Streams:
        """Returns the streams of elements [start, stop) of a slice. ``param``: the buffer, or the target."""
        scales = message[self._numel : self._numel + self._numel // BLOCK * 4].view(torch.float32)
        return Streams(param, None, (message[start:stop],), (scales[start // BLOCK : stop // BLOCK],))


def message_bytes(numel: int) -> int:
    """Returns the bytes of a message of so many elements, whole blocks: codes and fp32 scales."""
    return numel + numel // BLOCK * 4
