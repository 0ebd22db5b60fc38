"""The record: what every engine of the machine did, in bytes and operations, and what it had to wait for.

A work comes after the works that ``after`` numbers: the one before it on its stream, the host's call that gave it to
the device, and what events, waits and collectives order. Races are found by these orders too (``clocks.py``).
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from .clocks import Agent, Clock
from .counts import site

HOST, COMPUTE, TO_DEVICE, TO_HOST = "host", "compute", "bus to the device", "bus to the host"
LINK, WORKERS, DISK = "link", "CPU workers", "disk"
ENGINES = (HOST, COMPUTE, TO_DEVICE, TO_HOST, LINK, WORKERS, DISK)
"""What does one thing at a time."""
SMALL = 2048  # bytes of a work


@dataclass(frozen=True, slots=True)
class Cost:
    """What a work asks of its engine.

    Attributes:
        nbytes: that it reads and writes; on the bus and the link: that it carries.
        flops: of products of matrices.
    """

    engine: str
    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    what: str
    where: str | None  # the line of the package; None: the model's own
    cost: Cost
    after: tuple[int, ...]  # numbers of works
    pinned: int = 0  # bytes that were registered: the host's time for them is no launch


class Record:
    """Of a machine, from when it was begun.

    Attributes:
        larger: how many times each side of a matrix is as long as that of the one that runs here: bytes are its square,
            products of matrices its cube. What is below ``SMALL`` is a table or a number, which does not grow.
    """

    def __init__(self, larger: int = 1) -> None:
        self.larger = larger
        self.works: list[Work] = []
        self._last: dict[Agent, int] = {}
        self._times: dict[Agent, tuple[list[int], list[int]]] = {}  # of each agent's actions, and the works' numbers
        self._known: dict[Agent, Clock] = {}  # that the agent's last work came after

    def act(self, agent: Agent, host: Agent, what: str, cost: Cost) -> int:
        """An action of an agent that has just begun (``Agent.tick``)."""
        after = self._behind(agent, agent.clock)
        if agent is not host:
            after.append(self.call(host, f"launch of {what}"))
        number = self._add(agent, Work(what, site(), self._grown(cost), tuple(after)))
        times, numbers = self._times.setdefault(agent, ([], []))
        times.append(agent.clock[agent])
        numbers.append(number)
        return number

    def call(
        self, host: Agent, what: str, clock: Clock | None = None, after: Iterable[int] = (), pinned: int = 0
    ) -> int:
        """A call of the host, which waits for all that the clock holds."""
        behind = [*self._behind(host, clock or {}), *after]
        return self._add(host, Work(what, site(), Cost(HOST), tuple(behind), pinned * self.larger**2))

    def beside(self, host: Agent, what: str, cost: Cost, after: Iterable[int] = ()) -> int:
        """What an engine does by itself once the host has come here and these works have ended."""
        last = self._last.get(host)
        self.works.append(Work(what, site(), self._grown(cost), (*([] if last is None else [last]), *after)))
        return len(self.works) - 1

    def _grown(self, cost: Cost) -> Cost:
        nbytes = cost.nbytes * self.larger**2 if cost.nbytes >= SMALL else cost.nbytes
        return Cost(cost.engine, nbytes, cost.flops * self.larger**3)

    def _add(self, agent: Agent, work: Work) -> int:
        self.works.append(work)
        self._last[agent] = len(self.works) - 1
        return self._last[agent]

    def _behind(self, agent: Agent, clock: Clock) -> list[int]:
        known = self._known.setdefault(agent, {})
        found = [self._last[agent]] if agent in self._last else []
        for other, time in clock.items():
            if other is not agent and time > known.get(other, 0):
                known[other] = time
                times, numbers = self._times.get(other, ([], []))
                index = bisect_right(times, time) - 1
                if index >= 0:
                    found.append(numbers[index])
        return found
