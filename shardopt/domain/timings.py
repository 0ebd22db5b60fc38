"""The wall-clock time of steps, by phase; the phases are labels in torch's profiler as well."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

STEPS = 100  # the medians are over so many

# In the order in which they are shown.
PHASES = {
    "reduce": "the end of backward: waiting until all gradients are summed, and every rank knows their norms",
    "survey": "checking params and gradients, building the kernels' launch tables",
    "agree": "comparing the step with the other ranks",
    "fetch": "waiting for offloaded states",
    "update": "the kernels",
    "write back": "returning states to where they are offloaded",
    "gather": "waiting for the other ranks' updates",
}


class Clock:
    """Adds up the time of each phase, step by step. Time in an inner phase does not count for the outer one.

    It is the context of its phases itself: a generator for each would cost more than what short phases do.
    """

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._running: list[tuple[str, float, Any]] = []  # of each running phase: name, start, label in the profiler
        self._inside: list[float] = []  # for each running phase: the time of the phases inside of it
        self._steps: deque[dict[str, float]] = deque(maxlen=STEPS)

    def phase(self, name: str) -> "Clock":
        """Begins a phase, which the end of the ``with`` that this call stands in ends."""
        label = None
        if torch.autograd.profiler._is_profiler_enabled:  # a label costs more than the timing
            label = torch.profiler.record_function(f"shardopt: {name}")
            label.__enter__()
        self._inside.append(0.0)
        self._running.append((name, time.perf_counter(), label))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        name, start, label = self._running.pop()
        elapsed = time.perf_counter() - start
        if label is not None:
            label.__exit__(*error)
        self._now[name] = self._now.get(name, 0.0) + elapsed - self._inside.pop()
        if self._inside:
            self._inside[-1] += elapsed

    def end_step(self) -> None:
        self._steps.append(dict(self._now))
        self._now.clear()

    def read(self, note: str | None = None) -> "Timings":
        from statistics import median  # imports decimal and fractions, which no step needs

        seen = [name for name in PHASES if any(name in step for step in self._steps)]
        return Timings({name: median(step.get(name, 0.0) for step in self._steps) for name in seen}, note)


class Timings(Mapping[str, float]):
    """Seconds of each phase, medians of the last steps; prints as a table.

    These are times of the host: on a GPU kernels and collectives may still run when a phase ends.
    """

    def __init__(self, seconds: Mapping[str, float], note: str | None = None):
        """
        Args:
            note: a line below the table.
        """
        self._seconds = dict(seconds)
        self.note = note

    @staticmethod
    def of_all(several: "Sequence[Timings]") -> "Timings":
        """Returns the sum over domains, which take a step one after the other."""
        seconds = {name: sum(each.get(name, 0.0) for each in several) for each in several for name in each}
        return Timings(seconds, next((each.note for each in several if each.note), None))

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
        below = [] if self.note is None else [self.note]
        return "\n".join([*lines, f"{'all':<10} {1e3 * total:>9.3f} ms", *below]) if lines else "no step was taken yet"
