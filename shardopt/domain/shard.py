"""A shard: this rank's slice of a bucket, with the masters and states that belong to it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch

from ..kernels import codecs
from ..kernels.formats import BF16, BF16_RANDOM, FP32, BlockFormat
from ..kernels.formats import format_of as dtype_format
from ..kernels.spec import Spec
from ..kernels.tables import BLOCK
from ..offload.store import Chunk, Plane
from ..partition.layout import Piece
from ..partition.memory import zeros
from ..rules.passes import passes_of
from ..rules.rule import EMA
from ..tensors.strides import dense_strides, flattened, in_storage_order
from ..units.unit import ParamShard
from .shard_tables import ShardTables

if TYPE_CHECKING:
    from ..kernels.formats import Format
    from ..kernels.tables import Gradients
    from ..offload.store import Store
    from ..partition.bucket import Bucket
    from ..partition.comm.all_gather import Window
    from ..partition.gradient_buckets import DeviceSum
    from ..rules import Variant
    from ..units.gatherer import Gatherer
    from ..units.unit import GatheredBucket, Unit
    from .exact_slice import ExactSlice
    from .formats import StreamFormats
    from .host_sum import HostSum
    from .param_code import ParamCode


@cache
def scales_name(state: str) -> str:
    """The name of the stream that holds the scales of a state's blocks."""
    return f"{state}.scales"


class Shard:
    """Holds the masters and states for one slice of a bucket.

    The store keeps masters and states in their formats; the methods here read and write them as fp32.

    Attributes:
        pieces: the parts of params that lie in the shard.
        param: this rank's slice of the params, 1D [shard_numel]; None if it is offloaded to the store.
        exact_slice: keeps that slice apart from a whole bucket, which shows what 8 bits hold of it; None: it does not.
        is_cast: its params were handed over in fp32, and the bucket holds what they were rounded to.
        dtype: of that slice: the bucket's, or fp32 where the bucket is a rounded copy of it.
        store: of the home.
        home: the storage of masters and states.
        tables: where kernels find the pieces.
        unmatched_masters: index of a param -> 1D fp32, its slice of a loaded master that does not round to the param.
            It is kept until the weights are loaded, see :class:`shardopt.domain.param.MasterState`.
        loaded_masters: index of a param whose whole master was loaded, and not updated since -> True once it has
            rounded to its param. Until then the weights are not loaded yet, and the master is shown as it was loaded.
    """

    window: Window  # on bucket.flat; opened by all ranks together
    gradient_sum: DeviceSum | HostSum  # the sums of gradients, if the module was handed over and they are not released
    number: int  # of that bucket, in the reducer
    sum_table: Gradients  # the table of what stays in ``gradient_sum``
    gathered: GatheredBucket | None = None  # if params are sharded
    exact_slice: ExactSlice | None = None
    takes_sources = True  # False if gradients are released: an update would not wait for a source
    stays = False  # True if its states stay on the device where those of others are offloaded
    # In unsharded() with compute_dtype: the bucket follows values that are not in the masters yet, and another rank may
    # still read these.
    shows_exact = False
    saved_weights: torch.Tensor | None = None  # 1D [shard_numel]: the weights, while params show their average

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        states: Iterable[str],
        store: Store,
        formats: StreamFormats,
        offloads_params: bool = False,
        exact: torch.Tensor | None = None,
        keeps_exact: bool = False,
    ):
        """
        Args:
            states: names of those to make now.
            formats: of masters, and of all states that there may be.
            offloads_params: True if this rank's slice of the params is offloaded to the store as well.
            exact: 1D [shard_numel] fp32, the values that the bucket's were rounded from; None: they were not. Masters
                start from them.
            keeps_exact: they are this rank's slice of the params, and the bucket is what the model sees of it.

        Raises:
            OffloadError: the store has no room for masters and states.
        """
        self.bucket = bucket
        self.pieces: tuple[Piece, ...] = bucket.layout.pieces(rank)
        self.numel = bucket.layout.shard_numel
        is_there = bucket.resident_bytes == bucket.nbytes
        self.is_cast = exact is not None
        self.dtype = torch.float32 if keeps_exact else bucket.dtype
        own = exact if keeps_exact else bucket.shard(rank) if is_there else None
        self.param = None if offloads_params else self._zeros() if own is None else own
        self.formats = formats
        self.masters = ("master",) if formats.master is not None else ()
        self._known_planes: dict[tuple[str, ...], dict[str, Plane]] = {}  # by what :meth:`_planes` was asked for
        self.unmatched_masters: dict[int, torch.Tensor] = {}
        self.loaded_masters: dict[int, bool] = {}
        self._piece_of_param = {piece.param: piece for piece in self.pieces}
        self._starts = [piece.shard_start for piece in self.pieces]
        self._ends = [piece.shard_end for piece in self.pieces]
        self.all_strides = [dense_strides(param) for param in bucket.params]
        self.tables = ShardTables(self.pieces, self.numel, bucket.device)
        self.store, self.home = store, store.home(self.numel, self.dtype, bucket.device)
        try:
            self.home.ensure(self._planes((*self.masters, *states)))
            if offloads_params:
                self.home.ensure({"param": Plane(self.dtype)})
                if own is not None:
                    self.home.write("param", 0, own)
            if self.has_whole_masters:  # the low bits of others are zeros, as their storage is
                self.restart_masters(exact)
        except BaseException:
            self.home.release()
            raise

    @property
    def device(self) -> torch.device:
        return self.bucket.device

    @cached_property
    def format(self) -> Format:
        """Of the params, which train: what is frozen may have any dtype."""
        return dtype_format(self.dtype, "a param")

    @property
    def param_bytes(self) -> int:
        """The bytes of the slice of the params, if it lies outside of the bucket."""
        if self.exact_slice is not None:
            return self.exact_slice.nbytes
        return 0 if self.gathered is None or self.param is None else self.param.nbytes

    def _zeros(self) -> torch.Tensor:
        return zeros(self.numel, self.dtype, self.bucket.device)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that exist; a master is not a state."""
        return tuple(name for name in self.home.names if name in self.formats.states)

    def format_of(self, name: str) -> Format:
        """The format in which "master" or a state is kept."""
        if name == "master":
            assert self.formats.master is not None
            return self.formats.master
        return self.formats.states[name]

    def _planes(self, names: Iterable[str]) -> Mapping[str, Plane]:
        """The streams in which "master" and states are kept."""
        wanted = tuple(names)
        if wanted in self._known_planes:  # each step asks for those of its rule
            return self._known_planes[wanted]
        planes = self._known_planes[wanted] = {}
        for name in wanted:
            format = self.format_of(name)
            planes[name] = Plane(format.dtype)
            if isinstance(format, BlockFormat):
                planes[scales_name(name)] = Plane(torch.float32, BLOCK)
        return planes

    def ensure_states(self, names: Iterable[str]) -> None:
        """Makes the states that do not exist yet, of zeros."""
        self.home.ensure(self._planes(names))

    def renew(self, keeps_masters: bool) -> None:
        """Zeroes all states, and masters unless ``keeps_masters``. A state dict taken before keeps its values."""
        unchanged = ("param", *(self.masters if keeps_masters else ()))
        self.home.renew(zeroed=[name for name in self.home.names if name not in unchanged])

    def chunks(self, states: Iterable[str], pieces: Sequence[Piece]) -> list[Chunk]:
        """Returns the chunks that an update of these pieces, with these states, reads from and writes to the store."""
        names, bounds = tuple(self._planes((*self.masters, *states))), self.home.chunks()
        if len(bounds) > 1:
            bounds = [each for each in bounds if any(p.shard_start < each[1] and each[0] < p.shard_end for p in pieces)]
        elif not pieces:
            bounds = []
        if self.param is None:
            return [Chunk(self.home, start, stop, (*names, "param"), None) for start, stop in bounds]
        return [Chunk(self.home, start, stop, names, self.param[start:stop]) for start, stop in bounds]

    def make_param_shard(self) -> ParamShard:
        """Returns a copy of this rank's slice of the params, apart from the bucket."""
        if self.param is None:
            # The home is looked up at each use: relocation replaces it.
            return ParamShard(None, self._read_params, self._write_params)
        is_apart = self.bucket.resident_bytes < self.bucket.nbytes  # params without values: the bucket has no memory
        # Copied before the last agreement of the ranks: after it other ranks may read the slice.
        memory = self.param if is_apart or self.is_rounded else self._zeros().copy_(self.param)
        # Functions of the slice alone: units outlive the shard in a closed optimizer, and would keep its sums.
        write = partial(_write_rounded, memory) if self.is_rounded else memory.copy_
        return ParamShard(memory, partial(torch.Tensor.copy_, other=memory), write)

    def keep_exact(self, code: ParamCode) -> ExactSlice:
        """Keeps this rank's slice of the params apart from the bucket, which travels by ``code`` from here on."""
        from .exact_slice import ExactSlice  # loaded where it is asked for

        assert self.param is not None
        self.exact_slice = ExactSlice(self._zeros().copy_(self.param), self.param, code)
        self.param = self.exact_slice.values
        return self.exact_slice

    def exact_window(self) -> Window:
        """Returns the window on the bucket, in which this rank's slice has its place as it is."""
        if self.exact_slice is not None:
            self.exact_slice.show()
        return replace(self.window, code=None)

    @property
    def exact(self) -> str:
        """The stream that has all bits of the params: "param", or "master" where they were handed over in fp32."""
        return "master" if self.is_cast and self.masters else "param"

    @property
    def is_rounded(self) -> bool:
        """True if the bucket is a rounded copy of what ranks keep."""
        return self.dtype is not self.bucket.dtype

    def _read_params(self, into: torch.Tensor) -> None:
        if not self.is_rounded:
            self.home.read_into("param", 0, into)
            return
        for start, stop in self.home.chunks():
            into[start:stop].copy_(self.home.read("param", start, stop))

    def _write_params(self, values: torch.Tensor) -> None:
        """Writes offloaded params unless the store holds the same bits: most calls that read params write none."""
        if self.is_rounded:
            for start, stop in self.home.chunks():
                kept = self.home.read("param", start, stop)
                found = codecs.follow(kept, values[start:stop].to(kept.device), ties=False)
                if found is not kept:
                    self.home.write("param", start, found)
            return

        def is_kept(start: int, stop: int) -> bool:
            kept = self.home.read("param", start, stop).to("cpu")
            return torch.equal(kept.view(torch.uint8), here[start:stop].view(torch.uint8))

        here = values.to("cpu")
        if not all(is_kept(*each) for each in self.home.chunks()):
            self.home.write("param", 0, values)

    def release_params(self, gatherer: Gatherer, own: ParamShard, window: Window, unit: Unit) -> GatheredBucket:
        """Keeps this rank's slice of the params in ``own``; the gatherer frees the rest. Allocates nothing."""
        self.param = own.memory
        self.gathered = gatherer.add(self.bucket, own, window, unit)
        return self.gathered

    def spec(self, variant: Variant, grad: Format) -> Spec:
        """Returns the spec of the kernels that update this shard with gradients of this format."""
        states = tuple(self.formats.states[name] for name in variant.states)
        param = BF16_RANDOM if self.format is BF16 and self.formats.master is None else self.format
        return Spec(passes_of(variant), param, grad, self.formats.master, states, self.formats.compares)

    def strides(self, index: int) -> tuple[int, ...]:
        """The strides of the bucket's param ``index``."""
        return self.all_strides[index]

    def ordered(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the bucket's param ``index``, its memory in the param's storage order."""
        return in_storage_order(grad, self.all_strides[index])

    # -- one param's elements --------------------------------------------------------------------------------------

    def slice_of(self, index: int) -> Piece:
        """The piece of the bucket's param ``index``; an empty one if the shard holds nothing of the param."""
        return self._piece_of_param.get(index) or Piece(index, 0, 0, 0)

    def index_at(self, start: int) -> int | None:
        """The index of the param that has the shard's element ``start``."""
        number = bisect_right(self._starts, start)
        return self.pieces[number - 1].param if number else None

    def read(self, name: str, index: int) -> torch.Tensor:
        """Returns this shard's elements of state ``name`` (or "master") of the bucket's param ``index``, 1D.

        It is a view of the state if states lie in memory in fp32.
        """
        where = self.slice_of(index).local
        if name == "master":
            if self.takes_sources:
                self.bucket.take_source(index)
            if self.has_whole_masters:
                self._settle(where.start, where.stop)
        return self.read_chunk(name, where.start, where.stop)

    def write(self, name: str, index: int, start: int, values: torch.Tensor) -> None:
        """Writes this shard's elements of a state.

        Args:
            values: 1D, the param's elements from ``start`` on, in storage order; at least those of this shard.
        """
        piece = self.slice_of(index)
        first = piece.start - start
        self.write_chunk(name, piece.shard_start, values[first : first + piece.numel])

    def write_param(self, index: int, start: int, values: torch.Tensor) -> None:
        """Writes this shard's elements of the bucket's param ``index``, as :meth:`write` does a state's.

        What is kept in fp32 keeps its low bits where values of the model's dtype are what it rounds to.
        """
        piece = self.slice_of(index)
        first = piece.start - start
        own = values[first : first + piece.numel]
        if self.is_rounded and own.dtype is self.bucket.dtype:
            kept = self.params(piece.shard_start, piece.shard_end)
            own = codecs.follow(kept, own.to(kept.device), ties=False)
        self.write_chunk("param", piece.shard_start, own)

    def in_order(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with the full shape of the bucket's param ``index`` as 1D, in the param's storage order."""
        return flattened(in_storage_order(tensor, self.all_strides[index]))

    def begin_average(self, index: int) -> None:
        """Sets the average of the bucket's param ``index`` to the param."""
        self.ensure_states((EMA,))
        where = self.slice_of(index).local
        self.write_chunk(EMA, where.start, self.params(where.start, where.stop))

    def zero(self, index: int) -> None:
        """Zeroes the states of the bucket's param ``index``; its master stays."""
        where = self.slice_of(index).local
        for name, plane in self._planes(self.states).items():
            items = plane.items(where.stop - where.start)
            self.home.write(name, where.start, torch.zeros((), dtype=plane.dtype).expand(items))

    def as_param(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a view of a buffer as long as the bucket, with the shape of the bucket's param ``index``."""
        return self.bucket.view(flat, index, self.bucket.params[index])

    def fits_master(self, index: int) -> bool:
        """True if the unmatched master of param ``index`` rounds to the present param."""
        where, loaded = self.slice_of(index).local, self.unmatched_masters[index]
        param = self.params(where.start, where.stop).to(loaded.device)
        return bool(codecs.rounds_to(loaded, param, ties=True).all())

    def note_loaded_master(self, index: int, loaded: torch.Tensor) -> None:
        """Notes whether a loaded whole master, 1D, rounds to the present param of this index."""
        where = self.slice_of(index).local
        own = loaded.float()
        params = self.params(where.start, where.stop).to(own.device)
        self.loaded_masters[index] = codecs.follow(own, params, ties=True) is own

    def keep_low_bits(self, index: int) -> None:
        """Stores the low bits of the unmatched master of param ``index``, which complete the present param."""
        self.write("master", index, self.slice_of(index).start, self.unmatched_masters[index])

    def drop_low_bits(self, indices: Iterable[int]) -> None:
        """Makes masters in halves what their params are: the low bits belong to the values before a write."""
        slices = [self.slice_of(index).local for index in indices]
        for name in self.masters:
            for start, stop in self.home.chunks():
                for each in slices:
                    first, last = max(each.start, start), min(each.stop, stop)
                    if first < last:
                        self.write_chunk(name, first, self.params(first, last))

    @property
    def has_whole_masters(self) -> bool:
        """True if a master holds the full value, and not only the low bits that complete its param."""
        return self.formats.master is FP32

    def show_exact(self) -> None:
        """Begins to keep masters apart from what is written to params."""
        if self.has_whole_masters:
            self._settle(0, self.numel)
        self.shows_exact = True

    def _settle(self, start: int, stop: int) -> None:
        """Stores the whole masters as the next step takes them: views of the store then show what others wrote."""
        kept = self.home.read("master", start, stop)
        live = self._followed(kept, start, stop)
        if live is not kept:
            self.home.write("master", start, live)

    def settle(self, index: int) -> None:
        """Stores a whole master as an update that compares takes it, for one that does not."""
        where = self.slice_of(index).local
        kept = self.home.read("master", where.start, where.stop)
        params = self._weights(where.start, where.stop).to(kept.device)
        live = codecs.follow(kept, params, ties=index in self.loaded_masters)
        if live is not kept:
            self.home.write("master", where.start, live)

    def _followed(self, masters: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns whole masters as the next step takes them: a param that something else wrote counts.

        It is ``masters`` itself where nothing was written. The kernels make the same comparison when they load it.
        """
        if self.shows_exact:
            return masters
        params = self._weights(start, stop).to(masters.device)
        if not self.loaded_masters:
            return codecs.follow(masters, params, ties=False)
        found = masters
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, stop)
        for piece in self.pieces[first:last]:
            low, high = max(piece.shard_start, start), min(piece.shard_end, stop)
            own, has_fitted = masters[low - start : high - start], self.loaded_masters.get(piece.param)
            live = codecs.follow(own, params[low - start : high - start], ties=has_fitted is not None)
            if live is own:
                if has_fitted is False and (low, high) == (piece.shard_start, piece.shard_end):
                    self.loaded_masters[piece.param] = True
            elif has_fitted is not False:
                found = masters.clone() if found is masters else found
                found[low - start : high - start] = live
        return found

    def _weights(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of the weights, 1D, also while the params show their average."""
        return self.params(start, stop) if self.saved_weights is None else self.saved_weights[start:stop]

    def restart_masters(self, exact: torch.Tensor | None = None) -> None:
        """Sets all masters to their params, or to the values that these were rounded from."""
        for name in self.masters:
            for start, stop in self.home.chunks():
                self.write_chunk(name, start, self.params(start, stop) if exact is None else exact[start:stop])

    def params(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of the params, 1D: a view if they lie in memory."""
        if self.exact_slice is not None:
            self.exact_slice.take_written(start, stop)
        return self.home.read("param", start, stop) if self.param is None else self.param[start:stop]

    def read_chunk(self, name: str, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Returns elements ``[start, stop)`` of this shard's "param", "master" or state ``name``, 1D.

        fp32, but for "param"; a view if they lie in memory in that dtype. ``start`` is the start of a block.

        Args:
            device: what is kept is copied there and dequantized there; None: where it lies.
        """

        def copied(kept: torch.Tensor) -> torch.Tensor:
            return kept if device is None else kept.to(device)

        if name == "param":
            return copied(self.params(start, stop))
        format, items = self.format_of(name), copied(self.home.read(name, start, stop))
        if name == "master" and format is FP32:
            return self._followed(items, start, stop)
        if name == "master":
            weights = self._weights(start, stop)
            masters = codecs.join(weights.to(items.device), items, format)
            for index, loaded in self.unmatched_masters.items():
                where = self.slice_of(index).local
                first, last = max(where.start, start), min(where.stop, stop)
                if first < last:
                    param = weights[first - start : last - start].to(items.device)
                    own = loaded[first - where.start : last - where.start].to(items.device)
                    kept = codecs.join(param, codecs.low_bits_of(own, param, format), format)
                    # Elements that do not round to the param: their weights are not loaded yet, and the loaded
                    # master is shown whole, so that a state dict saved now loses nothing.
                    masters[first - start : last - start] = torch.where(
                        codecs.rounds_to(own, param, ties=True), kept, own
                    )
            return masters
        if not isinstance(format, BlockFormat):
            return codecs.decode(items, None, format)
        return codecs.decode(items, copied(self.home.read(scales_name(name), start, stop)), format)

    def write_chunk(self, name: str, start: int, values: torch.Tensor) -> None:
        """Writes 1D ``values`` of any dtype: whole blocks of a param, but for its last block.

        A master in halves is stored as the low bits that complete the present param. Values are encoded a piece at a
        time, so that no temporary is as long as the shard.
        """
        if name == "param":
            if self.param is None:
                self.home.write(name, start, values)
            else:
                self.param[start : start + values.numel()].copy_(values)
            return
        format = self.format_of(name)
        if format is FP32:
            self.home.write(name, start, values)
        elif name == "master":
            params = codecs.pieces(self.params(start, start + values.numel()))
            both = zip(codecs.pieces(values), params, strict=True)
            rests = (codecs.low_bits_of(own.to(param.device).float(), param, format) for own, param in both)
            self.home.write_pieces(name, start, rests)
        else:
            self._write_encoded(name, start, values, format)

    def _write_encoded(self, name: str, start: int, values: torch.Tensor, format: Format) -> None:
        scales: list[torch.Tensor] = []  # of all pieces: a sixty-fourth of the values

        def items() -> Iterator[torch.Tensor]:
            for piece in codecs.pieces(values):
                encoded, scale = codecs.encode(piece, format)
                if scale is not None:
                    scales.append(scale)
                yield encoded

        assert not isinstance(format, BlockFormat) or start % BLOCK == 0
        self.home.write_pieces(name, start, items())
        if scales:
            self.home.write(scales_name(name), start, torch.cat(scales))

    def whole(self, name: str) -> torch.Tensor:
        """Returns state ``name`` (or "master") of the whole shard, 1D: a view if it lies in memory in fp32."""
        return self.read_chunk(name, 0, self.numel)


def _write_rounded(kept: torch.Tensor, values: torch.Tensor) -> None:
    """Writes gathered values, 1D, over what they were rounded from: low bits stay where nothing was written."""
    kept.copy_(codecs.follow(kept, values, ties=False))
