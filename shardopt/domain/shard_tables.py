"""The tables by which kernels find the params of a shard: where gradients lie, what noise depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kernels.tables import BLOCK, Gradients, joined_blocks

if TYPE_CHECKING:
    from ..partition.layout import Piece


class ShardTables:
    """Makes the tables of one shard. A table has one row for each piece of a param, and one for blocks without a param.

    Attributes:
        host_row_of_block: the row of each block, in host memory.
        row_of_block: the same on the device of the params.
        num_rows: of each table.
    """

    def __init__(self, pieces: Sequence[Piece], numel: int, device: torch.device):
        self._pieces, self._device, self.num_rows = pieces, device, len(pieces) + 1
        self._firsts = np.array([piece.start - piece.shard_start for piece in pieces], np.int64)
        self._ends = np.array([piece.shard_end for piece in pieces], np.int64)
        # The last row is that of blocks without a param. It ends at 0, so that kernels skip these blocks.
        rows = np.full(numel // BLOCK, len(pieces), dtype=np.int32)
        for row, piece in enumerate(pieces):
            rows[piece.shard_start // BLOCK : -(-piece.shard_end // BLOCK)] = row
        self.host_row_of_block = torch.from_numpy(rows)
        self.row_of_block = self.host_row_of_block.to(device)
        self._joined: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the tables that stay, on the device of the params."""
        return sum(each.nbytes for each in (self.row_of_block, *self._joined.values()))

    def joined_with(self, others: Sequence[ShardTables]) -> torch.Tensor:
        """Returns the row of each block: first the blocks of this shard, then those of the others in their order."""
        if not others:
            return self.row_of_block
        key = tuple(map(id, others))  # which live as long as this one
        if key not in self._joined:
            every = (self, *others)
            found = joined_blocks([each.host_row_of_block for each in every], [each.num_rows for each in every])
            self._joined = {key: found.to(self._device)}
        return self._joined[key]

    def gradients(self, grads: Mapping[int, tuple[torch.Tensor, int]], at_rest: bool = False) -> Gradients:
        """Returns the table for these gradients, all of one dtype, with its rows in host memory.

        Args:
            grads: row of the piece -> dense gradient in storage order, and which element of the param is its first.
            at_rest: True if they are in host memory, False if they are with the params.
        """
        tensors, starts = [grad for grad, _ in grads.values()], [start for _, start in grads.values()]
        return self.gradients_of(list(grads), tensors, starts, at_rest)

    def gradients_of(
        self, rows: list[int], grads: Sequence[torch.Tensor], starts: Sequence[int], at_rest: bool = False
    ) -> Gradients:
        """Does what :meth:`gradients` does, without a pair for each gradient: every step makes such a table."""
        table = np.zeros((self.num_rows, 2), dtype=np.int64)
        if rows:
            firsts = (self._firsts[rows] - np.array(starts)) * grads[0].element_size()
            addresses = np.fromiter(map(torch.Tensor.data_ptr, grads), np.int64, len(rows))
            table[rows, 0], table[rows, 1] = addresses + firsts, self._ends[rows]
        aligned = not np.any(table[:, 0] % 16)
        row_of_block = self.host_row_of_block if at_rest else self.row_of_block
        return Gradients(row_of_block, torch.from_numpy(table), aligned)

    def gradients_in(self, total: torch.Tensor, rows: Sequence[int] | None = None) -> Gradients:
        """Returns the table for gradients of the whole shard that lie as the shard does, 1D [shard_numel].

        Args:
            rows: of the pieces that have gradients; None: all.
        """
        table = np.zeros((self.num_rows, 2), dtype=np.int64)
        there: Sequence[int] | slice = slice(0, len(self._pieces)) if rows is None else rows
        table[there, 0], table[there, 1] = total.data_ptr(), self._ends[there]
        return Gradients(self.row_of_block, torch.from_numpy(table), total.data_ptr() % 16 == 0)

    def noise(self, counters: Mapping[int, tuple[int, int, int]]) -> torch.Tensor:
        """Returns the table of noise (:func:`noise_from` has its columns), in host memory.

        Args:
            counters: row of the piece -> (key, key, phase); the noise of a row depends on these and on the element.
        """
        rows = np.zeros((self.num_rows, 4), dtype=np.int64)
        for row, (key, other_key, phase) in counters.items():
            piece = self._pieces[row]
            rows[row] = (key, other_key, piece.start - piece.shard_start, phase)
        return torch.from_numpy(rows.astype(np.int32))


def joined_table(shards: Sequence[ShardTables], tables: Sequence[Gradients], itemsize: int) -> Gradients:
    """Returns the table of several shards of one device as if they were one, with its rows in host memory.

    Args:
        tables: of each shard, with rows in host memory.
        itemsize: bytes of an element of the gradients.
    """
    if len(shards) == 1:
        return tables[0]
    first, *others = shards
    return Gradients.joined(tables, itemsize, first.joined_with(others))
