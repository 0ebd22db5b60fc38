"""The store: holds masters and states between steps, and brings chunks of them to where the update runs.

An update calls four verbs for its chunks, and never asks where they lie::

    prefetch([a, b, c])          this step will fetch these chunks, in this order
    fetch(a)                     returns the streams of chunk a, in memory, to be updated in place
    write_back(a)                chunk a was updated
    flush()                      waits until no write is under way

In memory a chunk is a whole shard, ``fetch`` returns views, and the other verbs do nothing. Other stores read chunks
ahead of the update and write them after it, between ``begin`` and a vote of the ranks: then all ranks ``commit``, or
all ``roll_back``. A store may also run updates on another device than that of params and gradients: then it copies
gradients there, and params back.

A ``ShardStorage`` is what a store keeps of one shard: named streams ("master", "exp_avg"). A stream is 1D items of one
dtype: one item an element of the shard, or one for every so many elements, such as the scale of a block.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Plane:
    """The layout of a stream: one item for every ``grain`` elements of the shard."""

    dtype: torch.dtype
    grain: int = 1

    def items(self, elements: int) -> int:
        return -(-elements // self.grain)

    def nbytes(self, elements: int) -> int:
        return self.items(elements) * self.dtype.itemsize


class ShardStorage(Protocol):
    """The streams of one shard. Bounds are elements of the shard; a start is a multiple of the plane's grain.

    Attributes:
        tier: as its store's.
        device: where the kernels run that update it.
        updates_on_host: True if that is the host's memory, and params are on a device.
    """

    tier: str
    device: torch.device
    updates_on_host: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams."""

    @property
    def planes(self) -> Mapping[str, Plane]:
        """The layout of each stream."""

    @property
    def nbytes(self) -> dict[str, int]:
        """The bytes of each stream."""

    def ensure(self, planes: Mapping[str, Plane]) -> None:
        """Makes the missing ones of these streams, of zeros: all of them or none.

        Raises:
            OffloadError: there is no room for them.
        """

    def chunks(self) -> Sequence[tuple[int, int]]:
        """The (start, stop) of each chunk. All but the last stop are multiples of a block."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns the items of these elements, 1D: a view if the stream lies in memory, else a copy.

        Raises:
            OffloadError: the stream cannot be read, or is not what was written.
        """

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        """Copies items from element ``start`` on into a 1D tensor of their dtype, as many as it has.

        Raises:
            OffloadError: as ``read``; ``into`` holds anything.
        """

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Sets items from element ``start`` on; outside of a transaction all of them or none.

        Raises:
            OffloadError: the stream cannot be written.
        """

    def write_pieces(self, name: str, start: int, pieces: Iterable[torch.Tensor]) -> None:
        """Like ``write``, of values that are made a piece at a time. In memory no two pieces are held at once.

        Raises:
            OffloadError: as ``write``.
        """

    def renew(self, zeroed: Collection[str]) -> None:
        """Zeroes these streams. Tensors that were read before, of any stream, keep their values."""

    def release(self) -> None:
        """Frees the streams; the storage is not used any more."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The elements of a shard that are updated at a time."""

    home: ShardStorage
    start: int  # in the shard
    stop: int
    names: tuple[str, ...]  # streams that the update needs
    # 1D [stop - start]: the shard's params, which the update writes; None if the params are one of the streams
    param: torch.Tensor | None
    # Each 1D: those that lie elsewhere than the update runs, for the store to copy.
    gradients: tuple[torch.Tensor, ...] = ()
    written: tuple[slice, ...] = ()  # elements whose params are copied back to the device, if updates_on_host
    unwritten: frozenset[str] = frozenset()  # streams that the update leaves as they are
    # By name, each 1D: what is written in place of the streams of the home, which are read; None: the streams.
    beside: Mapping[str, torch.Tensor] | None = None


class Fetched(NamedTuple):
    """A chunk, on the device where its update runs."""

    streams: Sequence[torch.Tensor]  # 1D items, in the order of the chunk's names
    param: torch.Tensor | None
    gradients: Sequence[torch.Tensor]  # in the order of the chunk's gradients


class Store(Protocol):
    """Keeps the storages of one optimizer on this rank. Here, updates hold as soon as they are made.

    Attributes:
        tier: "device", "host" or "disk".
        is_final: True if a write cannot be rolled back, so that ranks take no vote.
        moves: True if streams come from elsewhere, and go back; False if a fetch is a view.
        note: a remark for the user on how updates run; None: nothing to say.
    """

    tier: str
    is_final: bool = True
    moves: bool = True
    note: str | None = None

    @property
    def is_open(self) -> bool:
        """True within a transaction that can be rolled back."""
        return False

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ShardStorage:
        """Makes the storage of a shard of ``numel`` params of this dtype; it has no streams yet."""

    def begin_step(self) -> None:
        """Begins a step's updates: one pass or several, each with a prefetch and a flush."""
        return

    def read_ahead(self) -> None:
        """A backward begins: the store may begin to bring what the next step will fetch first."""
        return

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        return

    def fetch(self, chunk: Chunk) -> Fetched:
        """Returns the chunk, to be read and written until it is written back."""

    def write_back(self, chunk: Chunk) -> None:
        return

    def flush(self) -> None:
        return

    def begin(self) -> None:
        """Begins a transaction. Without one, each ``ShardStorage.write`` stands alone."""
        return

    def commit(self) -> None:
        """Makes the writes of the transaction hold. Cannot fail."""
        return

    def roll_back(self) -> None:
        """Undoes the writes of the transaction, and the updates of params of fetched chunks.

        A store in memory undoes nothing.
        """
        return

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        """The bytes of the store's own buffers, by tier."""
        return {}

    def close(self) -> None:
        """Frees everything that the store holds."""
        return


# -- in memory ---------------------------------------------------------------------------------------------------------


class ResidentStorage:
    """The streams of a shard as tensors in memory.

    Attributes:
        revision: counts what may have changed the streams, but for updates.
    """

    updates_on_host = False

    def __init__(self, numel: int, zeros: Callable[[int, torch.dtype], torch.Tensor], tier: str, device: torch.device):
        self._numel, self._zeros, self.tier, self.device = numel, zeros, tier, device
        self.planes: dict[str, Plane] = {}
        self.streams: dict[str, torch.Tensor] = {}
        self.revision = 0
        self._is_shown = False  # others may hold views of the streams, and write to them
        self._alone: dict[int, int] = {}  # address of a stream -> references to its storage while nobody holds a view

    @property
    def is_shown(self) -> bool:
        """True while somebody may hold a view of a stream that was read."""
        if self._is_shown:
            streams = self.streams.values()
            self._is_shown = any(_num_references(each) > self._alone[each.data_ptr()] for each in streams)
        return self._is_shown

    def _fresh(self, plane: Plane, make: Callable[[int, torch.dtype], torch.Tensor] | None = None) -> torch.Tensor:
        fresh = (make or self._zeros)(plane.items(self._numel), plane.dtype)
        self._alone[fresh.data_ptr()] = _num_references(fresh)
        return fresh

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.streams)

    @property
    def nbytes(self) -> dict[str, int]:
        return {name: stream.nbytes for name, stream in self.streams.items()}

    def ensure(self, planes: Mapping[str, Plane]) -> None:
        fresh = {name: self._fresh(plane) for name, plane in planes.items() if name not in self.streams}
        self.streams.update(fresh)
        self.planes.update({name: planes[name] for name in fresh})

    def chunks(self) -> Sequence[tuple[int, int]]:
        return ((0, self._numel),)

    def view(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Like ``read``, for a caller that keeps no view and knows which copies are under way: no count, no wait."""
        plane = self.planes[name]
        return self.streams[name][start // plane.grain : plane.items(stop)]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.revision, self._is_shown = self.revision + 1, True
        return self.view(name, start, stop)

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        into.copy_(self.view(name, start, start + into.numel() * self.planes[name].grain))

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self.revision += 1
        first = start // self.planes[name].grain
        self.streams[name][first : first + values.numel()].copy_(values)

    def write_pieces(self, name: str, start: int, pieces: Iterable[torch.Tensor]) -> None:
        for piece in pieces:
            self.write(name, start, piece)
            start += piece.numel() * self.planes[name].grain

    def renew(self, zeroed: Collection[str]) -> None:
        self.revision += 1
        for name, stream in self.streams.items():
            fresh = self._fresh(self.planes[name])
            self.streams[name] = fresh if name in zeroed else fresh.copy_(stream)

    def release(self) -> None:
        self.revision += 1
        self.streams = {}

    # -- streams beside them, for updates that nobody sees yet ----------------------------------------------------

    def beside(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Makes streams like those of these names, for :meth:`swap_streams`."""
        return {name: self._fresh(self.planes[name]) for name in names}

    def swap_streams(self, others: dict[str, torch.Tensor]) -> None:
        """Takes streams that :meth:`beside` made in place of its own, which ``others`` holds from then on.

        Nobody may hold a view of its own: see :attr:`is_shown`.
        """
        self.revision += 1
        for name, other in others.items():
            others[name], self.streams[name] = self.streams[name], other

    def give_up(self, others: Mapping[str, torch.Tensor]) -> None:
        """Frees streams that :meth:`beside` made."""
        return

    def fill(self, source: "ResidentStorage") -> None:
        """Takes copies of the streams of a storage, as the first ones. Kernels that are launched from now on find them.

        The source stays as it is until its own :meth:`release`, which waits for copies that are under way.
        """
        for name, plane in source.planes.items():
            fresh = self._fresh(plane, lambda items, dtype: torch.empty(items, dtype=dtype, device=self.device))
            self.streams[name], self.planes[name] = fresh, plane
            source.read_into(name, 0, fresh)

    def take_streams(self, other: "ResidentStorage") -> None:
        """Takes the tensors of another storage, which is not used any more."""
        self.streams.update(other.streams)
        self.planes.update(other.planes)
        self._alone.update(other._alone)
        self._is_shown = other._is_shown


class ResidentStore(Store):
    """A store in memory: streams lie where the update runs."""

    moves = False

    def __init__(self, tier: str, zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor]):
        """``zeros(numel, dtype, device)`` makes a stream."""
        self.tier = tier
        self._zeros = zeros

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ResidentStorage:
        return ResidentStorage(numel, lambda items, dtype: self._zeros(items, dtype, device), self.tier, device)

    def fetch(self, chunk: Chunk) -> Fetched:
        home = chunk.home
        assert isinstance(home, ResidentStorage)  # its only chunk is the whole shard, but for updates beside it
        if chunk.beside is None:
            return Fetched(list(map(home.streams.__getitem__, chunk.names)), chunk.param, chunk.gradients)
        for name, stream in chunk.beside.items():
            stream.copy_(home.view(name, chunk.start, chunk.stop))
        return Fetched(list(map(chunk.beside.__getitem__, chunk.names)), chunk.param, chunk.gradients)


def _num_references(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
