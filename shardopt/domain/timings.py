"""The wall-clock time of steps, by phase; the phases are labels in torch's profiler as well."""

import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

STEPS = 100  # the medians are over so many

# In the order in which they are shown.
PHASES = {
    "unshard": "stage 3: waiting in forward and backward for params that are gathered",
    "reduce": "the end of backward: waiting until all gradients are summed, and every rank knows their norms",
    "survey": "checking params and gradients, building the kernels' launch tables",
    "agree": "comparing the step with the other ranks",
    "fetch": "waiting for offloaded states",
    "margins": "squares over rows and columns, summed over all ranks, where the rule has them",
    "early": "updates in backward, and what of them the step takes: Offload(early_bytes=)",
    "update": "the kernels",
    "matrices": "the function of each whole matrix, where the rule has one",
    "write back": "returning states to where they are offloaded",
    "gather": "waiting for the other ranks' updates",
}


EVENTS = 10_000  # phases that a trace shows


class Event(NamedTuple):
    """A phase as it ran."""

    name: str
    of: str  # the unit, where it is one of stage 3
    step: int  # counted from 0
    start: float  # seconds since 1970
    seconds: float


class Clock:
    """Adds up the time of each phase, step by step. Time in an inner phase does not count for the outer one.

    It is the context of its phases itself: a generator for each would cost more than what short phases do, and tuples
    are added to lists by operators, which are no calls.
    """

    def __init__(self) -> None:
        self._now = defaultdict[str, float](float)
        # Of each running phase: name, what of, start, label, and the time of earlier phases beside it.
        self._running: list[tuple[str, str, float, Any, float]] = []
        self._inside = 0.0  # the time of the phases inside of the innermost one that runs
        self._steps: deque[dict[str, float]] = deque(maxlen=STEPS)
        self._first: dict[str, float] | None = None  # the step in which kernels are compiled, apart from the others
        self._events = deque[tuple[str, str, int, float, float]](maxlen=EVENTS)  # the fields of an Event each
        self._ended = 0  # steps
        self._epoch = time.time() - time.perf_counter()  # so that traces of several ranks share one clock

    def phase(self, name: str, of: str = "") -> "Clock":
        """Begins a phase, which the end of the ``with`` that this call stands in ends.

        Args:
            of: what is worked on or waited for, for the profiler.
        """
        label = None
        if torch.autograd.profiler._is_profiler_enabled:  # a label costs more than the timing
            label = torch.profiler.record_function(f"shardopt: {name} {of}".rstrip())
            label.__enter__()
        self._running += ((name, of, time.perf_counter(), label, self._inside),)
        self._inside = 0.0
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        name, of, start, label, beside = self._running[-1]
        del self._running[-1]
        elapsed = time.perf_counter() - start
        self._events += ((name, of, self._ended, start + self._epoch, elapsed),)
        if label is not None:
            label.__exit__(*error)
        self._now[name] += elapsed - self._inside
        self._inside = beside + elapsed

    def end_step(self) -> None:
        if self._first is None:
            self._first = dict(self._now)
        else:
            self._steps += (dict(self._now),)
        self._now = defaultdict(float)
        self._ended += 1

    def read(self, rank: int = 0, note: str | None = None) -> "Timings":
        from statistics import median  # imports decimal and fractions, which no step needs

        first = self._first or {}
        steps = list(self._steps) or [first]
        seen = [name for name in PHASES if any(name in step for step in steps)]
        seconds = {name: median(step.get(name, 0.0) for step in steps) for name in seen}
        return Timings(seconds, note, sum(first.values()), self._events, rank)


class Timings(Mapping[str, float]):
    """Seconds of each phase, medians of the last steps without the very first; prints as a table.

    These are times of the host: on a GPU kernels and collectives may still run when a phase ends.
    """

    def __init__(
        self,
        seconds: Mapping[str, float],
        note: str | None = None,
        first: float = 0.0,
        events: Iterable[tuple[str, str, int, float, float]] = (),
        rank: int = 0,
    ):
        """
        Args:
            note: a line below the table.
            first: all seconds of the first step, in which kernels are compiled.
            events: the last phases of this rank, for :meth:`trace`.
        """
        self._seconds = dict(seconds)
        # Not converted yet: a script that reads the seconds after each step needs none of the thousands of events.
        self.note, self.first, self._events, self._rank = note, first, list(events), rank

    @staticmethod
    def of_all(several: "Sequence[Timings]") -> "Timings":
        """Returns the sum over domains, which take a step one after the other."""
        seconds = {name: sum(each.get(name, 0.0) for each in several) for each in several for name in each}
        events = chain.from_iterable(each._events for each in several)
        note = next((each.note for each in several if each.note), None)
        rank = several[0]._rank if several else 0
        return Timings(seconds, note, sum(each.first for each in several), events, rank)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes this rank's last phases as a Chrome trace, for ``chrome://tracing`` or https://ui.perfetto.dev.

        Times are those of the host's clock, so that the files of several ranks can be shown together; the process of an
        event is its rank.
        """
        shown = [
            {
                "name": f"{each.name} {each.of}".rstrip(),
                "cat": "shardopt",
                "ph": "X",
                "ts": 1e6 * each.start,
                "dur": 1e6 * each.seconds,
                "pid": self._rank,
                "tid": 0,
                "args": {"step": each.step},
            }
            for each in map(Event._make, self._events)
        ]
        Path(path).write_text(json.dumps({"traceEvents": shown, "displayTimeUnit": "ms"}))

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __repr__(self) -> str:
        total = sum(self._seconds.values())
        rows = [(name, seconds, PHASES[name]) for name, seconds in self._seconds.items()]
        lines = [f"{name:<10} {1e3 * seconds:>9.3f} ms {seconds / total:>6.1%}  {what}" for name, seconds, what in rows]
        below = [f"{'first step':<10} {1e3 * self.first:>9.3f} ms, apart: kernels are compiled in it"] * bool(
            self.first
        )
        below += [] if self.note is None else [self.note]
        return "\n".join([*lines, f"{'all':<10} {1e3 * total:>9.3f} ms", *below]) if lines else "no step was taken yet"
