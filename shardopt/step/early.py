"""Updates that backward makes and a step takes: ``Offload(early_bytes=)``.

A bucket is updated as soon as its sum has arrived, while backward goes on. The same launch runs as in the step, over
copies of the bucket's states and params, which nobody sees::

    backward   sum 0   sum 1   sum 2   sum 3                       time ->
    copies             | 0     | 1                  as many as early_bytes takes
    step                                            | take 0 | take 1 | update 2 | update 3

A step takes what it would have computed: from the same launch, scalars and factors, states, params and sums. Streams
of states change places with their copies, and params are copied. Whatever else has changed one of them meanwhile is
found (``_Made.is_still``): the copies are then dropped, the step updates from the sums, and the next
``STEPS_WITHOUT`` steps update nothing early. Each rank decides that by itself: the bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..kernels.tables import BLOCK, Factors, read_together
from ..offload.store import Chunk, ResidentStorage
from ..partition.streams import last_used
from .update import ChunkUpdate, update_chunk

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.shard import Shard
    from ..tensors.gradient_slice import GradientSlice
    from .launches import Launch

    Launches = Mapping[Shard, Sequence[Launch]]

STEPS_WITHOUT = 100  # steps in which nothing is updated early, after one that could not take what was
AT_A_TIME = 1024 * BLOCK  # elements that are copied and then updated, in memory: both find them in the cache


@dataclass(frozen=True)
class _Copies:
    """The copies of a shard: its streams, its params after the update, and before it."""

    home: ResidentStorage
    streams: dict[str, torch.Tensor]
    params: torch.Tensor
    params_before: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.streams.values(), self.params, self.params_before))


@dataclass(frozen=True)
class _Made:
    """What an early update was made of."""

    launches: Sequence[Launch]
    tables: Sequence[bytes]  # scalars and noise of each launch: a step may fill the same memory again
    home: ResidentStorage
    revision: int  # of the home
    param: torch.Tensor  # the shard's params

    @staticmethod
    def of(shard: Shard, launches: Sequence[Launch]) -> _Made:
        home, param = shard.home, shard.param
        assert isinstance(home, ResidentStorage) and param is not None
        return _Made(launches, _tables(launches), home, home.revision, param)

    def is_still(self, shard: Shard, launches: Sequence[Launch], factors: Factors) -> bool:
        """True if a step that is about to launch these would read the same, but for the values of params.

        The updates of a launch are the same object as long as the frozen step holds: for the same groups, variants of
        rules, params, versions, gradients and divisors.
        """
        return (
            len(launches) == len(self.launches)
            and all(mine.updates is other.updates for mine, other in zip(self.launches, launches, strict=True))
            and self.tables == _tables(launches)
            and factors == Factors()
            and shard.home is self.home
            and self.home.revision == self.revision
            and shard.param is self.param
            and not any([each.is_held or each.edit_count for each in _slices(launches)])
        )


class EarlyUpdates:
    """The early updates of one domain.

    Attributes:
        taken: how many buckets the last step took.
        dropped: how many steps could not take what was updated early.
    """

    def __init__(self, most: int, plan: Callable[[], Launches]):
        """
        Args:
            most: bytes of all copies; as many as there is memory for, if that is less.
            plan: returns the launches of the coming step, before its gradients have come: of the shards of which they
                are known.
        """
        self._most, self._plan = most, plan
        self._copies: dict[Shard, _Copies] = {}  # they stay from step to step
        self._made: dict[Shard, _Made] = {}
        self._arrived: set[Shard] = set()  # in this round
        self._launches: Launches | None = None  # of this round
        # Backwards that reduced gradients, since the last step and up to it: as many are expected up to the next one.
        self._rounds, self._rounds_of_step = 0, 0
        self._steps = self._waits_until = 0
        self.taken = self.dropped = self._taking = 0

    @property
    def nbytes(self) -> dict[str, int]:
        """The bytes of all copies, by tier."""
        found = {"device": 0, "host": 0}
        for shard, each in self._copies.items():
            found["device"] += each.params.nbytes + each.params_before.nbytes
            found[shard.home.tier] += sum(stream.nbytes for stream in each.streams.values())
        return found

    # -- in backward -----------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """A backward begins that adds to the sums."""
        self._drop()
        self._rounds += 1

    def update(self, domain: Domain, shard: Shard, divisor: int) -> None:
        """Updates a copy of a shard whose sum has arrived, if the coming step is likely to take it.

        Args:
            divisor: of the sum.
        """
        if self._rounds != self._rounds_of_step or self._steps < self._waits_until:
            return
        if shard in self._arrived:  # once more: some of its gradients came late
            self._drop()
            return
        self._arrived.add(shard)
        if self._launches is None:
            with torch._C.DisableTorchFunctionSubclass():  # params may be resharded
                self._launches = self._plan()
        launches = self._launches.get(shard, ())
        if not launches or not _can_be_early(domain, shard, launches, divisor):
            return
        copies = self._copies_of(shard, launches)
        if copies is None:
            return
        made = _Made.of(shard, launches)
        with torch.no_grad(), domain.clock.phase("early"):
            _run(shard, launches, copies)
        self._made[shard] = made

    def _copies_of(self, shard: Shard, launches: Sequence[Launch]) -> _Copies | None:
        """Returns the copies of a shard; None if there is no room for them."""
        home, param = shard.home, shard.param
        assert isinstance(home, ResidentStorage) and param is not None
        names = dict.fromkeys(name for launch in launches for name in launch.spec.names)
        streams = shard.chunks(names, shard.pieces)[0].names
        found = self._copies.get(shard)
        if found is not None and found.home is home and tuple(found.streams) == streams:
            return found
        need = 2 * param.nbytes + sum(home.nbytes[name] for name in streams)
        if need + sum(each.nbytes for other, each in self._copies.items() if other is not shard) > self._most:
            return None
        try:
            copies = _Copies(home, home.beside(streams), torch.empty_like(param), torch.empty_like(param))
        except (MemoryError, RuntimeError):  # torch's error on a host is a RuntimeError
            # The step needs no copies: this rank makes do with those that it has, in place of an error in mid-backward.
            # Test: test_steps_that_are_skipped_scaled_accumulated_or_clipped (has_no_memory).
            self._most = sum(self.nbytes.values())
            return None
        self._copies[shard] = copies
        return copies

    # -- in a step -------------------------------------------------------------------------------------------------

    def ready(self, launches: Launches, factors: Factors) -> set[Shard]:
        """Returns those of the shards that a step is about to update so whose copies are what it would make."""
        found = [shard for shard, made in self._made.items() if made.is_still(shard, launches.get(shard, ()), factors)]
        # Writes by ``.data`` move no version.
        written = read_together([_written(self._made[each].param, self._copies[each].params_before) for each in found])
        return {shard for shard, is_written in zip(found, written, strict=True) if not is_written}

    def take(self, domain: Domain, shard: Shard) -> None:
        """Makes the copies of a shard its params and states."""
        made, copies = self._made.pop(shard), self._copies[shard]
        with domain.clock.phase("early"):
            made.param.copy_(copies.params)
            made.home.swap_streams(copies.streams)
        self._taking += 1

    def end_step(self) -> None:
        """A step has ended: it was taken, or skipped."""
        self._drop()
        self.taken, self._taking = self._taking, 0
        self._rounds_of_step, self._rounds, self._steps = self._rounds, 0, self._steps + 1

    # -- at any time -----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Gradients are set to None, or to zero."""
        self._drop()
        self._rounds = 0

    def lose_round(self) -> None:
        """The sums of the open round are lost, and what was made of them with them: no step could have taken it."""
        self._made.clear()
        self._drop()

    def free(self) -> None:
        """Drops what was updated, and frees all copies."""
        self._drop()
        self._free()

    def _drop(self) -> None:
        """Drops what was updated. If there is anything, nothing is for some time, and the copies are freed."""
        if self._made:
            self._made.clear()
            self._free()
            self.dropped += 1
            self._waits_until = self._steps + 1 + STEPS_WITHOUT
        self._arrived.clear()
        self._launches = None

    def _free(self) -> None:
        for each in self._copies.values():
            each.home.give_up(each.streams)
            for params in (each.params, each.params_before):
                last_used(params)  # a stream of backward may have allocated it
        self._copies.clear()

    def __str__(self) -> str:
        waits = max(self._waits_until - self._steps, 0)
        pause = f", none for {waits} steps from now on" if waits else ""
        return f"early updates: buckets that the last step took: {self.taken}, drops so far: {self.dropped}{pause}"


def _tables(launches: Sequence[Launch]) -> list[bytes]:
    both = [each for launch in launches for each in (launch.scalars, launch.noise)]
    return [b"" if each is None else each.numpy().tobytes() for each in both]


def _can_be_early(domain: Domain, shard: Shard, launches: Sequence[Launch], divisor: int) -> bool:
    """True if nothing but what ``_Made`` compares can change what a launch over this shard reads."""
    home = shard.home
    return (
        shard.store is domain.store
        and home.tier == "host"
        and isinstance(home, ResidentStorage)
        and not home.is_shown
        and shard.param is not None
        and shard.exact_slice is None
        and Factors(divisor).folded() is not None  # else the sum is divided in place
        and all([launch.divisor == divisor for launch in launches])
        and not any([each.is_held for each in _slices(launches)])  # a script may write to it unseen
    )


def _slices(launches: Sequence[Launch]) -> Iterator[GradientSlice]:
    for launch in launches:
        for each in launch.updates.values():
            assert each.gradient_slice is not None  # all of a shard's are, or none
            yield each.gradient_slice


def _written(param: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Returns whether any bits differ: 1D [1] bool, on their device."""
    kind = torch.int32 if before.itemsize == 4 else torch.int16
    if before.device.type == "cpu":
        return torch.tensor([not torch.equal(param.view(kind), before.view(kind))])
    return (param.view(kind) != before.view(kind)).any().view(1)


def _run(shard: Shard, launches: Sequence[Launch], copies: _Copies) -> None:
    """Updates the copies of a shard, through its store."""
    store, home, param = shard.store, shard.home, shard.param
    assert isinstance(home, ResidentStorage) and param is not None
    numel, planes = shard.numel, home.planes
    bounds = home.chunks() if store.moves else [(at, min(at + AT_A_TIME, numel)) for at in range(0, numel, AT_A_TIME)]
    chunks = [
        Chunk(
            home,
            start,
            stop,
            tuple(copies.streams),
            copies.params[start:stop],
            beside={
                name: stream[start // planes[name].grain : planes[name].items(stop)]
                for name, stream in copies.streams.items()
            },
        )
        for start, stop in bounds
    ]
    store.prefetch(chunks)
    for chunk in chunks:
        for into in (copies.params, copies.params_before):
            into[chunk.start : chunk.stop].copy_(param[chunk.start : chunk.stop])
        update_chunk(ChunkUpdate.of(chunk, launches), store.fetch(chunk), Factors())
        store.write_back(chunk)
    store.flush()
