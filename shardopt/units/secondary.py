"""A secondary shard: this rank's part of a gathered bucket, kept for the next gather of the same values.

What holders keep is larger than slices, and so fewer ranks have all of it between them: see
:mod:`shardopt.partition.comm.holders`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..partition.comm.holders import Holders, part_of
from ..partition.memory import Memory

if TYPE_CHECKING:
    from ..partition.comm.all_gather import Window
    from ..partition.comm.transport import Transport


class SecondaryShard:
    """This rank's part of what one bucket gathers: of its values, or of the messages that these travel as."""

    def __init__(self, transport: Transport, holders: Holders, window: Window):
        """Collective: allocates the part of what this window gathers, and opens it to the other holders."""
        self._holders, flat = holders, window.flat
        numel, dtype = flat.numel(), flat.dtype
        if window.code is not None:
            numel, dtype = numel // window.shard_numel * window.code.message_bytes, torch.uint8
        self._memory = Memory(numel // holders.size, dtype, flat.device)
        self._number, self._peers = transport.open_parts(self._memory.tensor, holders)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes at this moment."""
        return self._memory.nbytes if self._memory.is_allocated else 0

    def keep(self, flat: torch.Tensor, name: str) -> None:
        """Copies the part from what was gathered, for which the current stream has waited."""
        if not self._memory.is_allocated:
            self._memory.allocate()
        self._memory.tensor.copy_(part_of(flat, self._holders))
        self._holders.announce(self._number, f"holding {name}")

    def window(self, flat: torch.Tensor) -> Window:
        """Returns the window to gather the parts into ``flat``, in which this rank's part is in place."""
        part_of(flat, self._holders).copy_(self._memory.tensor)
        return self._holders.window(flat, self._number, self._peers)

    def free(self) -> None:
        """Frees the part. No rank may gather it any more; it is allocated again when it is kept."""
        self._memory.free()
