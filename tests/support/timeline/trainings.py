"""What is timed: calls on a machine of stand-ins, each made often enough before that nothing of it is a first time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.support.streams import Machine
from tests.support.streams.record import HOST, Work

from .hardware import Hardware, durations
from .schedule import Schedule, Timed, schedule

Calls = Sequence[tuple[str, Callable[[], object]]]
HostTimes = Mapping[str, int]  # nanoseconds by the name of a call


@dataclass(frozen=True)
class Round:
    """Works of one round of calls that follow each other, and of the round after it.

    Attributes:
        ends: of each call of the first round, how many works there are by then; then the same of the second.
    """

    names: tuple[str, ...]
    works: Sequence[Work]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One call as it is scheduled behind the round before.

    Attributes:
        nanoseconds: from the end of the call before it to its own end.
        busy: of each engine, in nanoseconds.
    """

    nanoseconds: int
    busy: dict[str, int]

    @property
    def over_bound(self) -> float:
        """Over the busiest engine, which bounds it."""
        return self.nanoseconds / max(self.busy.values())


def record(machine: Machine, calls: Calls, warm: int = 2, larger: int = 1) -> Round:
    """Makes all calls in turn, ``warm`` times and then twice; the last two times are written down."""
    for _ in range(warm):
        for _, call in calls:
            call()
    ends = []
    with machine.recording(larger) as found:
        for _ in range(2):
            for _, call in calls:
                call()
                ends.append(len(found.works))
    return Round(tuple(name for name, _ in calls), found.works, tuple(ends))


def timed(found: Round, hardware: Hardware, waits: bool = False, host: HostTimes | None = None) -> dict[str, Step]:
    """Returns the calls of the second round.

    Args:
        waits: True if whoever measures waits for the device after each call, so that nothing of one overlaps the next.
        host: nanoseconds of the host that were measured of a call, which its calls of the device share evenly; those
            without any take what the machine says of each.
    """
    works = _with_host(found, durations(found.works, hardware), host or {})
    steps: dict[str, Step] = {}
    for index, name in enumerate(found.names, len(found.names)):
        first, last = found.ends[index - 1], found.ends[index]
        if waits:
            took = schedule(_alone(works, first, last))
            steps[name] = Step(took.makespan, dict(took.busy()))
        else:
            before, both = schedule(works[:first]), schedule(works[:last])
            steps[name] = Step(both.makespan - before.makespan, dict(both.busy(first)))
    return steps


def drawn(found: Round, hardware: Hardware, host: HostTimes | None = None) -> Schedule:
    """Returns the schedule of the second round by itself."""
    works = _with_host(found, durations(found.works, hardware), host or {})
    return schedule(_alone(works, found.ends[len(found.names) - 1], found.ends[-1]))


def _with_host(found: Round, works: list[Timed], host: HostTimes) -> list[Timed]:
    for index, end in enumerate(found.ends):
        name, first = found.names[index % len(found.names)], found.ends[index - 1] if index else 0
        calls = [
            number for number in range(first, end) if works[number].engine == HOST and not found.works[number].pinned
        ]
        for number in calls if name in host else ():
            works[number] = replace(works[number], nanoseconds=host[name] // len(calls))
    return works


def _alone(works: Sequence[Timed], first: int, last: int) -> list[Timed]:
    """These works, before which everything has ended."""
    return [
        replace(each, after=tuple(number - first for number in each.after if number >= first))
        for each in works[first:last]
    ]
