"""Collective calls of all ranks that make or load a checkpoint, with JSON values; one rank's error is raised on all."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

from ..domain.agreement import first_difference
from ..errors import CheckpointError
from ..partition.comm.group import Ranks
from ..partition.comm.together import Relay, together
from .mesh_ranks import Holder, MeshRanks
from .typed_json import Json, Record, from_json, to_json

Problem = Exception | None
Result = TypeVar("Result")
Value = TypeVar("Value")
Common = TypeVar("Common")
Own = TypeVar("Own")
AnyRanks = Ranks | MeshRanks


class HolderReport(NamedTuple, Generic[Common, Own]):
    """What the ranks that hold the same params report of them.

    Attributes:
        common: a record that is the same on all of these ranks.
        own: a record of the first of these ranks, which counts; None on the others.
    """

    holder: Holder
    common: Common
    own: Own | None


class Collectives:
    """The calls that all ranks make together.

    Attributes:
        world: the ranks that make or load one checkpoint.
    """

    def __init__(self, world: AnyRanks, other_parts: Sequence[Ranks] = ()):
        """``other_parts``: groups of this rank with ranks that load the checkpoints of the model's other parts."""
        self.world = world
        self._other_parts = other_parts

    def together(self, work: Callable[[], Result], phase: str) -> Result:
        """Collective: returns what ``work`` returns on this rank, once ``work`` has succeeded on every rank.

        Raises:
            Exception: this rank's own problem.
            CheckpointError: another rank's.
        """
        with together(lambda problem: self.raise_together(problem, phase)):
            return work()

    def raise_together(self, problem: Problem, phase: str) -> None:
        """Collective: raises this rank's problem, else CheckpointError with another rank's; returns if none has one."""
        relay = Relay(problem)
        for ranks in (self.world, *self._other_parts):
            relay.meet(partial(_raise_problem_of_any, ranks, phase))
        relay.check()

    def compare(self, value: Json, phase: str) -> None:
        """Collective: raises CheckpointError with the first difference if ranks give different values."""
        self._compare_in([self.world], value, phase)

    def compare_parts(self, value: Json, phase: str) -> None:
        """Collective: raises CheckpointError if ranks of the model's other parts give a different value."""
        self._compare_in(self._other_parts, value, phase)

    def _compare_in(self, groups: Sequence[AnyRanks], value: Json, phase: str) -> None:
        relay = Relay()
        for ranks in groups:
            relay.meet(partial(_raise_if_any_differs, ranks, value, phase))
        if self._other_parts:
            self.raise_together(relay.problem, phase)
        relay.check()

    def all_gather(self, value: Value, phase: str) -> list[Value]:
        """Collective: returns every rank's JSON value, by rank."""
        return self.world.exchange_json(value, phase)

    def all_gather_records(self, record: Record, phase: str) -> list[Record]:
        """Collective: returns every rank's record, by rank."""
        received = self.world.exchange_json(to_json(record), phase)
        return [from_json(type(record), each, f"what rank {rank} sent") for rank, each in enumerate(received)]

    def broadcast(self, value: Value, phase: str) -> Value:
        """Collective: returns rank 0's JSON value."""
        return cast(Value, self.all_gather(value if self.world.rank == 0 else None, phase)[0])

    def gather_by_holder(
        self, reports: Sequence[HolderReport[Common, Own]], kinds: tuple[type[Common], type[Own]], phase: str
    ) -> list[HolderReport[Common, Own]]:
        """Collective: returns the report of each set of ranks that hold the same, in the order of their first ranks.

        Ranks of one set must report the same, so only the first of them sends it; if all ranks are one set, none does.

        Args:
            kinds: the types of ``common`` and ``own``.

        Raises:
            CheckpointError: ranks of one set differ; raised on every rank.
        """
        commons: list[Json] = [to_json(each.common, kinds[0]) for each in reports]
        owns: list[Json] = [None if each.own is None else to_json(each.own, kinds[1]) for each in reports]
        sent: list[tuple[Holder, str, Json]] = [
            (each.holder, _digest(common), own) for each, common, own in zip(reports, commons, owns, strict=True)
        ]
        gathered = list(itertools.chain.from_iterable(self.all_gather(sent, phase)))
        digests: dict[Holder, set[str]] = {}
        for holder, digest, _ in gathered:
            digests.setdefault(tuple(holder), set()).add(digest)
        if any(len(each) > 1 for each in digests.values()):
            self._raise_difference([each.holder for each in reports], commons, phase)
        own_of = {tuple(holder): its_own for holder, _, its_own in gathered if its_own is not None}
        if len(digests) > 1:  # a message of one rank costs every rank a buffer of its length for each rank
            first = [None if each.own is None else common for each, common in zip(reports, commons, strict=True)]
            received = itertools.chain.from_iterable(self.all_gather(first, phase))
            commons = [each for each in received if each is not None]
        return [
            HolderReport(holder, from_json(kinds[0], common), from_json(kinds[1], own_of[holder]))
            for holder, common in zip(own_of, commons, strict=True)
        ]

    def _raise_difference(self, holders: Sequence[Holder], commons: Sequence[Json], phase: str) -> None:
        """Collective: raises CheckpointError with the first difference between ranks that hold the same."""
        first: dict[Holder, tuple[int, Json]] = {}
        sent = list(zip(holders, commons, strict=True))
        for rank, theirs in enumerate(self.all_gather(sent, phase)):
            for holder, common in theirs:
                one, expected = first.setdefault(tuple(holder), (rank, common))
                _raise_if_different(expected, common, (one, rank), phase)


def _raise_problem_of_any(ranks: AnyRanks, phase: str, problem: Problem) -> None:
    """Collective over ``ranks``."""
    rows = ranks.exchange([int(problem is not None)], phase)
    if not any(flag for (flag,) in rows):
        return
    own = None if problem is None else f"{type(problem).__name__}: {problem}"
    texts = ranks.exchange_json(own, phase)
    if problem is not None:
        raise problem
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise CheckpointError(f"while {phase}, rank {rank} failed, so all ranks stop here. It says: {text}")


def _raise_if_any_differs(ranks: AnyRanks, own: Json, phase: str, _: Problem) -> None:
    """Collective over ``ranks``: values travel only where their digests differ."""
    digest = hashlib.sha256(json.dumps(own).encode()).digest()
    row = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
    rows = ranks.exchange(row, phase)
    if all(each == rows[0] for each in rows):
        return
    values = ranks.exchange_json(own, phase)
    for rank, other in enumerate(values):
        _raise_if_different(values[0], other, (0, rank), phase)


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _raise_if_different(one: Json, other: Json, ranks: tuple[int, int], phase: str) -> None:
    difference = first_difference(one, other)
    if difference is not None:
        where, ours, theirs = difference
        raise CheckpointError(
            f"make the same call with the same model and optimizers on every rank: while {phase}, ranks differ "
            f"in {where}: {ours!r} on rank {ranks[0]}, {theirs!r} on rank {ranks[1]}. Nothing was done."
        )
