"""How ranks learn of each other while all of them stand in the same call: by messages."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..domain.agreement import first_difference
from ..errors import CheckpointError
from ..partition.comm.group import Ranks
from .everyone import Everyone, Holder

Problem = Exception | None
Result = TypeVar("Result")
Crowd = Ranks | Everyone


class Content(NamedTuple):
    """What ranks that hold the same params say of them.

    Attributes:
        common: JSON that is the same on all of them.
        own: JSON of the first one, which counts; None on the others.
    """

    holder: Holder
    common: Any
    own: Any


class Meeting:
    """All ranks in one call: those that make a checkpoint, and those of a model's other parts, if these have others."""

    def __init__(self, world: Crowd, beyond: Sequence[Ranks] = ()):
        self.world = world
        self._beyond = beyond  # met one after the other: they load checkpoints of other parts of the model

    def together(self, work: Callable[[], Result], phase: str) -> Result:
        """Collective: returns what ``work`` returns on this rank, once it has ended without an error on every rank.

        Raises:
            Exception: this rank's own problem.
            CheckpointError: another rank's.
        """
        try:
            found = work()
        except Exception as error:
            self.share(error, phase)
            raise
        self.share(None, phase)
        return found

    def share(self, problem: Problem, phase: str) -> None:
        """Collective: raises this rank's problem, or CheckpointError with another rank's; returns if there is none."""
        for ranks in (self.world, *self._beyond):
            try:
                self._share_in(ranks, problem, phase)
            except Exception as error:  # whoever is met next must hear of it
                problem = error
        if problem is not None:
            raise problem

    def _share_in(self, ranks: Crowd, problem: Problem, phase: str) -> None:
        rows = ranks.exchange([int(problem is not None)], phase)
        if not any(flag for (flag,) in rows):
            return
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        told = ranks.exchange_json(own, phase)
        if problem is not None:
            raise problem
        rank, text = next((rank, text) for rank, text in enumerate(told) if text is not None)
        raise CheckpointError(f"while {phase}, rank {rank} failed, so all ranks stop here. It says: {text}")

    def compare(self, value: Any, phase: str) -> None:
        """Collective: raises CheckpointError with the first difference if ranks do not give the same value."""
        self._compare([self.world], value, phase)

    def compare_beyond(self, value: Any, phase: str) -> None:
        """Collective: raises CheckpointError if the model's other ranks do not give the same value."""
        self._compare(self._beyond, value, phase)

    def _compare(self, groups: Sequence[Crowd], value: Any, phase: str) -> None:
        problem: Problem = None
        for ranks in groups:
            try:
                self._compare_in(ranks, value, phase)
            except Exception as error:
                problem = error
        if self._beyond:
            self.share(problem, phase)
        elif problem is not None:
            raise problem

    def by_holders(self, contents: Sequence[Content], phase: str) -> list[Content]:
        """Collective: what each set of ranks that hold the same says of it, in the order of their first ranks.

        Ranks of one set must say the same, so only the first of them sends it; where all ranks are one set, none does.

        Raises:
            CheckpointError: they do not; on every rank.
        """
        own = [[each.holder, _digest(each.common), each.own] for each in contents]
        told = list(itertools.chain.from_iterable(self.everyones(own, phase)))
        digests: dict[Holder, set[str]] = {}
        for holder, digest, _ in told:
            digests.setdefault(tuple(holder), set()).add(digest)
        if any(len(each) > 1 for each in digests.values()):
            self._raise_difference(contents, phase)
        apart = {tuple(holder): its_own for holder, _, its_own in told if its_own is not None}
        if len(digests) == 1:  # a message of one rank costs every rank a buffer of its length for each rank
            common = [json.loads(json.dumps(each.common)) for each in contents]
        else:
            sent = [None if each.own is None else each.common for each in contents]
            everyones = itertools.chain.from_iterable(self.everyones(sent, phase))
            common = [each for each in everyones if each is not None]
        return [Content(holder, each, apart[holder]) for holder, each in zip(apart, common, strict=True)]

    def _raise_difference(self, contents: Sequence[Content], phase: str) -> None:
        """Collective: raises CheckpointError with the first difference between ranks that hold the same."""
        told = self.everyones([[each.holder, each.common] for each in contents], phase)
        first: dict[Holder, tuple[int, Any]] = {}
        for rank, theirs in enumerate(told):
            for holder, common in theirs:
                one, expected = first.setdefault(tuple(holder), (rank, common))
                _raise_if_different(expected, common, (one, rank), phase)

    def _compare_in(self, ranks: Crowd, own: Any, phase: str) -> None:
        digest = hashlib.sha256(json.dumps(own).encode()).digest()
        row = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
        rows = ranks.exchange(row, phase)
        if all(each == rows[0] for each in rows):
            return
        told = ranks.exchange_json(own, phase)
        for rank, other in enumerate(told):
            _raise_if_different(told[0], other, (0, rank), phase)

    def everyones(self, value: Any, phase: str) -> list[Any]:
        """Collective: every rank's JSON-able value, by rank."""
        return self.world.exchange_json(value, phase)

    def from_rank_0(self, value: Any, phase: str) -> Any:
        """Collective: rank 0's JSON-able value."""
        return self.world.exchange_json(value if self.world.rank == 0 else None, phase)[0]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _raise_if_different(one: Any, other: Any, ranks: tuple[int, int], phase: str) -> None:
    difference = first_difference(one, other)
    if difference is not None:
        where, ours, theirs = difference
        raise CheckpointError(
            f"make the same call with the same model and optimizers on every rank: while {phase}, ranks differ "
            f"in {where}: {ours!r} on rank {ranks[0]}, {theirs!r} on rank {ranks[1]}. Nothing was done."
        )
