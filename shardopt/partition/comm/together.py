"""How one rank's error becomes the error of all: it is kept until the ranks meet, and told by what they exchange there.

A rank that raised at once would leave the others waiting for it in their next exchange. So it skips its own work, and
takes part in the exchange with the error as its news::

    rank 0   work   exchange(None)    -> CommunicationError, DisagreementError: rank 1 failed
    rank 1   error  exchange(error)   -> error

An exchange has room for the news: a digest that says there is a problem (``domain/agreement.py``), or a flag beside the
numbers that are summed, gathered or sent anyway. So no message is sent for errors alone where ranks meet without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Relay:
    """Keeps this rank's first error until the ranks meet."""

    def __init__(self, problem: Exception | None = None):
        self.problem = problem

    def attempt(self, work: Callable[..., Result], *arguments: object) -> Result | None:
        """Does this rank's own work, unless the rank has failed already. Returns the result, None after an error."""
        if self.problem is None:
            try:
                return work(*arguments)
            except Exception as error:
                self.problem = error
        return None

    def meet(self, tell: Callable[[Exception | None], Result]) -> Result | None:
        """Collective: takes part in an exchange, with an error or without. Returns the result, None after an error.

        Args:
            tell: the exchange, which tells the other ranks this rank's error, and raises if any rank has one. It
                chooses which: an agreement raises what another rank says rather than what this one saw of it.
        """
        try:
            return tell(self.problem)
        except Exception as error:
            self.problem = error
            return None

    def note(self, error: Exception) -> None:
        """Keeps an error, unless there is an earlier one."""
        self.problem = self.problem or error

    def check(self) -> None:
        """Raises the error, once all ranks know of it."""
        if self.problem is not None:
            raise self.problem


def riding_on(exchange: Callable[[bool], Result]) -> Callable[[Exception | None], Result]:
    """Makes an exchange of one that has room for a flag alone: a rank that has failed raises its own error."""

    def tell(problem: Exception | None) -> Result:
        try:
            return exchange(problem is not None)
        except Exception as error:
            raise problem or error  # noqa: B904 (an error of the exchange says no more than the flags)

    return tell


class together:
    """A block, collective at its end: what it raises on any rank is raised on all of them there.

    Raises:
        Exception: what the block raised on this rank, else what ``tell`` makes of another rank's error.
    """

    def __init__(self, tell: Callable[[Exception | None], object]):
        """``tell``: the exchange that brings the news to the other ranks, see :meth:`Relay.meet`."""
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, Exception):
            self._tell(error)
