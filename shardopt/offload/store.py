"""The store: where masters and states rest between steps, and how a chunk of them comes to compute and goes back.

A step calls four verbs, and never asks where anything lies::

    prefetch([a, b, c])          what this step will fetch, in this order
    fetch(a)                     the streams of chunk a, in memory, to be updated in place
    write_back(a)                they were
    flush()                      nothing is under way any more

In memory a chunk is a whole shard, ``fetch`` answers with views and the other verbs do nothing. From elsewhere chunks
are read ahead of the update and written behind it, between ``begin`` and a vote of the ranks: ``commit`` on all of
them, or ``roll_back`` on all of them. A store may also have an update run elsewhere than where params and gradients
are: then it brings gradients there, and params back.

A home is what a store keeps of one shard: named streams ("master", "exp_avg"). A stream is one plane of items, of
whatever dtype: one item an element of the shard, or one for each so many elements, such as the scale of a block.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Plane:
    """How a stream lies: its items, one for ``grain`` elements of the shard each."""

    dtype: torch.dtype
    grain: int = 1

    def items(self, elements: int) -> int:
        return -(-elements // self.grain)

    def nbytes(self, elements: int) -> int:
        return self.items(elements) * self.dtype.itemsize


class Home(Protocol):
    """The streams of one shard. Bounds are elements of the shard, and a start is a multiple of the plane's grain.

    Attributes:
        tier: as its store's.
        device: where the kernels run that update it.
        is_apart: whether that is in host memory, and params are not.
    """

    tier: str
    device: torch.device
    is_apart: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the streams that there are."""

    @property
    def planes(self) -> Mapping[str, Plane]:
        """Of each stream."""

    @property
    def nbytes(self) -> dict[str, int]:
        """Of each stream."""

    def ensure(self, planes: Mapping[str, Plane]) -> None:
        """Makes the streams of these names that are not there yet, of zeros: all of them or none.

        Raises:
            OffloadError: there is no room for them.
        """

    def chunks(self) -> Sequence[tuple[int, int]]:
        """The (start, stop) that this home is fetched and best read by; multiples of a block, but for the end."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The items of these elements, 1D: a view where the stream lies in memory, else a copy.

        Raises:
            OffloadError: what was kept cannot be read, or is not what was written.
        """

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        """Copies items from element ``start`` on to a 1D tensor of their dtype, as many as it has.

        Raises:
            OffloadError: as ``read``; it holds anything.
        """

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Sets items from element ``start`` on; outside of ``begin`` and ``commit`` all of them or none.

        Raises:
            OffloadError: it cannot be written.
        """

    def renew(self, zeroed: Collection[str]) -> None:
        """Zeroes these streams; tensors that were read before, of any stream, keep what they showed."""

    def release(self) -> None:
        """Gives the room back; the home is not used any more."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """What is updated at a time."""

    home: Home
    start: int  # in the shard
    stop: int
    names: tuple[str, ...]  # of the streams that the update needs
    # 1D [stop - start]: the shard's params, which the update writes; None: one of the streams
    param: torch.Tensor | None
    gradients: tuple[torch.Tensor, ...] = ()  # each 1D: those that are not where the update runs, for it to be brought
    written: tuple[slice, ...] = ()  # elements of the chunk whose params a home that is apart takes back
    reads_param: bool = True  # whether the update begins with the params: no master in the streams is all of them


class Fetched(NamedTuple):
    """A chunk where its update runs."""

    streams: Sequence[torch.Tensor]  # 1D items, in the order of the chunk's names
    param: torch.Tensor | None
    gradients: Sequence[torch.Tensor]  # in the order of the chunk's


class Store(Protocol):
    """Keeps the homes of one optimizer on this rank.

    Attributes:
        tier: "device", "host" or "disk".
        is_final: what is written back cannot be taken back, so that no vote is taken.
    """

    tier: str
    is_final: bool

    @property
    def note(self) -> str | None:
        """What a user may want to know of how updates run; None: nothing."""

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> Home:
        """For a shard of ``numel`` params of this dtype; it has no streams yet."""

    def prefetch(self, chunks: Sequence[Chunk]) -> None: ...

    def fetch(self, chunk: Chunk) -> Fetched:
        """To be read and written until the chunk is written back."""

    def write_back(self, chunk: Chunk) -> None: ...

    def flush(self) -> None: ...

    def begin(self) -> None:
        """What is written from here on belongs together; without it each ``Home.write`` stands alone."""

    def commit(self) -> None:
        """It holds from now on. Cannot fail."""

    def roll_back(self) -> None:
        """It has not happened, and neither have the updates of params of fetched chunks; nothing in memory."""

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        """Of memory that the store itself takes, by tier."""

    def close(self) -> None:
        """Nothing of it is left."""


class FinalStore:
    """What stores have in common whose updates hold as soon as they are made."""

    is_final = True
    note: str | None = None

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        pass

    def write_back(self, chunk: Chunk) -> None:
        pass

    def flush(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def commit(self) -> None:
        pass

    def roll_back(self) -> None:
        pass

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        return {}


# -- in memory ---------------------------------------------------------------------------------------------------------


class ResidentHome:
    """Streams as tensors."""

    is_apart = False

    def __init__(self, numel: int, zeros: Callable[[int, torch.dtype], torch.Tensor], tier: str, device: torch.device):
        self._numel, self._zeros, self.tier, self.device = numel, zeros, tier, device
        self.planes: dict[str, Plane] = {}
        self.streams: dict[str, torch.Tensor] = {}

    def _fresh(self, plane: Plane) -> torch.Tensor:
        return self._zeros(plane.items(self._numel), plane.dtype)

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

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        plane = self.planes[name]
        return self.streams[name][start // plane.grain : plane.items(stop)]

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        into.copy_(self.read(name, start, start + into.numel() * self.planes[name].grain))

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        first = start // self.planes[name].grain
        self.streams[name][first : first + values.numel()].copy_(values)

    def renew(self, zeroed: Collection[str]) -> None:
        for name, stream in self.streams.items():
            fresh = self._fresh(self.planes[name])
            self.streams[name] = fresh if name in zeroed else fresh.copy_(stream)

    def release(self) -> None:
        self.streams = {}


class ResidentStore(FinalStore):
    """The trivial store: streams lie where they are computed with."""

    def __init__(self, tier: str, zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor]):
        """``zeros(numel, dtype, device)`` makes a stream."""
        self.tier = tier
        self._zeros = zeros

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ResidentHome:
        return ResidentHome(numel, lambda items, dtype: self._zeros(items, dtype, device), self.tier, device)

    def fetch(self, chunk: Chunk) -> Fetched:
        home = chunk.home
        assert isinstance(home, ResidentHome)  # of which every chunk is the whole
        return Fetched([home.streams[name] for name in chunk.names], chunk.param, chunk.gradients)

    def close(self) -> None:
        pass
