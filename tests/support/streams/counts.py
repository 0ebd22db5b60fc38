"""How many kernels, blocking copies and waits the package makes, in each phase of a step."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shardopt

KERNELS = "kernels"
"""Launches, ATen's and the package's own."""
BLOCKING_COPIES = "blocking copies"
"""Between host and device; the host waits for all that its stream was given before."""
HOST_WAITS = "host waits"
"""For an event, for a stream, or for a number that the device computes."""
COPIES = "copies"
"""Between host and device, while the host goes on."""
COLLECTIVES = "collectives"
PINNINGS = "pinnings"
"""Host memory that is registered with the device."""

_PACKAGE = str(Path(shardopt.__file__).parent)


def site() -> str | None:
    """Returns the line of the package that is being carried out, or None: what runs is the user's own."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return f"{file[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Counts:
    """Of what the package does; what the model does is not counted.

    Attributes:
        by_phase: phase -> kind -> how many.
        sites: phase -> kind and line of the package -> how many.
    """

    def __init__(self) -> None:
        self.by_phase: dict[str, Counter[str]] = {}
        self.sites: dict[str, Counter[tuple[str, str]]] = {}
        self._phase: str | None = None

    def forget(self) -> None:
        """Begins anew."""
        self.by_phase.clear()
        self.sites.clear()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def note(self, kind: str) -> None:
        where = site() if self._phase is not None else None
        if self._phase is not None and where is not None:
            self.by_phase.setdefault(self._phase, Counter())[kind] += 1
            self.sites.setdefault(self._phase, Counter())[kind, where] += 1
