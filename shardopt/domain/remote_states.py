"""What this rank shows of its states to ranks that read alone, and sees of theirs: between two steps, of one step.

A sharded step needs every rank, so nobody's states move while one rank stays behind a step and reads. A load needs no
other rank, and a thread may read beside a step. So a moment (a step, and the loads since) goes with every question: a
rank that has not come so far yet waits, one that is further says so, and what was read counts only if the moment is
still the same after the reading.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import StateError
from ..partition.mesh import Mesh
from .epoch import Epoch, Moment
from .serve import Showing
from .shard import Shard
from .sharded_params import ShardedParams


class Shown(Protocol):
    """What is shown of a domain."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def sharded(self) -> ShardedParams | None: ...
    @property
    def broken(self) -> str | None: ...


@dataclass(frozen=True)
class Fetch:
    """Makes one whole state (or "param") of one param, as it is at ``moment``. Equal ones make the same tensor."""

    exhibit: "Exhibit"
    shard: Shard
    index: int
    name: str
    moment: Moment

    def __call__(self) -> torch.Tensor:
        return self.exhibit.fetch(self.shard, self.index, self.name, self.moment)


class Exhibit:
    """The shards of a domain, as other ranks see them."""

    _showing: Showing

    def __init__(self, domain: Shown):
        self._domain = domain
        self._written: torch.cuda.Event | None = None  # behind the last step
        self._is_closed = False

    @staticmethod
    def begin(domain: Shown) -> "Exhibit | None":
        """Collective. None where some rank can open no socket: nothing can then be read by one rank alone."""
        exhibit = Exhibit(domain)
        showing = Showing.begin(domain.mesh.shard, exhibit)
        if showing is None:
            return None
        exhibit._showing = showing
        return exhibit

    def settle(self) -> None:
        """This rank has come to the end of a step."""
        if self._domain.device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record()

    def retire(self) -> None:
        """The optimizer is gone. What the other ranks may still read stays for as long as they may."""
        self._showing.retire()

    def close(self) -> None:
        """Nothing is shown any more."""
        self._is_closed = True
        self._showing.close()

    # -- seeing ----------------------------------------------------------------------------------------------------

    def fetcher(self, shard: Shard, index: int, name: str, moment: Moment) -> Fetch:
        """What makes the whole state ``name`` (or "param") of a param, as at a moment, in host memory, on demand."""
        return Fetch(self, shard, index, name, moment)

    def fetch(self, shard: Shard, index: int, name: str, moment: Moment) -> torch.Tensor:
        """Raises StateError unless all of it is of the moment."""
        self._check(shard, index, name, moment)
        whole = self._read(shard, index, name, moment)
        self._check(shard, index, name, moment)  # while it was read, a step or a load may have begun
        return whole

    def _check(self, shard: Shard, index: int, name: str, moment: Moment) -> None:
        epoch, param = self._domain.epoch, shard.bucket.params[index]
        if not epoch.is_at(moment, name) or self._number(shard) is None:
            now = "a step or a load of states is under way" if epoch.is_moving(name) else f"after {epoch.now(name)}"
            raise StateError(
                "take state_dict() again, and save it before the next step and before the next load of states: it lies "
                f"in shards, which have moved on, and a file would mix both. {name} of a param of shape "
                f"{tuple(param.shape)} was looked at after {moment} and is read now: {now}."
            )

    def _read(self, shard: Shard, index: int, name: str, moment: Moment) -> torch.Tensor:
        mesh, param, number = self._domain.mesh, shard.bucket.params[index], self._number(shard)
        assert number is not None
        layout = shard.bucket.layout
        flat: torch.Tensor | None = None
        for rank in range(mesh.shard.size):
            for piece in layout.pieces(rank):
                if piece.param != index:
                    continue
                if flat is None:
                    flat = torch.empty(layout.numels[index], dtype=param.dtype if name == "param" else torch.float32)
                target = flat[piece.start : piece.start + piece.numel]
                if rank == mesh.shard.rank:
                    target.copy_(shard.read_chunk(name, piece.shard_start, piece.shard_end))
                else:
                    self._showing.read(rank, moment, number, name, piece.shard_start, target)
        if flat is None:  # no elements
            flat = torch.empty(0, dtype=param.dtype if name == "param" else torch.float32)
        return flat.as_strided(param.size(), shard.strides(index))

    def _number(self, shard: Shard) -> int | None:
        """By which ranks ask each other for a shard: from 0 on, and from -1 down those of params that do not train.

        So one that is bound later takes no other one's number, whichever rank has bound it first.
        """
        if shard in self._domain.shards:
            return self._domain.shards.index(shard)
        return -1 - self._frozen.index(shard) if shard in self._frozen else None

    def _numbered(self, number: int) -> Shard | None:
        shards, index = (self._domain.shards, number) if number >= 0 else (self._frozen, -1 - number)
        return shards[index] if index < len(shards) else None

    @property
    def _frozen(self) -> list[Shard]:
        sharded = self._domain.sharded
        return [] if sharded is None else sharded.frozen

    # -- being seen ------------------------------------------------------------------------------------------------

    def slice_at(self, moment: Moment, number: int, name: str, start: int, stop: int) -> torch.Tensor:
        """For another rank, in a thread of its own; see :class:`shardopt.domain.serve.Readable`."""
        domain = self._domain
        end = time.monotonic() + domain.mesh.world.seconds
        while (shard := self._numbered(number)) is None or domain.epoch.now(name) < moment:
            if domain.broken is not None or self._is_closed:
                break
            if time.monotonic() > end:
                raise StateError(f"this rank has not come to the end of {moment}.")
            time.sleep(0.001)
        self.check_at(moment, name)
        if shard is None:
            raise StateError("this rank has closed its optimizer.")
        if shard.device.type == "cpu":
            return shard.read_chunk(name, start, stop)
        # On a stream of its own behind the step's kernels. It allocates nothing on the device, where a collective may
        # be waiting for the rank that asks.
        with torch.cuda.stream(torch.cuda.Stream(shard.device)):
            if self._written is not None:
                self._written.wait()
            return shard.read_chunk(name, start, stop).cpu()

    def check_at(self, moment: Moment, name: str) -> None:
        domain, epoch = self._domain, self._domain.epoch
        if domain.broken is not None:
            raise StateError(f"a step of this rank failed half-way ({domain.broken}).")
        if not epoch.is_at(moment, name):
            under_way = ", and a step or a load of states is under way" if epoch.is_moving(name) else ""
            raise StateError(
                "take state_dict() again, and save it before any rank takes the next step or loads states (a barrier "
                "keeps the others from it), or a file would mix two moments: this rank is after "
                f"{epoch.now(name)}{under_way}, what is asked for was looked at after {moment}."
            )
