"""A shard: this rank's slice of a bucket, with the masters and states that belong to it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .kernels.formats import FP32, Format, format_of
from .kernels.tables import BLOCK, Gradients, Streams
from .partition.bucket import Bucket, dense_strides, flattened, in_storage_order
from .partition.gather import GatheredBucket, Gatherer
from .partition.layout import Piece
from .partition.reducer import ReducedBucket
from .partition.room import zeros
from .partition.wire import Window


class Slice(NamedTuple):
    """Where a param's elements lie in a state of the shard."""

    start: int  # first element of the param, in storage order
    local: slice  # of the shard; empty where the shard holds nothing of the param


class Shard:
    """Holds masters and states for one slice of a bucket, and the tables that a kernel needs to update it."""

    window: Window  # on bucket.flat; opened by all ranks together
    reduced: ReducedBucket  # where the module was handed over
    number: int  # of the bucket, in the reducer
    gathered: GatheredBucket | None = None  # where params are sharded

    def __init__(self, bucket: Bucket, rank: int, states: Iterable[str], trains: bool = True):
        self.bucket = bucket
        self.pieces: tuple[Piece, ...] = bucket.layout.pieces(rank)
        numel = bucket.layout.shard_numel
        is_there = bucket.resident_bytes == bucket.nbytes
        self.param = bucket.shard(rank) if is_there else zeros(numel, bucket.dtype, bucket.device)  # 1D [shard_numel]
        self.format: Format = format_of(bucket.dtype, "a param")
        self.master = None if self.format is FP32 or not trains else self._zeros().copy_(self.param)
        self.states: dict[str, torch.Tensor] = {}
        self.ensure_states(states)
        self._piece_of_param = {piece.param: piece for piece in self.pieces}
        self._strides = [dense_strides(param) for param in bucket.params]
        self._no_row = len(self.pieces)  # the row of blocks that hold no param; its end stays 0
        self.row_of_block = self._make_row_of_block()

    def _make_row_of_block(self) -> torch.Tensor:
        rows = np.full(self.param.numel() // BLOCK, self._no_row, dtype=np.int32)
        for row, piece in enumerate(self.pieces):
            rows[piece.shard_start // BLOCK : -(-piece.shard_end // BLOCK)] = row
        return torch.from_numpy(rows).to(self.param.device)

    @property
    def masters(self) -> tuple[str, ...]:
        """("master",) where the params are of low precision."""
        return () if self.master is None else ("master",)

    @property
    def num_rows(self) -> int:
        return len(self.pieces) + 1

    def ensure_states(self, names: Iterable[str]) -> None:
        """Allocates, zeroed, the states that are not there yet."""
        for name in names:
            if name not in self.states:
                self.states[name] = self._zeros()

    def _zeros(self) -> torch.Tensor:
        return zeros(self.param.numel(), torch.float32, self.param.device)

    def renew(self) -> None:
        """Copies masters and states, so that a state dict taken before keeps what it showed when they are loaded."""
        self.states = {name: self._zeros().copy_(state) for name, state in self.states.items()}
        self.master = None if self.master is None else self._zeros().copy_(self.master)

    def streams(self, states: Sequence[str]) -> Streams:
        return Streams(self.param, self.master, tuple(self.states[name] for name in states))

    def reduce_into(self, reduced: ReducedBucket, number: int) -> None:
        """Gradients of this shard will be found in ``reduced.total``, where bucket ``number`` is summed."""
        self.reduced, self.number = reduced, number

    def part_with_params(self, gatherer: Gatherer) -> GatheredBucket:
        """Collective: keeps this rank's slice of the params, and gives the rest to the gatherer."""
        self.param = zeros(self.param.numel(), self.param.dtype, self.param.device).copy_(self.param)
        self.gathered = gatherer.add(self.bucket, self.param)
        return self.gathered

    def gradients(self, grads: Mapping[int, tuple[torch.Tensor, int]]) -> Gradients:
        """The table for these gradients, all of one dtype.

        Args:
            grads: row of the piece -> dense gradient in storage order, and which element of the param is its first.
        """
        rows = np.zeros((self.num_rows, 2), dtype=np.int64)
        for row, (grad, start) in grads.items():
            piece = self.pieces[row]
            rows[row, 0] = grad.data_ptr() + (piece.start - start - piece.shard_start) * grad.element_size()
            rows[row, 1] = piece.shard_end
        aligned = not np.any(rows[:, 0] % 16)
        return Gradients(self.row_of_block, torch.from_numpy(rows).to(self.param.device), aligned)

    def strides(self, index: int) -> tuple[int, ...]:
        """In which the bucket's param ``index`` lies."""
        return self._strides[index]

    def ordered(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the bucket's param ``index`` with its memory in the param's storage order."""
        return in_storage_order(grad, self._strides[index])

    # -- one param's elements --------------------------------------------------------------------------------------

    def slice_of(self, index: int) -> Slice:
        piece = self._piece_of_param.get(index)
        if piece is None:
            return Slice(0, slice(0, 0))
        return Slice(piece.start, slice(piece.shard_start, piece.shard_end))

    def read(self, name: str, index: int) -> torch.Tensor:
        """This shard's elements of state ``name`` (or "master") of the bucket's param ``index``, 1D, not a copy."""
        return self.whole(name)[self.slice_of(index).local]

    def write(self, name: str, index: int, start: int, values: torch.Tensor) -> None:
        """Sets them from ``values``: 1D, the param's elements from ``start`` on, in storage order, at least ours."""
        where = self.slice_of(index)
        numel = where.local.stop - where.local.start
        self.whole(name)[where.local].copy_(values[where.start - start : where.start - start + numel])

    def write_whole(self, name: str, index: int, tensor: torch.Tensor) -> None:
        """Sets them from a tensor with the param's full shape."""
        if tensor.numel():
            self.write(name, index, 0, flattened(in_storage_order(tensor, self._strides[index])))

    def as_param(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A view of a whole bucket-like buffer with the shape of the bucket's param ``index``."""
        return self.bucket.view(flat, index, self.bucket.params[index])

    def refresh_master(self, index: int) -> None:
        """Makes the master follow a param that was written: elements that still are the master rounded keep it."""
        if self.master is None:
            return
        where = self.slice_of(index).local
        master, param = self.master[where], self.param[where]
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))

    def read_chunk(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of this shard's "param", "master" or state ``name``, 1D, not a copy."""
        return (self.param if name == "param" else self.whole(name))[start:stop]

    def write_chunk(self, name: str, start: int, values: torch.Tensor) -> None:
        """Sets them from 1D ``values``."""
        self.read_chunk(name, start, start + values.numel()).copy_(values)

    def whole(self, name: str) -> torch.Tensor:
        """The state ``name`` (or "master") of the whole shard, 1D."""
        if name != "master":
            return self.states[name]
        assert self.master is not None
        return self.master
