"""The turns of all optimizers whose params a checkpoint saves or fills: no step of theirs runs meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from ..engine import Engine

Result = TypeVar("Result")
Turns = Sequence[AbstractContextManager[None]]


def turns_of(call: str, module: nn.Module, engines: Sequence[Engine]) -> Turns:
    """Returns the turns to take, in the same order for every thread. Waits for nobody.

    Args:
        engines: of the optimizers that were given; those of others that train the module count too.

    Raises:
        StateError: this thread is in the middle of another call, or in a signal handler that others may not be in.
    """
    from ..engine import live_engines  # not at the top: it is imported with the first optimizer

    own = set(module.parameters())
    live = live_engines()
    found = [each for each in live if any(each is given for given in engines) or not own.isdisjoint(each.params)]
    return [each.turn.take_together(call) for each in found]


def in_turn(turns: Turns, work: Callable[[], Result]) -> Result:
    """Does ``work`` once this thread has all the turns."""
    if not turns:
        return work()
    with turns[0]:
        return in_turn(turns[1:], work)
