"""Serves this rank's slices of states to a rank that reads alone, and reads those of other ranks.

A sharded step needs every rank, so no rank's states change while one rank reads between two steps. A load needs no
other rank, and a thread may read during a step. So a moment (a step, and the loads since) goes with every request: a
rank that is before the moment waits, one that is past it returns an error, and what was read counts only if the moment
is still the same after the reading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ..errors import StateError
from ..remote.ended_peers import groups_between
from ..remote.peers import Peers
from .remote_gradients import Reducing, mean_at, names_gradient

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks
    from ..remote.epoch import Epoch, Moment
    from .shard import Shard


class Shown(Reducing, Protocol):
    """The part of a domain that other ranks can read; a protocol, since ``domain.py`` imports this module."""

    @property
    def epoch(self) -> Epoch: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def frozen_shards(self) -> Sequence[Shard]: ...


@dataclass(frozen=True)
class Fetch:
    """Reads one whole state (or "param") of one param into host memory, as it is at ``moment``.

    Equal ones read the same tensor.
    """

    remote: RemoteStates
    shard: Shard
    index: int
    name: str
    moment: Moment

    def __call__(self) -> torch.Tensor:
        return self.remote.fetch(self.shard, self.index, self.name, self.moment)


class RemoteStates:
    """The states of a domain that lie on other ranks, and those of this rank as the others read them."""

    peers: Peers
    # What reads it, the moment, and the gradient that was read last.
    last_gradient: tuple[object, tuple[int, int], torch.Tensor] | None = None

    def __init__(self, domain: Shown):
        self._domain = domain
        self._written: torch.cuda.Event | None = None  # after the kernels of the last step
        self._is_closed = False

    @staticmethod
    def connect(domain: Shown) -> RemoteStates | None:
        """Collective. Returns None if some rank can open no socket: one rank alone can then read nothing."""
        remote = RemoteStates(domain)
        mesh = domain.mesh
        peers = Peers.connect(mesh.shard, remote.slice_at, groups_between([mesh.shard, mesh.world]))
        if peers is None:
            return None
        remote.peers = peers
        return remote

    def end_step(self) -> None:
        """Marks the end of a step on this rank: readers of its states wait for the kernels of the step."""
        if self._domain.device.type == "cuda":
            # On the stream of the kernels' device: record() alone takes the current device's, and would order nothing
            # in a script that never calls set_device(). Test: test_a_reader_waits_for_the_kernels_of_the_step.
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self._domain.device))

    def retire(self) -> None:
        """Stops reading: the optimizer is gone. The other ranks can read until all of them retire."""
        self.peers.retire()

    def close(self) -> None:
        """Stops serving; see :meth:`shardopt.remote.peers.Peers.close`."""
        if not self._is_closed:
            self._is_closed = True
            self.peers.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def reading_alone(self) -> AbstractContextManager[None]:
        """See :meth:`Peers.reading_alone`."""
        return self.peers.reading_alone()

    def read_slice(self, shard: Shard, rank: int, moment: Moment, into: torch.Tensor) -> None:
        """Reads another rank's slice of a bucket's params, 1D, as it is at the moment."""
        number = self._number(shard)
        assert number is not None
        host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        self.peers.read(rank, moment, number, "param", 0, host)
        if host is not into:
            into.copy_(host)

    def fetch(self, shard: Shard, index: int, name: str, moment: Moment) -> torch.Tensor:
        """Reads a whole state. Raises StateError unless all of it is of the moment."""
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
                    flat = torch.empty(layout.numels[index], dtype=shard.dtype if name == "param" else torch.float32)
                target = flat[piece.start : piece.start + piece.numel]
                if rank == mesh.shard.rank:
                    target.copy_(shard.read_chunk(name, piece.shard_start, piece.shard_end))
                else:
                    self.peers.read(rank, moment, number, name, piece.shard_start, target)
        if flat is None:  # no elements
            flat = torch.empty(0, dtype=shard.dtype if name == "param" else torch.float32)
        return flat.as_strided(param.size(), shard.strides(index))

    def _number(self, shard: Shard) -> int | None:
        """The number of a shard in requests: from 0 on, and from -1 down for those of frozen params.

        So a shard that is bound later never gets the number of another one, whichever rank has bound it first.
        """
        if shard in self._domain.shards:
            return self._domain.shards.index(shard)
        frozen = self._domain.frozen_shards
        return -1 - frozen.index(shard) if shard in frozen else None

    def _numbered(self, number: int) -> Shard | None:
        domain = self._domain
        shards, index = (domain.shards, number) if number >= 0 else (domain.frozen_shards, -1 - number)
        return shards[index] if index < len(shards) else None

    # -- serving --------------------------------------------------------------------------------------------------

    @contextmanager
    def slice_at(self, moment: Moment, number: int, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """A context of a thread of the server; see ``Readable`` there."""
        if names_gradient(name):
            with mean_at(self._domain, moment, number, name, start, stop, self._copying) as mean:
                yield mean
            return
        yield self._slice(moment, number, name, start, stop)
        self._check_at(moment, name)

    def _copying(self) -> AbstractContextManager[object]:
        """A context in which memory of the device is copied, on a stream apart."""
        domain = self._domain
        if domain.device.type == "cpu":
            return nullcontext()
        return torch.cuda.stream(_reading_stream(domain.device, domain.mesh.shard))

    def _slice(self, moment: Moment, number: int, name: str, start: int, stop: int) -> torch.Tensor:
        domain, shard = self._domain, None
        end = time.monotonic() + domain.mesh.world.seconds
        # In this order: at the moment that is asked for, the number is that of the shard.
        while domain.epoch.now(name) < moment or (shard := self._numbered(number)) is None:
            if domain.broken is not None or self._is_closed:
                break
            if time.monotonic() > end:
                raise StateError(f"this rank has not come to the end of {moment}.")
            time.sleep(0.001)  # far less than a step takes
        self._check_at(moment, name)
        if shard is None:
            raise StateError("read before close(): that rank has closed its optimizer, and its states are gone.")
        if shard.device.type == "cpu":
            return shard.read_chunk(name, start, stop)
        # On a CUDA stream of its own, after the step's kernels. What is kept is copied and dequantized on the host, so
        # that nothing is allocated on the device: an allocation may wait for a collective, which waits for the rank
        # that asks. Test: test_only_copies_run_on_the_device in tests/domain/test_remote_states.py.
        with torch.cuda.stream(_reading_stream(shard.device, domain.mesh.shard)):
            if self._written is not None:
                self._written.wait()
            return shard.read_chunk(name, start, stop, device=torch.device("cpu"))

    def _check_at(self, moment: Moment, name: str) -> None:
        domain, epoch = self._domain, self._domain.epoch
        if domain.broken is not None:
            raise StateError(f"a step of this rank failed half-way ({domain.broken}).")
        if not epoch.is_at(moment, name):
            under_way = ", and a step or a load of states is under way" if epoch.is_moving(name) else ""
            raise StateError(
                "take state_dict() again, and save it before any rank takes the next step, or loads or writes states "
                "(dist.barrier() between a read and a write keeps the others from it), or what is read would mix two "
                "moments: this rank is after "
                f"{epoch.now(name)}{under_way}, what is asked for was looked at after {moment}."
            )


_LOCK = threading.Lock()
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _reading_stream(device: torch.device, ranks: Ranks) -> torch.cuda.Stream:
    """Returns the stream on which this process copies what other ranks read: one a device, and none of NCCL's.

    torch hands out the 32 streams of a pool in turn, and NCCL's are of such a pool. On one of these a copy would
    wait for a collective, which waits for the rank that asks for the copy: a deadlock. Tests: "stream" in
    tests/domain/test_remote_states.py.
    """
    with _LOCK:
        if device not in _STREAMS:
            # NCCL takes from the pool of priority 0, or of the greatest priority that the device has.
            _, greatest = cast(Any, torch.cuda.Stream).priority_range()
            is_taken = greatest == -1 and ranks.takes_priority(device)
            _STREAMS[device] = torch.cuda.Stream(device, priority=0 if is_taken else -1)
        return _STREAMS[device]
