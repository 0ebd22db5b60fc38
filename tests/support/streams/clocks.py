"""Agents and vector clocks: what each agent knows to have ended before what it does next."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

Clock = dict["Agent", int]


class Agent:
    """Does one thing after the other: a stream, a thread of the host, the stream of a process group.

    Attributes:
        clock: of each agent, how many of its actions end before this one's next.
    """

    def __init__(self, name: str):
        self.name = name
        self.clock: Clock = {}

    def tick(self) -> int:
        """Begins an action; returns its number."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def follow(self, clock: Clock) -> None:
        """What comes next comes after all that the clock holds."""
        for agent, time in clock.items():
            self.clock[agent] = max(self.clock.get(agent, 0), time)

    def is_after(self, other: "Agent", time: int) -> bool:
        return other is self or self.clock.get(other, 0) >= time

    def __repr__(self) -> str:
        return self.name


class Hosts(threading.local):
    """The agent of each thread of the host."""

    def __init__(self) -> None:
        self.here = Agent(f"the host ({threading.current_thread().name})")

    @contextmanager
    def another(self) -> Iterator[None]:
        """Within, this thread counts as another one, which it joins at the end."""
        before, self.here = self.here, Agent("another thread of the host")
        try:
            yield
        finally:
            before.follow(self.here.clock)
            self.here = before
