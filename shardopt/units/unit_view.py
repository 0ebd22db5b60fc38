"""A unit as ``optimizer.units`` shows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gatherer import Gatherer
    from .unit import Unit


class UnitView:
    """One unit of stage 3, by whose name ``optimizer.units`` finds it.

    A unit that was unsharded by hand stays until :meth:`reshard` or the next step. Its params are for reading: what is
    written to them is lost, but inside of ``unsharded()``. Where params travel between ranks, every rank calls the same
    methods in the same order.
    """

    def __init__(self, gatherer: Gatherer, unit: Unit, take: Callable[[str], AbstractContextManager[object]]):
        """``take``: returns the context of a public call of this name."""
        self._gatherer, self._unit, self._take = gatherer, unit, take

    @property
    def name(self) -> str:
        """The name of its module, as in ``model.named_modules()``."""
        return self._unit.name

    @property
    def nbytes(self) -> int:
        """The bytes that it takes while it is gathered."""
        return self._unit.nbytes

    @property
    def is_unsharded(self) -> bool:
        """True if this rank holds whole values of its params."""
        return self._unit.is_here

    def unshard(self, async_op: bool = False) -> UnitView | None:
        """Gathers the unit; its params may be read then.

        Args:
            async_op: returns at once, with the object whose :meth:`wait` ends the gather. A forward that uses the unit
                waits as well.

        Raises:
            CommunicationError: a rank died or is late.
        """
        with self._take("unshard()"):
            self._gatherer.unshard(self._unit)
        if async_op:
            return self
        self.wait()
        return None

    def wait(self) -> None:
        """Waits for :meth:`unshard`."""
        with self._take("wait()"):
            self._gatherer.need(self._unit)
            self._gatherer.keep_shown(self._unit)

    def reshard(self) -> None:
        """Frees its memory. Does nothing while a forward or a backward uses it; these reshard it then."""
        with self._take("reshard()"):
            self._gatherer.reshard(self._unit)

    def __repr__(self) -> str:
        return f"<unit {self.name}: {self.nbytes} bytes, {self._unit.state.value}>"


class Units(dict[str, UnitView]):
    """Units by name, in the order of the model."""

    def __missing__(self, name: str) -> UnitView:
        """Raises KeyError, which says where names are from."""
        if not self:
            raise KeyError(
                f"{name}: call optimizer.bind() first. Binding makes the units, at stage 3, of the params that "
                "Tuning(keep_below=...) does not keep whole, and there are none."
            )
        some = ", ".join(list(self)[:5]) + (", ..." if len(self) > 5 else "")
        raise KeyError(f"{name}: no unit of this model has this name; print(optimizer.units) shows them: {some}")
