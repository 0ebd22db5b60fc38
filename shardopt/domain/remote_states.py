"""Serves this rank's slices of states to a rank that reads alone, and reads those of other ranks.

A sharded step needs every rank, so no rank's states change while one rank reads between two steps. A load needs no
other rank, and a thread may read during a step. So a moment (a step, and the loads since) goes with every request: a
rank that is before the moment waits, one that is past it returns an error, and what was read counts only if the moment
is still the same after the reading.

A rank that has read a tensor, and writes it, keeps its slice of that moment for ranks that read later, until the next
step: ``v.mul_(1 / (1 + v.norm()))`` on every rank needs no barrier::

    rank 0   norm() of step 3 . ask ...................... mul_
    rank 1   norm() of step 3 . mul_: keeps its slice
             thread             . answer of step 3, which was kept
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ..errors import OffloadError, StateError
from ..gpu_stream import current_stream
from ..remote.ended_peers import groups_between
from ..remote.peers import Peers
from .remote_gradients import Reducing, mean_at, names_gradient

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks
    from ..remote.epoch import Epoch, Moment, Place
    from .shard import Shard
    from .turn import Turn


class Shown(Reducing, Protocol):
    """The part of a domain that other ranks can read; a protocol, since ``domain.py`` imports this module."""

    @property
    def epoch(self) -> Epoch: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def turn(self) -> Turn: ...
    @property
    def frozen_shards(self) -> Sequence[Shard]: ...
    def message_of(self, window: int, nbytes: int) -> torch.Tensor | None: ...


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
        # Place -> the last moment in which this rank has read it; and the slices that were written after that, 1D fp32.
        self._read_at: dict[Place, Moment] = {}
        self._kept: dict[tuple[Place, Moment], torch.Tensor] = {}

    @staticmethod
    def connect(domain: Shown) -> RemoteStates | None:
        """Collective. Returns None if some rank can open no socket: one rank alone can then read nothing."""
        remote = RemoteStates(domain)
        mesh = domain.mesh
        groups = groups_between([mesh.shard, mesh.world])
        peers = Peers.connect(mesh.shard, remote.slice_at, groups, lambda: domain.turn.trainer, domain.message_of)
        if peers is None:
            return None
        remote.peers = peers
        return remote

    def end_step(self) -> None:
        """Marks the end of a step on this rank: readers of its states wait for the kernels of the step."""
        self._read_at, self._kept = {}, {}
        if self._domain.device.type == "cuda":
            # On the stream of the kernels' device: record() alone takes the current device's, and would order nothing
            # in a script that never calls set_device(). Test: test_a_reader_waits_for_the_kernels_of_the_step.
            self._written = torch.cuda.Event()
            self._written.record(current_stream(self._domain.device))

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
        self.note_read(shard, index, name)  # first: whoever waits for this rank's answer waits for others as well
        whole = self._read_whole(shard, index, name, moment)
        self._check(shard, index, name, moment)  # while it was read, a step or a load may have begun
        return whole

    def note_read(self, shard: Shard, index: int, name: str) -> None:
        """Notes that this rank has read a state, as it is now: other ranks may do so later."""
        place = (shard, index), name
        self._read_at[place] = self._domain.epoch.now(name, place[0])

    def keep(self, shard: Shard, index: int, name: str) -> None:
        """Keeps this rank's slice of a state that it has read, and is about to write."""
        place, where = ((shard, index), name), shard.slice_of(index).local
        moment = self._domain.epoch.now(name, place[0])
        if self._read_at.get(place) == moment and where.start < where.stop:
            values = shard.read_chunk(name, where.start, where.stop)
            self._kept[place, moment] = values.to("cpu", copy=True)  # of a device, once its kernels are done

    def _check(self, shard: Shard, index: int, name: str, moment: Moment) -> None:
        epoch, param = self._domain.epoch, shard.bucket.params[index]
        of = shard, index
        if not epoch.is_at(moment, name, of) or self._number(shard) is None:
            is_moving = epoch.is_moving(name, of)
            now = "a step or a load of states is under way" if is_moving else f"after {epoch.now(name, of)}"
            raise StateError(
                "take state_dict() again, and save it before the next step and before the next load of states: it lies "
                f"in shards, which have moved on, and a file would mix both. {name} of a param of shape "
                f"{tuple(param.shape)} was looked at after {moment} and is read now: {now}."
            )

    def _read_whole(self, shard: Shard, index: int, name: str, moment: Moment) -> torch.Tensor:
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
        shard, of = self._await(moment, number, name, start)
        key, found = ((of, name), moment), None
        if key not in self._kept:
            try:
                found = self._slice(shard, name, start, stop)
            except OffloadError:  # a file may be read while it is written
                self._check_at(moment, name, of)
                if key not in self._kept:
                    raise
        # After the reading: whoever writes has kept what was there before.
        kept = self._kept.get(key)
        if kept is not None and of[1] is not None:
            first = start - shard.slice_of(of[1]).shard_start
            found = kept[first : first + stop - start]
        assert found is not None
        yield found
        self._check_at(moment, name, of)

    def _copying(self) -> AbstractContextManager[object]:
        """A context in which memory of the device is copied, on a stream apart."""
        domain = self._domain
        if domain.device.type == "cpu":
            return nullcontext()
        return torch.cuda.stream(_reading_stream(domain.device, domain.mesh.shard))

    def _await(self, moment: Moment, number: int, name: str, start: int) -> tuple[Shard, tuple[Shard, int | None]]:
        """Waits for the moment. Returns the shard, and the param that is asked for."""
        domain, shard = self._domain, None
        of: tuple[Shard, int | None] | None = None
        end = time.monotonic() + domain.mesh.world.seconds
        while True:
            now = domain.epoch.now(name, of)
            # In this order: at the moment that is asked for, the number is that of the shard.
            if now.step >= moment.step and shard is None and (shard := self._numbered(number)) is not None:
                of = shard, shard.index_at(start)
                continue
            if (now >= moment and shard is not None) or domain.broken is not None or self._is_closed:
                break
            if now.step == moment.step and domain.turn.call == "step()":
                raise StateError(
                    "write states on every rank alike: that rank is in its step, and has not made as many writes to "
                    f"this state: it is after {now}, what is asked for was looked at after {moment}."
                )
            if time.monotonic() > end:
                raise StateError(f"this rank has not come to the end of {moment}.")
            time.sleep(0.001)  # far less than a step takes
        self._check_at(moment, name, of)
        if shard is None or of is None:
            raise StateError("read before close(): that rank has closed its optimizer, and its states are gone.")
        return shard, of

    def _slice(self, shard: Shard, name: str, start: int, stop: int) -> torch.Tensor:
        domain = self._domain
        if shard.device.type == "cpu":
            found = shard.read_chunk(name, start, stop)
            return found if name == "param" else found.clone()  # a write may begin while it is on its way
        # On a CUDA stream of its own, after the step's kernels. What is kept is copied and dequantized on the host, so
        # that nothing is allocated on the device: an allocation may wait for a collective, which waits for the rank
        # that asks. Test: test_only_copies_run_on_the_device in tests/domain/test_remote_states.py.
        with torch.cuda.stream(_reading_stream(shard.device, domain.mesh.shard)):
            if self._written is not None:
                self._written.wait()
            return shard.read_chunk(name, start, stop, device=torch.device("cpu"))

    def _check_at(self, moment: Moment, name: str, of: Hashable) -> None:
        domain, epoch = self._domain, self._domain.epoch
        if domain.broken is not None:
            raise StateError(f"a step of this rank failed half-way ({domain.broken}).")
        # In this order: whoever writes has kept what was there before.
        if not epoch.is_at(moment, name, of) and ((of, name), moment) not in self._kept:
            under_way = ", and a step or a load of states is under way" if epoch.is_moving(name, of) else ""
            raise StateError(
                "take state_dict() again, and save it before any rank takes the next step, or loads states, or writes "
                "one that it has not read (dist.barrier() before keeps the others from it), or what is read would mix "
                "two moments: this rank is after "
                f"{epoch.now(name, of)}{under_way}, what is asked for was looked at after {moment}."
            )


@contextmanager
def writing(domain: Shown, shard: Shard, index: int, names: Collection[str]) -> Iterator[None]:
    """A context that writes states of one param; what this rank has read of them is kept for ranks that read later."""
    if domain.remote is not None:
        for name in names:
            domain.remote.keep(shard, index, name)
    with domain.epoch.loading([((shard, index), name) for name in names]):
        yield


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
