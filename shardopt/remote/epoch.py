"""The moment of a rank's states: after which step, with how many loads since. A reader compares before and after.

A writer of states marks its beginning before the first write, and its end after the last one. All that was read is of
one moment if the moment was the same before and after the reading, and no write was under way::

    step 3 ........ |  load  | ........ |  step 4  | ........
    (3, 0)            moving   (3, 1)     moving     (4, 0)

A step that all ranks skip does not change the moment. Loads count from the last step, so that ranks that loaded
differently agree again after their next step. A load does not write params: for them only the step counts. A write to
one tensor of one param's state counts for that tensor alone.
"""

from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Moment(NamedTuple):
    """A moment in the life of states; a later one is greater."""

    step: int  # the last one that wrote states or params, and that this rank has ended
    loads: int = 0  # since then: of states, and refreshes of masters; and writes to the tensor that is looked at

    def __str__(self) -> str:
        loads = {0: "", 1: " and a load of states"}.get(self.loads, f" and {self.loads} loads of states")
        return f"step {self.step}{loads}"


# A tensor of states: of which param (anything that names it on this rank), and its name.
Place = tuple[Hashable, str]


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
        self._loading: Collection[Place] | None = ()  # what is written; None: all states
        self._writes: dict[tuple[int, Place], int] = {}  # after a step, of what was written alone

    def now(self, name: str, of: Hashable = None) -> Moment:
        """Returns the moment of state ``name`` (or "master" or "param") of a param; of none: without its own writes."""
        step, loads = self._moment
        return Moment(step) if name == "param" else Moment(step, loads + self._writes.get((step, (of, name)), 0))

    def is_moving(self, name: str, of: Hashable = None) -> bool:
        """True while elements of the state are written."""
        loading = self._loading
        return self._is_stepping or (name != "param" and (loading is None or (of, name) in loading))

    def is_at(self, moment: Moment, name: str, of: Hashable = None) -> bool:
        """True if all elements of the state are those of the moment, and so all that was read before this call."""
        # The order matters: a writer sets the new moment before it marks its end.
        return not self.is_moving(name, of) and self.now(name, of) == moment

    def begin_step(self) -> None:
        """Marks that a step starts to write states and params."""
        self._is_stepping = True

    def end_step(self) -> None:
        """Marks the end of a step. The moment moves on if the step wrote anything: on all ranks or on none."""
        if self._is_stepping:
            self._moment = Moment(self._moment.step + 1)
            self._writes = {}
            self._is_stepping = False

    def cancel_step(self) -> None:
        """Marks the end of a step that has changed nothing on any rank."""
        self._is_stepping = False

    @contextmanager
    def loading(self, places: Collection[Place] | None = None) -> Iterator[None]:
        """A context that writes states. The moment moves on after an error as well: some states may be written.

        Args:
            places: the tensors of elements that are written; None: any.
        """
        self.revision += 1
        self._loading = places
        step, loads = self._moment
        try:
            yield
        finally:
            if places is None:
                self._moment = Moment(step, loads + 1)
            for place in places or ():
                self._writes[step, place] = self._writes.get((step, place), 0) + 1
            self._loading = ()
