"""A schedule: each engine does one work at a time, of those that can begin the one that could begin first.

Times are whole nanoseconds, so a schedule is exact: the same works give the same numbers everywhere.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """A work and how long it takes."""

    name: str
    engine: str
    nanoseconds: int
    after: tuple[int, ...]  # numbers of earlier works


@dataclass(frozen=True)
class Schedule:
    """When each work runs.

    Attributes:
        starts, ends: in nanoseconds.
        because: the work whose end each one's start waited for: one that it comes after, or the one before it on its
            engine. -1: none, it begins at 0.
    """

    works: Sequence[Timed]
    starts: list[int]
    ends: list[int]
    because: list[int]

    @property
    def makespan(self) -> int:
        return max(self.ends, default=0)

    def busy(self, first: int = 0) -> Counter[str]:
        """Of each engine, how long it works on the works from number ``first`` on."""
        found: Counter[str] = Counter()
        for work in self.works[first:]:
            found[work.engine] += work.nanoseconds
        return found

    def critical_path(self) -> list[int]:
        """The works that the end waited for, one for the other, in the order in which they ran."""
        number = max(range(len(self.ends)), key=lambda each: (self.ends[each], each), default=-1)
        path: list[int] = []
        while number >= 0:
            path.append(number)
            number = self.because[number]
        return path[::-1]


def schedule(works: Sequence[Timed]) -> Schedule:
    """Returns when each work runs. A work only comes after earlier ones, so there is always one that can."""
    followers: list[list[int]] = [[] for _ in works]
    missing = [0] * len(works)
    for number, work in enumerate(works):
        for before in set(work.after):
            if not 0 <= before < number:
                raise ValueError(f"work {number} ({work.name}) comes after {before}, which is no earlier one")
            followers[before].append(number)
            missing[number] += 1
    starts, ends, because = [0] * len(works), [0] * len(works), [-1] * len(works)
    # A work that could begin earlier than those in the heap comes after one of them: so the least is the next.
    can_begin = [(0, number) for number, left in enumerate(missing) if not left]
    heapq.heapify(can_begin)
    is_free: dict[str, tuple[int, int]] = {}  # of each engine: from when on, and since which work
    while can_begin:
        at, number = heapq.heappop(can_begin)
        work = works[number]
        free_at, last = is_free.get(work.engine, (0, -1))
        if free_at > at:
            because[number] = last
        starts[number] = max(at, free_at)
        ends[number] = starts[number] + work.nanoseconds
        is_free[work.engine] = ends[number], number
        for each in followers[number]:
            if ends[number] >= starts[each]:
                starts[each], because[each] = ends[number], number
            missing[each] -= 1
            if not missing[each]:
                heapq.heappush(can_begin, (starts[each], each))
    return Schedule(works, starts, ends, because)
