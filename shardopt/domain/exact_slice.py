"""The exact values of one shard, where all ranks compute with what 8 bits hold of them: stages 1 and 2.

The slice lies apart from the bucket, in the param's dtype. Updates read and write it, so that nothing that rounding
takes adds up over steps; masters follow it::

    update        values  ->  values
    gather        values  ->  message, and what it holds  ->  the bucket's own part, on this rank as on the others
    a write to a param: an element of the bucket that is not what the message holds counts, and goes into ``values``

Before the first gather the bucket itself is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.tables import BLOCK

if TYPE_CHECKING:
    from .param_code import ParamCode

# Elements at a time, on a CPU: what a message holds of them stays in the cache until it is compared.
_LOOKED_AT = 1 << 18


class ExactSlice:
    """The exact values of a shard, and the code by which its window travels (:class:`.all_gather.ShardCode`).

    Attributes:
        values: 1D [shard_numel], of the bucket's dtype.
        is_ahead: they were updated, and the bucket does not show it yet.
    """

    def __init__(self, values: torch.Tensor, shown: torch.Tensor, code: ParamCode):
        """``shown`` is the shard's place in the bucket, 1D [shard_numel]."""
        self.values, self._shown, self._code = values, shown, code
        self.is_ahead = False
        self._message: torch.Tensor | None = None  # that the bucket shows; None: the bucket is exact

    @property
    def nbytes(self) -> int:
        """The bytes that stay allocated."""
        return self.values.nbytes + (0 if self._message is None else self._message.nbytes)

    @property
    def is_shown(self) -> bool:
        """True if the bucket itself is exact."""
        return self._message is None

    def take_written(self, start: int, stop: int) -> None:
        """Takes what was written to params, of elements [start, stop); also by ``.data``, which leaves no trace."""
        if self.is_ahead:
            return
        start, stop = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        own, shown = self.values[start:stop], self._shown[start:stop]
        if self._message is None:
            own.copy_(shown)
            return
        # Nearly always nothing was written. A device would make the host wait for the answer.
        if shown.is_cpu and self._code.is_shown(shown, self._message, start):
            return
        length = min(stop - start, _LOOKED_AT) if shown.is_cpu else stop - start
        for at in range(0, stop - start, max(length, 1)):
            here = slice(at, at + length)
            self._take_from(own[here], shown[here], self._message, start + at)

    def _take_from(self, own: torch.Tensor, shown: torch.Tensor, message: torch.Tensor, start: int) -> None:
        """Takes what of ``shown`` the message does not hold, from element ``start`` of the slice on."""
        expected = torch.empty_like(shown)
        self._code.decode_into(expected, message, start)
        kind = torch.int16 if shown.element_size() == 2 else torch.int32
        own.copy_(torch.where(shown.view(kind) == expected.view(kind), own, shown))

    def begin_update(self) -> None:
        """Takes what was written; from here on updates write to ``values``, until the bucket shows them."""
        self.take_written(0, self.values.numel())
        self.is_ahead = True

    def load(self, start: int, stop: int) -> None:
        """Takes elements [start, stop) of the bucket, which were loaded: also those that it happened to show before."""
        self.values[start:stop].copy_(self._shown[start:stop])

    def show(self) -> None:
        """Writes the exact values to this rank's place in the bucket."""
        self.take_written(0, self.values.numel())
        self._shown.copy_(self.values)
        self._message, self.is_ahead = None, False

    # -- as a ShardCode --------------------------------------------------------------------------------------------

    @property
    def message_bytes(self) -> int:
        """See :attr:`.all_gather.ShardCode.message_bytes`."""
        return self._code.message_bytes

    def encode(self, shard: torch.Tensor) -> torch.Tensor:
        """See :meth:`.all_gather.ShardCode.encode`; ``shard`` shows older values."""
        self.take_written(0, self.values.numel())
        self._message, self.is_ahead = self._code.encode(self.values, self._shown), False
        return self._message

    def decode(self, flat: torch.Tensor, messages: torch.Tensor) -> None:
        """See :meth:`.all_gather.ShardCode.decode`."""
        self._code.decode(flat, messages)
