"""What all ranks know of each param's gradient at the end of a backward, by one all-reduce.

A report is a vector of int64. Each rank fills in its own report, and the sum over ranks is the report of all of them::

    failed, weight   updated   limbs, counts      largest
    [ranks]          [1]       [params, 22]       [pieces]

Sums of integers have the same bits in any order. Limbs and counts are added up; a flag becomes the number of ranks that
set it. A sum does not keep a maximum, so every piece (the part of one param that lies in one shard) has a word of its
own: only the owner of the piece fills the word in, and each rank takes the maximum over the pieces of a param. A bucket
of P params has at most P + ranks - 1 pieces, and one word more for each empty param.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import compress, count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.reductions import COLUMNS, LARGEST, LIMBS, NONFINITE

if TYPE_CHECKING:
    from ..partition.layout import BucketLayout

    Array = np.ndarray[Any, Any]

_MARKS = 2  # after a word for each rank: "updated", "spoilt"
# The words of a param: the limbs of its sum of squares, a count of elements, and three counts of ranks.
_NONFINITE, _PRESENT, _WORDS = LIMBS, LIMBS + 1, LIMBS + 4


class ReportLayout:
    """The place of each number in a report, the same on all ranks of one domain."""

    def __init__(self, params: Sequence[tuple[BucketLayout, int]], shard_rank: int, ranks: int):
        """
        Args:
            params: the bucket of each param and the param's index in it, in the order of the report.
            shard_rank: which shard of each bucket this rank owns.
            ranks: how many ranks report, replicas included.
        """
        self.ranks, self.num_params = ranks, len(params)
        starts = np.array([bucket.offsets[index] for bucket, index in params], dtype=np.int64)
        numels = np.array([bucket.numels[index] for bucket, index in params], dtype=np.int64)
        shards = np.array([max(bucket.shard_numel, 1) for bucket, _ in params], dtype=np.int64)
        first, last = starts // shards, (starts + np.maximum(numels, 1) - 1) // shards  # shards that the param spans
        # An empty param has one word, which stays 0: np.maximum.reduceat takes no empty runs.
        words = last - first + 1
        self.first_piece = np.cumsum(words) - words
        self.num_pieces = int(words.sum())
        is_own = (numels > 0) & (first <= shard_rank) & (shard_rank <= last)
        self.own_params = np.flatnonzero(is_own)
        self.own_pieces = (self.first_piece + shard_rank - first)[is_own]

    def places(self, params: Array) -> Array:
        """Returns where in a report this rank's totals lie: 1D [rows * COLUMNS] int64.

        Args:
            params: 1D [rows], the param of each row of totals, or -1: its totals are zeros, and may be added anywhere.
        """
        head, body = self.ranks + _MARKS, self.num_params * _WORDS
        places = np.zeros((len(params), COLUMNS), dtype=np.int64)
        is_param = params >= 0
        words = head + params[is_param, None] * _WORDS
        places[is_param, :LIMBS], places[is_param, NONFINITE] = words + np.arange(LIMBS), words[:, 0] + _NONFINITE
        piece_of = np.full(self.num_params, -1)
        piece_of[self.own_params] = self.own_pieces
        places[is_param, LARGEST] = head + body + piece_of[params[is_param]]
        return places.reshape(-1)


class Report:
    """The report of one rank, zeros at first, and, after its sum over ranks, of all ranks.

    Attributes:
        vector: 1D int64, in host memory; all else is a view of it.
        limbs: 2D [params, LIMBS] int64: the sums of squares of the finite elements.
        nonfinite: 1D [params] int64: number of elements that are Inf or NaN.
    """

    def __init__(self, layout: ReportLayout):
        head, body = layout.ranks + _MARKS, layout.num_params * _WORDS
        words = np.zeros(head + body + layout.num_pieces, dtype=np.int64)
        self._layout, self.vector = layout, torch.from_numpy(words)
        self._told: list[int] | None = None
        self._head, self._pieces = words[:head], words[head + body :]
        self._params = words[head : head + body].reshape(layout.num_params, _WORDS)
        self.limbs, self.nonfinite = self._params[:, :LIMBS], self._params[:, _NONFINITE]

    # -- this rank fills in --------------------------------------------------------------------------------------------

    def fill_sums(self, sums: Array) -> None:
        """Fills in the totals of this rank's slices.

        Only one of the ranks that replicate a shard may do this: the report would count its gradients twice.

        Args:
            sums: 2D [params, COLUMNS] int64, as in ``Totals``.
        """
        self.limbs[:], self.nonfinite[:] = sums[:, :LIMBS], sums[:, NONFINITE]
        self._pieces[self._layout.own_pieces] = sums[self._layout.own_params, LARGEST]

    def fill_flags(self, flags: Array) -> None:
        """Fills in what happened to each gradient on this rank.

        Args:
            flags: 2D [3, params] bool: a gradient arrived in this backward; one of an earlier backward was there when
                this one began; a gradient arrived after its bucket was sent.
        """
        self._params[:, _PRESENT:] = flags.T

    def mark_updated(self, vector: torch.Tensor, is_updated: torch.Tensor) -> None:
        """Says whether this backward has changed this rank's params or states.

        Args:
            vector: the report, which may travel from a device.
            is_updated: 0D bool, there.
        """
        vector[self._layout.ranks] = is_updated

    def mark_failed(self, rank: int) -> None:
        """Says that this rank's gradients are missing."""
        self._head[rank] |= 1

    def tell_weight(self, rank: int, word: int) -> None:
        """Tells this rank's word of the weights of gradients; 0: it has none."""
        self._head[rank] |= word << 1

    def mark_spoilt(self) -> None:
        """Says that gradients of this rank's experts hold an Inf or NaN, of which other ranks know nothing."""
        self._head[self._layout.ranks + 1] = 1

    # -- all ranks read ------------------------------------------------------------------------------------------------

    @property
    def told(self) -> list[int]:
        """The ranks that failed, or told a weight: none, in most rounds."""
        if self._told is None:
            self._told = self._head[: self._layout.ranks].nonzero()[0].tolist()
        return self._told

    @property
    def failed(self) -> list[int]:
        """The ranks whose gradients are missing."""
        return [rank for rank in self.told if self._head[rank] & 1]

    @property
    def weights(self) -> list[int]:
        """By rank: its word of the weights of gradients."""
        words: list[int] = (self._head[: self._layout.ranks] >> 1).tolist()
        return words

    @property
    def spoilt(self) -> bool:
        """True if gradients of any rank's experts hold an Inf or NaN."""
        return bool(self._head[self._layout.ranks + 1])

    @property
    def updated(self) -> bool:
        """True if this backward has changed params or states of any rank."""
        return bool(self._head[self._layout.ranks])

    @property
    def largest(self) -> Array:
        """1D [params] fp32: the largest magnitude of the finite elements."""
        if not self._layout.num_params:
            return np.zeros(0, dtype=np.float32)
        # The bits of nonnegative floats sort as their values do.
        bits = np.maximum.reduceat(self._pieces, self._layout.first_piece)
        return bits.astype(np.int32).view(np.float32)

    @property
    def totals(self) -> Array:
        """2D [params, COLUMNS] int64, as in ``Totals``: of all ranks' slices."""
        found = np.zeros((self._layout.num_params, COLUMNS), np.int64)
        found[:, :LIMBS], found[:, NONFINITE] = self.limbs, self.nonfinite
        found[:, LARGEST] = self.largest.view(np.int32)
        return found

    @cached_property
    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """By param, the number of ranks on which a gradient arrived, of those that held one before, of late ones."""
        # Lists: there is little to ask of them, and a call of NumPy costs more.
        present, held, late = self._params[:, _PRESENT:].T.tolist()
        return present, held, late

    @property
    def held_apart(self) -> list[int]:
        """The params that hold an earlier gradient on some ranks, and none on others."""
        _, held, _ = self.counts
        if {*held} <= {0, self._layout.ranks}:  # nearly always
            return []
        return [param for param, count in enumerate(held) if 0 < count < self._layout.ranks]

    @property
    def late(self) -> list[int]:
        """The params of which a gradient arrived on any rank after its bucket was sent."""
        return list(compress(count(), self.counts[2]))
