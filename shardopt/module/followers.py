"""The backwards of a module's experts: their rounds open, end and are lost with those of the main domain.

::

    main      open  gradients ...................  reduce, report          time ->
    experts    open  gradients ..  reduce, report

A gradient of any domain opens the rounds of all: a rank whose experts got no token takes part with zeros. All ranks end
the rounds in one order, the main domain's last, so that groups of ranks that overlap do not wait for each other. The
main domain has all ranks: its report tells them what failed on the ranks of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..domain.param import ParamRecord


class Follower(Protocol):
    """The backward of experts, as the main domain's knows it; see :class:`.backward.Backward`."""

    @property
    def is_bound(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def rounds(self) -> int: ...

    @property
    def entries(self) -> Sequence[ParamRecord]: ...

    @property
    def found_nonfinite(self) -> bool: ...

    def mark_spoilt(self, is_spoilt: bool) -> None: ...

    def join_round(self) -> None: ...

    def pass_over(self, units: Sequence[str]) -> None: ...

    def finish(self) -> None: ...

    def abandon(self, reason: str) -> None: ...

    def check_whole(self) -> None: ...

    def check_reduced(self) -> None: ...

    def forget_gradients(self) -> None: ...

    def fail(self, error: Exception, rounds: int) -> bool: ...

    def catch_up(self) -> None: ...

    def detach(self) -> None: ...


class Followers:
    """The backwards of the experts, of which the main domain's is the lead; none for a module with one domain."""

    def __init__(self) -> None:
        self._all: list[Follower] = []

    def __iter__(self) -> Iterator[Follower]:
        return iter(self._all)

    def add(self, backward: Follower) -> None:
        """Adds one; all ranks add theirs in the same order."""
        self._all.append(backward)

    def open(self) -> None:
        """Opens the rounds of the domains that hold params."""
        for each in self._bound:
            each.join_round()

    def finish(self) -> Exception | None:
        """Collective: ends all open rounds. Returns the first error, which the other ranks are still to be told."""
        problem: Exception | None = None
        for each in self._bound:
            try:
                each.finish()
            except Exception as error:  # the ranks of the next expert, and those of the main domain, wait for this one
                problem = problem or error
        return problem

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def found_nonfinite(self) -> bool:
        """True if a gradient of an expert holds an Inf or NaN."""
        return any(each.found_nonfinite for each in self._bound)

    def abandon(self, reason: str) -> None:
        """Abandons all open rounds."""
        for each in self._bound:
            if each.is_open:
                each.abandon(reason)

    @property
    def _bound(self) -> list[Follower]:
        return [each for each in self._all if each.is_bound]
