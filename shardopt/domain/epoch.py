"""Which states a rank holds: those after some step, with so many loads since. A reader compares before and after.

Whoever writes states says so before the first write and after the last one. What was read is of one moment if the
epoch was equal before and after the reading and nobody was writing::

    step 3 ........ |  load  | ........ |  step 4  | ........
    (3, 0)            moving   (3, 1)     moving     (4, 0)

A step that all ranks skip leaves the epoch as it was. Loads count from the last step, so that ranks that loaded
differently agree again after their next one. A load leaves params alone: slices of params have the number of the step
only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Moment(NamedTuple):
    """A point in the life of states. A later one is greater."""

    step: int  # the last that wrote states or params, and that this rank has come to the end of
    loads: int = 0  # since then: states that were loaded or assigned, masters that were refreshed

    def __str__(self) -> str:
        loads = {0: "", 1: " and a load of states"}.get(self.loads, f" and {self.loads} loads of states")
        return f"step {self.step}{loads}"


class Epoch:
    """The moment that this rank's states are of."""

    def __init__(self) -> None:
        self._moment = Moment(0)
        self._is_stepping = False
        self._is_loading = False

    def now(self, name: str) -> Moment:
        """Of the state ``name`` (or "master" or "param")."""
        return Moment(self._moment.step) if name == "param" else self._moment

    def is_moving(self, name: str) -> bool:
        """Whether elements of the state are being written."""
        return self._is_stepping or (self._is_loading and name != "param")

    def is_at(self, moment: Moment, name: str) -> bool:
        """Whether all elements of the state are those of the moment. What was read before this call was read in it."""
        # In this order: a writer marks the new moment before it ends.
        return not self.is_moving(name) and self.now(name) == moment

    def begin_step(self) -> None:
        """States and params are written from here on."""
        self._is_stepping = True

    def end_step(self) -> None:
        """They are those after the next step, if any of them was written: on all ranks or on none."""
        if self._is_stepping:
            self._moment = Moment(self._moment.step + 1)
            self._is_stepping = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """States are written inside. After an error, too, nobody takes them for what they were."""
        self._is_loading = True
        try:
            yield
        finally:
            self._moment = Moment(self._moment.step, self._moment.loads + 1)
            self._is_loading = False
