"""Writes to gathered params that no version counter shows: ``param.data.mul_()`` in a forward.

Resharding drops the gathered values, and such a write with them. A checksum of this rank's slice, taken when the unit
has been gathered and again before it is dropped, finds it. Every rank looks at its own slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ReleasedError
from ..offload.checksum import checksum

if TYPE_CHECKING:
    from .unit import Unit


class StrayWrites:
    """The units whose slices are watched, and what was found.

    Attributes:
        in_training: also watches forwards that a backward follows.
        watched: the units that are watched, with what their slices were when they had been gathered.
    """

    def __init__(self, in_training: bool):
        self.in_training = in_training
        self.watched: dict[Unit, list[int | torch.Tensor]] = {}
        self._lost: list[str] = []  # the names of units whose slices changed
        self._unread: list[tuple[str, torch.Tensor]] = []  # the same of devices: whether a slice of the unit changed

    def watch(self, unit: Unit) -> None:
        """Notes the values of a unit that has just been gathered."""
        self.watched[unit] = _sums_of(unit)

    def forget(self, unit: Unit) -> None:
        """Ends the watch of a unit, whose params may be written from now on."""
        self.watched.pop(unit, None)

    def forget_all(self) -> None:
        self.watched.clear()

    def look(self, unit: Unit) -> None:
        """Compares a unit with what was gathered, if it is watched. The host waits for no device."""
        before = self.watched.get(unit)
        if before is None:
            return
        self.watched[unit] = now = _sums_of(unit)
        for first, second in zip(before, now, strict=True):
            if isinstance(first, torch.Tensor):
                self._unread.append((unit.display_name, first != second))
            elif first != second:
                self._lost.append(unit.display_name)

    def look_at_all(self) -> None:
        for each in list(self.watched):
            self.look(each)

    def check(self, waits: bool = False) -> None:
        """Raises if a write was found.

        Args:
            waits: reads what devices have found since the last call; the host waits for them.

        Raises:
            ReleasedError: a forward wrote to params; the values that were gathered are dropped.
        """
        if waits:
            unread, self._unread = self._unread, []
            self._lost += [name for name, changed in unread if changed]
        if self._lost:
            lost, self._lost = list(dict.fromkeys(self._lost)), []
            raise ReleasedError(
                "write to params in `with optimizer.unsharded():`, on every rank. A forward wrote to them through "
                f".data, or in a view of it, and the write is lost as their unit is resharded: {', '.join(lost)}"
            )


def _sums_of(unit: Unit) -> list[int | torch.Tensor]:
    return [checksum(each.own.view(torch.uint8), each.own.element_size()) for each in unit.buckets]
