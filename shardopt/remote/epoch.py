"""The moment of a rank's states: after which step, with how many loads since. A reader compares before and after.

A writer of states marks its beginning before the first write, and its end after the last one. All that was read is of
one moment if the moment was the same before and after the reading, and no write was under way::

    step 3 ........ |  load  | ........ |  step 4  | ........
    (3, 0)            moving   (3, 1)     moving     (4, 0)

A step that all ranks skip does not change the moment. Loads count from the last step, so that ranks that loaded
differently agree again after their next step. A load does not write params: for them only the step counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Moment(NamedTuple):
    """A moment in the life of states; a later one is greater."""

    step: int  # the last one that wrote states or params, and that this rank has ended
    loads: int = 0  # since then: of states, and refreshes of masters

    def __str__(self) -> str:
        loads = {0: "", 1: " and a load of states"}.get(self.loads, f" and {self.loads} loads of states")
        return f"step {self.step}{loads}"


class Epoch:
    """The present moment of this rank's states, and whether a write is under way.

    Attributes:
        revision: counts what gives params other histories or masters than a step does: loads of states, and refreshes
            of masters. A frozen step holds for one revision.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._moment = Moment(0)
        self._is_stepping = False
        self._is_loading = False

    def now(self, name: str) -> Moment:
        """Returns the moment of state ``name`` (or "master" or "param")."""
        return Moment(self._moment.step) if name == "param" else self._moment

    def is_moving(self, name: str) -> bool:
        """True while elements of the state are written."""
        return self._is_stepping or (self._is_loading and name != "param")

    def is_at(self, moment: Moment, name: str) -> bool:
        """True if all elements of the state are those of the moment, and so all that was read before this call."""
        # The order matters: a writer sets the new moment before it marks its end.
        return not self.is_moving(name) and self.now(name) == moment

    def begin_step(self) -> None:
        """Marks that a step starts to write states and params."""
        self._is_stepping = True

    def end_step(self) -> None:
        """Marks the end of a step. The moment moves on if the step wrote anything: on all ranks or on none."""
        if self._is_stepping:
            self._moment = Moment(self._moment.step + 1)
            self._is_stepping = False

    def cancel_step(self) -> None:
        """Marks the end of a step that has changed nothing on any rank."""
        self._is_stepping = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context that writes states. The moment moves on after an error as well: some states may be written."""
        self.revision += 1
        self._is_loading = True
        try:
            yield
        finally:
            self._moment = Moment(self._moment.step, self._moment.loads + 1)
            self._is_loading = False
