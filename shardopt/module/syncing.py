"""Whether the backward that runs is a round: it reduces gradients, or leaves them to a later one (``no_sync()``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .closure import ClosureState
    from .coverage import Coverage


class Owner(Protocol):
    """The takeover of the module, which lies above."""

    closure: ClosureState
    coverage: Coverage

    @property
    def syncs_now(self) -> bool:
        """True if a backward reduces gradients that follows the forward of a submodule alone."""

    def round_ended(self, completed: bool) -> None:
        """A round has ended, or is lost."""


class Syncing:
    """Knows of the backward that runs whether it is a round.

    Each graph says so when its backward begins: the forwards of several micro-batches may come before the backward of
    the first. A backward that comes through no output of a forward is one if the last forward said so; if that had a
    backward since, or if there was none, as the optimizer says now.

    Attributes:
        is_on: the backward that runs is a round.
    """

    def __init__(self) -> None:
        self.is_on = self._is_said = False  # said by a forward, of a backward that has not begun
        self._task = -1  # of autograd: the last one of which it is known

    def forward_begins(self, syncs: bool) -> None:
        """A forward begins that a backward can follow, which is a round or not."""
        self.is_on, self._is_said = syncs, True

    def graph_begins(self, syncs: bool, is_open: bool) -> None:
        """The backward of a forward begins. One through several forwards is a round if that of one of them is.

        Args:
            is_open: a round is open.
        """
        self._task, self._is_said = torch._C._current_graph_task_id(), False
        if syncs or not is_open:
            self.is_on = syncs

    def decide(self, owner: Owner | None) -> None:
        """Decides for the backward that runs, while no round is open, if it has come through no output of a forward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.is_on = self.is_on if self._is_said else owner is not None and owner.syncs_now
            self._task, self._is_said = task, False
