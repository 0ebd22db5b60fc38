"""The closure of a step: if it raises on one rank, the other ranks must notice, though they may wait in a backward.

A closure runs forward and backward, and backward waits for all ranks. One rank's closure may fail before its backward,
or in the middle of it. How the other ranks notice depends on the transport:

* Ranks that read each other's memory see on the failed rank's board that it abandoned the round.
* Otherwise all ranks take part in an exchange before each round of a closure (as before they bind), the same as at the
  beginning of a step; the rank that failed joins that exchange. In the middle of a round it adds zeros to the remaining
  buckets, and reports the failure at the end of the round: in the report of norms, or, with a backend's own
  collectives (NCCL), which need not be waited for, in the roll call.
* Outside of a ``join()``, a forward at stage 3 whose gathers wait for other ranks has no such exchange. The failed rank
  then raises the error at once, and the others notice at the end of their backward, or when its process ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RaiseNow(Exception):
    """All ranks know of ``error``, or none can be notified: it is raised as it is, without an exchange."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


class ClosureState:
    """The closures of the steps of a module that was taken over.

    Attributes:
        is_on: a closure runs.
        number: number of the last closure that began, from 1; the same on all ranks.
        shared_error: the error that all ranks raised together inside of the closure that runs.
    """

    def __init__(self) -> None:
        self.is_on, self.number = False, 0
        self.shared_error: Exception | None = None

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """A context of a collective that all ranks call: an error inside is raised on all of them."""
        try:
            yield
        except Exception as error:
            if self.is_on:
                self.shared_error = error
            raise
