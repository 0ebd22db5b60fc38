"""What the ranks of a group have found out about the tensors that one ``with`` keeps: which of them are the same.

A tensor is known by its place in the order in which autograd saves tensors within the ``with``. The order is the same
on all ranks, and so are the decisions: no rank waits for a comparison that another one does not make.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .packed import PackedActivation


class Decisions:
    """The decisions for one ``with`` of the program, from step to step.

    Attributes:
        number: of the messages that carry activations; the same on all ranks, and of nothing else.
        packed: what is kept now, of all backwards that are still to come.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._whole: set[int] = set()
        self._same: set[tuple[int, Hashable]] = set()
        self.packed: weakref.WeakSet[PackedActivation] = weakref.WeakSet()  # weak: a graph that is dropped frees them

    def find(self, position: int, kind: Hashable) -> bool | None:
        """Returns True if the tensor is the same on all ranks, False if it stays whole, None if not compared yet.

        ``kind``: its dtype and shape. A tensor of another kind than before is compared again, but for one that stays
        whole: its kind may differ from rank to rank, and not all ranks would compare it.
        """
        if position in self._whole:
            return False
        return True if (position, kind) in self._same else None

    def decide(self, position: int, kind: Hashable, is_same: bool) -> None:
        """All ranks call it alike."""
        if is_same:
            self._same.add((position, kind))
        else:
            self.stays_whole(position)

    def stays_whole(self, position: int) -> None:
        self._whole.add(position)
