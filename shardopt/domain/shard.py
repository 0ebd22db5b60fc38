"""A shard: this rank's slice of a bucket, with the masters and states that belong to it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..kernels import codecs
from ..kernels.formats import BF16, BF16_RANDOM, FP32, BlockFormat, Format
from ..kernels.formats import format_of as dtype_format
from ..kernels.spec import StepSpec
from ..kernels.tables import BLOCK, Gradients, Noise
from ..offload.store import Chunk, Plane, ShardStorage, Store
from ..partition.bucket import Bucket
from ..partition.comm.all_gather import Window
from ..partition.gatherer import GatheredBucket, Gatherer, MemorySlice
from ..partition.gatherer import Slice as GatheredSlice
from ..partition.layout import Piece
from ..partition.memory import zeros
from ..partition.reduce_buckets import KeptBucket, PassingBucket
from ..rules import Variant
from ..rules.rule import EMA
from ..tensors.strides import dense_strides, flattened, in_storage_order
from .formats import StreamFormats


class Slice(NamedTuple):
    """Where a param's elements lie in a state of the shard."""

    start: int  # first element of the param, in storage order
    local: slice  # of the shard; empty where the shard holds nothing of the param


def scales_name(state: str) -> str:
    """Of the stream that holds the scales of a state's blocks."""
    return f"{state}.scales"


class Shard:
    """Holds masters and states for one slice of a bucket, and the tables that a kernel needs to update it.

    Masters and states are kept in their formats, and are fp32 to whoever reads or writes them here.
    """

    window: Window  # on bucket.flat; opened by all ranks together
    reduced: KeptBucket  # where the module was handed over
    passing: PassingBucket  # in its place, where gradients are released
    number: int  # of that bucket, in the reducer
    sums: Gradients  # the table of what stays in ``reduced``
    gathered: GatheredBucket | None = None  # where params are sharded
    aside: torch.Tensor | None = None  # 1D [shard_numel]: the weights, while params show their average

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        states: Iterable[str],
        store: Store,
        kept: StreamFormats,
        params_rest: bool = False,
    ):
        """
        Args:
            states: names of those to make now.
            kept: the formats of masters and of all states that there may be.
            params_rest: whether this rank's slice of the params rests in the store as well.

        Raises:
            OffloadError: the store has no room for masters and states.
        """
        self.bucket = bucket
        self.pieces: tuple[Piece, ...] = bucket.layout.pieces(rank)
        self.numel = bucket.layout.shard_numel
        is_there = bucket.resident_bytes == bucket.nbytes
        # 1D [shard_numel]; None where it rests in the store
        self.param = None if params_rest else bucket.shard(rank) if is_there else self._zeros()
        self.format: Format = dtype_format(bucket.dtype, "a param")
        self.kept = kept
        self.masters = ("master",) if kept.master is not None else ()
        # Index of a param -> 1D fp32, its slice of a master that was loaded and is not that of the param: which may be
        # loaded after it.
        self.unmatched_masters: dict[int, torch.Tensor] = {}
        self._piece_of_param = {piece.param: piece for piece in self.pieces}
        self._strides = [dense_strides(param) for param in bucket.params]
        self._no_row = len(self.pieces)  # the row of blocks that hold no param; its end stays 0
        self.host_row_of_block = self._make_row_of_block()  # in host memory
        self.row_of_block = self.host_row_of_block.to(self.device)
        self.home = store.home(self.numel, bucket.dtype, bucket.device)  # of masters and states
        try:
            self.home.ensure(self._planes((*self.masters, *states)))
            if params_rest:
                self.home.ensure({"param": Plane(bucket.dtype)})
                if is_there:
                    self.home.write("param", 0, bucket.shard(rank))
            self.restart_masters()
        except BaseException:
            self.home.release()
            raise

    def _make_row_of_block(self) -> torch.Tensor:
        rows = np.full(self.numel // BLOCK, self._no_row, dtype=np.int32)
        for row, piece in enumerate(self.pieces):
            rows[piece.shard_start // BLOCK : -(-piece.shard_end // BLOCK)] = row
        return torch.from_numpy(rows)

    @property
    def device(self) -> torch.device:
        return self.bucket.device

    @property
    def param_bytes(self) -> int:
        """Of memory that the slice of the params takes beside the bucket."""
        return 0 if self.gathered is None or self.param is None else self.param.nbytes

    def _zeros(self) -> torch.Tensor:
        return zeros(self.numel, self.bucket.dtype, self.bucket.device)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states that there are; masters are none."""
        return tuple(name for name in self.home.names if name in self.kept.states)

    def format_of(self, name: str) -> Format:
        """In which "master" or a state is kept."""
        if name == "master":
            assert self.kept.master is not None
            return self.kept.master
        return self.kept.states[name]

    def _planes(self, names: Iterable[str]) -> dict[str, Plane]:
        """What "master" and states are kept as."""
        planes: dict[str, Plane] = {}
        for name in names:
            format = self.format_of(name)
            planes[name] = Plane(format.dtype)
            if isinstance(format, BlockFormat):
                planes[scales_name(name)] = Plane(torch.float32, BLOCK)
        return planes

    @property
    def num_rows(self) -> int:
        return len(self.pieces) + 1

    def ensure_states(self, names: Iterable[str]) -> None:
        """Makes the states, of zeros, that are not there yet."""
        self.home.ensure(self._planes(names))

    def renew(self, keeps_masters: bool) -> None:
        """Zeroes all states, and masters unless they are kept; a state dict taken before keeps what it showed."""
        kept = ("param", *(self.masters if keeps_masters else ()))
        self.home.renew(zeroed=[name for name in self.home.names if name not in kept])

    def chunks(self, states: Iterable[str], pieces: Sequence[Piece]) -> list[Chunk]:
        """What an update of these pieces, with these states, takes through the store."""
        names, bounds = tuple(self._planes((*self.masters, *states))), self.home.chunks()
        if len(bounds) > 1:
            bounds = [each for each in bounds if any(p.shard_start < each[1] and each[0] < p.shard_end for p in pieces)]
        elif not pieces:
            bounds = []
        if self.param is None:
            return [Chunk(self.home, start, stop, (*names, "param"), None) for start, stop in bounds]
        reads = not self.has_whole_masters
        return [
            Chunk(self.home, start, stop, names, self.param[start:stop], reads_param=reads) for start, stop in bounds
        ]

    def reduce_into(self, reduced: KeptBucket) -> None:
        """Gradients of this shard will be found in ``reduced.total``."""
        self.reduced = reduced
        if not reduced.at_rest:
            self.sums = self.gradients_in(reduced.total)

    def pass_on(self, passing: PassingBucket) -> None:
        """Sums of gradients of this shard come and go as ``passing`` says."""
        self.passing = passing

    def own_slice(self) -> GatheredSlice:
        """A copy of this rank's slice of the params, apart from the bucket."""
        if self.param is None:
            return RestingSlice(self)
        is_apart = self.bucket.resident_bytes < self.bucket.nbytes  # the bucket of params without values is not there
        # Now, and not once it is adopted: from the last agreement on other ranks may read it.
        return MemorySlice(self.param if is_apart else self._zeros().copy_(self.param))

    def part_with_params(self, gatherer: Gatherer, own: GatheredSlice, window: Window) -> GatheredBucket:
        """Keeps this rank's slice of the params in ``own``, and gives the rest to the gatherer. Allocates nothing."""
        self.param = own.memory
        self.gathered = gatherer.add(self.bucket, own, window)
        return self.gathered

    def spec(self, variant: Variant, grad: Format) -> StepSpec:
        """What updates this shard with gradients of this format."""
        states = tuple(self.kept.states[name] for name in variant.states)
        param = BF16_RANDOM if self.format is BF16 and self.kept.master is None else self.format
        return StepSpec(variant, param, grad, self.kept.master, states)

    def gradients(self, grads: Mapping[int, tuple[torch.Tensor, int]], at_rest: bool = False) -> Gradients:
        """The table for these gradients, all of one dtype.

        Args:
            grads: row of the piece -> dense gradient in storage order, and which element of the param is its first.
            at_rest: whether they are in host memory; else with the params.
        """
        rows = np.zeros((self.num_rows, 2), dtype=np.int64)
        for row, (grad, start) in grads.items():
            piece = self.pieces[row]
            rows[row, 0] = grad.data_ptr() + (piece.start - start - piece.shard_start) * grad.element_size()
            rows[row, 1] = piece.shard_end
        aligned = not np.any(rows[:, 0] % 16)
        if at_rest:
            return Gradients(self.host_row_of_block, torch.from_numpy(rows), aligned)
        return Gradients(self.row_of_block, torch.from_numpy(rows).to(self.device), aligned)

    def gradients_in(self, total: torch.Tensor) -> Gradients:
        """The table for a sum that is all of the shard's, 1D [shard_numel]."""
        return self.gradients({row: (total[piece.shard_start :], piece.start) for row, piece in enumerate(self.pieces)})

    def noise(self, counters: Mapping[int, tuple[int, int, int]]) -> Noise:
        """The table for these rows: (key, key, phase), what their noise depends on beside the element."""
        rows = np.zeros((self.num_rows, 4), dtype=np.int64)
        for row, (key, other_key, phase) in counters.items():
            piece = self.pieces[row]
            rows[row] = (key, other_key, piece.start - piece.shard_start, phase)
        return Noise(torch.from_numpy(rows.astype(np.int32)).to(self.home.device))

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
        """This shard's elements of state ``name`` (or "master") of the bucket's param ``index``, 1D.

        Not a copy where states lie in memory in fp32.
        """
        where = self.slice_of(index).local
        return self.read_chunk(name, where.start, where.stop)

    def write(self, name: str, index: int, start: int, values: torch.Tensor) -> None:
        """Sets them from ``values``: 1D, the param's elements from ``start`` on, in storage order, at least ours."""
        where = self.slice_of(index)
        numel = where.local.stop - where.local.start
        self.write_chunk(name, where.local.start, values[where.start - start : where.start - start + numel])

    def in_order(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """1D, a tensor with the full shape of the bucket's param ``index``, in the param's storage order."""
        return flattened(in_storage_order(tensor, self._strides[index]))

    def begin_average(self, index: int) -> None:
        """Makes the average of the bucket's param ``index`` what the param is."""
        self.ensure_states((EMA,))
        where = self.slice_of(index).local
        self.write_chunk(EMA, where.start, self.params(where.start, where.stop).float())

    def zero(self, index: int) -> None:
        """Zeroes the states of the bucket's param ``index``; its master stays."""
        where = self.slice_of(index).local
        for name, plane in self._planes(self.states).items():
            items = plane.items(where.stop - where.start)
            self.home.write(name, where.start, torch.zeros(items, dtype=plane.dtype))

    def as_param(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A view of a whole bucket-like buffer with the shape of the bucket's param ``index``."""
        return self.bucket.view(flat, index, self.bucket.params[index])

    def fits_master(self, index: int) -> bool:
        """Whether a master that was loaded is that of the param ``index`` as it is now."""
        where, loaded = self.slice_of(index).local, self.unmatched_masters[index]
        param = self.params(where.start, where.stop).to(loaded.device)
        return bool(codecs.rounds_to(loaded, param).all())

    def keep_low_bits(self, index: int) -> None:
        """Keeps of a master that was loaded what fits the param ``index`` as it is now."""
        self.write("master", index, self.slice_of(index).start, self.unmatched_masters[index])

    def refresh_masters(self, indices: Iterable[int]) -> None:
        """Makes masters follow these params, which were written: elements that are the master rounded keep it.

        Where the param is a half of the master nothing tells what it was: the master becomes the param.
        """
        slices = [self.slice_of(index).local for index in indices]
        for name in self.masters:
            for start, stop in self.home.chunks():
                inside = [slice(max(each.start, start), min(each.stop, stop)) for each in slices]
                inside = [each for each in inside if each.start < each.stop]
                if inside and self.has_whole_masters:
                    self._refresh(name, start, stop, inside)
                else:
                    for each in inside:
                        self.write_chunk(name, each.start, self.params(each.start, each.stop).float())

    @property
    def has_whole_masters(self) -> bool:
        """Whether masters can be told from their params."""
        return self.kept.master is FP32

    def _refresh(self, name: str, start: int, stop: int, slices: Sequence[slice]) -> None:
        masters = self.home.read(name, start, stop)
        for each in slices:
            master = masters[each.start - start : each.stop - start]
            param = self.params(each.start, each.stop).to(masters.device)
            is_followed = codecs.rounds_to(master, param)
            if not is_followed.all():
                self.home.write(name, each.start, torch.where(is_followed, master, param.float()))

    def restart_masters(self) -> None:
        """Makes them what the params are."""
        for name in self.masters:
            for start, stop in self.home.chunks():
                self.write_chunk(name, start, self.params(start, stop).float())

    def params(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the params, 1D; not a copy where they lie in memory."""
        return self.home.read("param", start, stop) if self.param is None else self.param[start:stop]

    def read_chunk(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of this shard's "param", "master" or state ``name``, 1D; from a block on.

        fp32, but for "param"; not a copy where they lie in memory like that.
        """
        if name == "param":
            return self.params(start, stop)
        format, items = self.format_of(name), self.home.read(name, start, stop)
        if name == "master" and format is not FP32:
            weights = self.params(start, stop) if self.aside is None else self.aside[start:stop]
            masters = codecs.join(weights.to(items.device), items, format)
            for index, loaded in self.unmatched_masters.items():
                where = self.slice_of(index).local
                first, last = max(where.start, start), min(where.stop, stop)
                if first < last:
                    param = weights[first - start : last - start].to(items.device)
                    own = loaded[first - where.start : last - where.start].to(items.device)
                    kept = codecs.join(param, codecs.rest_of(own, param, format), format)
                    # The weights of the others are not loaded yet: what is shown is to be loaded elsewhere.
                    masters[first - start : last - start] = torch.where(codecs.rounds_to(own, param), kept, own)
            return masters
        scales = self.home.read(scales_name(name), start, stop) if isinstance(format, BlockFormat) else None
        return codecs.decode(codecs.Encoded(items, scales), format)

    def write_chunk(self, name: str, start: int, values: torch.Tensor) -> None:
        """Sets them from 1D ``values``: whole blocks of a param, but for its last.

        A master that is kept beside its param is that of the param as it is now.
        """
        if name == "param":
            if self.param is None:
                self.home.write(name, start, values)
            else:
                self.param[start : start + values.numel()].copy_(values)
            return
        format = self.format_of(name)
        if name == "master" and format is not FP32:
            param = self.params(start, start + values.numel())
            self.home.write(name, start, codecs.rest_of(values.to(param.device), param, format))
            return
        encoded = codecs.encode(values, format)
        if encoded.scales is not None:
            assert start % BLOCK == 0
            self.home.write(scales_name(name), start, encoded.scales)
        self.home.write(name, start, encoded.items)

    def whole(self, name: str) -> torch.Tensor:
        """The state ``name`` (or "master") of the whole shard, 1D; not a copy where it lies in memory in fp32."""
        return self.read_chunk(name, 0, self.numel)


class RestingSlice:
    """A shard's params in its store."""

    memory: torch.Tensor | None = None

    def __init__(self, shard: Shard):
        self._shard = shard

    @property
    def _home(self) -> ShardStorage:
        return self._shard.home  # of this moment

    def read(self, into: torch.Tensor) -> None:
        self._home.read_into("param", 0, into)

    def write(self, values: torch.Tensor) -> None:
        """Nothing, where they are what is there: whoever looks at whole params seldom writes to them."""
        kind = torch.int16 if values.element_size() == 2 else torch.int32
        bounds, here = self._home.chunks(), values.to("cpu")
        if not all(torch.equal(self._bits(low, high), here[low:high].view(kind)) for low, high in bounds):
            self._home.write("param", 0, values)

    def _bits(self, start: int, stop: int) -> torch.Tensor:
        values = self._home.read("param", start, stop).to("cpu")
        return values.view(torch.int16 if values.element_size() == 2 else torch.int32)
