"""Unshards units while they are needed: stage 3.

Between uses a rank holds its own slice of each bucket and no memory for the rest. A unit is gathered for a use, and
stays until another unit is used; then it is resharded, which frees its memory, unless the :class:`Schedule` keeps it.
The first step shows the order of uses, from which the schedule is made; it begins with the order of the modules.

Where ranks read each other's memory, a gather needs no call of another rank. Over any other connection it needs all
ranks. There the schedule issues the gathers, in its order (:mod:`.passes`). A use that the schedule does not have is
gathered on demand, and the order is compared among ranks by the step, which adopts it.

A script may call several modules, the stages of a pipeline that this rank holds: each has passes, and a schedule, of
its own. Units that stay from forward to backward (``Budget.resharded``) then stay until the step, for backwards of
other micro-batches follow.

Units of experts are gathered over fewer ranks than the rest, by a transport of their own. They have their place in the
one order of all units, so that gathers of ranks that overlap cannot wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from .gathered import GatheredUnits
from .passes import Passes
from .slice_writes import SliceWrites
from .stray_writes import StrayWrites
from .unit import GatheredBucket, Stay, UnitState
from .unit_orders import UnitOrders

if TYPE_CHECKING:
    from ..partition.bucket import Bucket
    from ..partition.comm.all_gather import AllGather, Window
    from ..partition.comm.tags import GatherKind
    from .schedule import Budget
    from .unit import ParamShard, Unit


class Gatherer:
    """Gathers units and reshards them.

    Attributes:
        here: the units that are gathered, or on their way.
        writes: the order between gathers and writes of slices.
        orders: of uses in this step, and the schedules.
        passes: follow the schedules.
    """

    def __init__(
        self,
        budget: Budget,
        waiting: Callable[[str], AbstractContextManager[object]],
        outlives_backward: bool,
        watches_training: bool,
    ):
        """
        Args:
            waiting: the context of a wait for a unit of this name.
            outlives_backward: what stays from forward to backward stays until the step.
            watches_training: looks for stray writes in training too, not only in evaluation.
        """
        self.budget, self._outlives_backward = budget, outlives_backward
        self.writes, self._strays = SliceWrites(), StrayWrites(watches_training)
        self.here = GatheredUnits(self.writes, self._strays, waiting)
        self.units: dict[str, Unit] = {}
        self.orders = UnitOrders(self.units, budget)
        self.passes = Passes(self.units, self.here, self.orders, budget, self._strays, outlives_backward)

    def add(self, bucket: Bucket, own: ParamShard, window: Window, unit: Unit) -> GatheredBucket:
        """Adds a bucket to a unit, and frees the bucket's memory; ``own`` holds this rank's slice."""
        bucket.drop()
        unit = self.units.setdefault(unit.name, unit)
        self.here.drop(unit)  # its other buckets may still be gathered
        unit.buckets.append(GatheredBucket(bucket, own, window, unit))
        unit.has_code |= window.code is not None
        unit.held_at = None
        unit.outlives_backward = self._outlives_backward and self.budget.keeps(unit.name)
        self.orders.forget_schedules()
        return unit.buckets[-1]

    @property
    def gathered(self) -> list[str]:
        """The names of the units that are gathered, or on their way."""
        return sorted(unit.name for unit in self.here.order)

    @property
    def waits_for_others(self) -> bool:
        """True if a rank that gathers some unit waits until the others gather it."""
        return self.here.waits_for_others

    @property
    def is_alone(self) -> bool:
        """True while this rank reads alone, in ``unsharded(alone=True)``."""
        return self.here.alone is not None

    # -- use -------------------------------------------------------------------------------------------------------

    def use(self, unit: Unit, in_order: bool = True) -> None:
        """Gathers a unit that a forward or a backward needs now, and the units that the schedule gathers ahead.

        It stays, and its params may be shown, until ``done`` was called as often. After an error in ``use``, do not
        call ``done``.

        Args:
            in_order: it is one of the uses whose order ranks compare.
        """
        here, now = self.here, self.passes.now
        if not in_order:
            here.start(unit)
        elif not self.passes.advance_to(unit):
            here.start(unit, now is not None and now.is_traced, self.passes.kind)
        if self.writes.written and here.alone is None:
            self.writes.after_writes()
        if unit.state is not UnitState.UNSHARDED:
            here.wait(unit)
            if now is not None and now.is_watched:
                self._strays.watch(unit)
        if here.freed:
            here.give_pages_back()
        unit.users += 1  # last: after an error the unit has no user

    def need(self, unit: Unit) -> None:
        """Gathers a unit like ``use``, outside of the order of uses that ranks compare, and shows all of it, exact."""
        self.use(unit, in_order=False)
        self.show(unit)

    def show(self, unit: Unit) -> None:
        """Lets all params of a unit in use be read."""
        self._strays.forget(unit)
        for each in unit.buckets:
            each.bucket.whole.show()

    def need_all(self, units: Iterable[Unit]) -> None:
        """Calls ``need`` for all of them; after an error for none."""
        needed = []
        try:
            for each in units:
                self.need(each)
                needed.append(each)
        except BaseException:
            for each in needed:
                self.done(each)
            raise

    def done(self, unit: Unit, reshard: bool = False) -> None:
        """Ends a use of the unit. Without other users it is gathered until another unit is used.

        Args:
            reshard: reshards it now if it has no other user.
        """
        unit.users -= 1
        assert unit.users >= 0
        if unit.users or unit.stays is Stay.SHOWN:
            return
        if reshard:
            self.here.drop(unit)
            return
        now = self.passes.now
        if now is None or not now.order or now.order[-1] != unit.name:
            # A use that ends after those of other units counts again: the schedule holds the unit.
            self.passes.advance_to(unit)
            self.here.give_pages_back()
        # The unit may be resharded at any time. A param that is read then holds anything; a write to it is lost.
        for each in unit.buckets:
            each.bucket.guard()

    def forget_use(self, unit: Unit) -> None:
        """Ends a use by a call that an interrupt ended. Gathers and reshards nothing, for which ranks might wait."""
        unit.users = max(unit.users - 1, 0)  # the interrupt may have come in ``done``
        if not unit.users and unit.stays is not Stay.SHOWN:
            for each in unit.buckets:
                each.bucket.guard()

    def use_until_step(self, unit: Unit) -> None:
        """Gathers a unit like ``use``, and lets all of its params be read until ``reshard`` or the next step.

        A backward does not end that: no hook says which graphs saved the params, and there may be several.
        """
        self.use(unit)
        self.show(unit)
        self.keep_shown(unit)

    def keep_shown(self, unit: Unit) -> None:
        """Ends a use, but lets params be read as after :meth:`use_until_step`."""
        unit.stays = Stay.SHOWN
        unit.users -= 1

    def unshard(self, unit: Unit) -> None:
        """Starts to gather a unit, which stays until ``reshard`` or the next step."""
        self.passes.before_gathers(unit)
        self.writes.after_writes()
        self.here.start(unit)
        if unit.stays is Stay.NO:
            unit.stays = Stay.GATHERED

    def reshard(self, unit: Unit) -> None:
        """Reshards a unit that no call uses. If a call uses it, it is resharded after the call, as by default."""
        unit.stays = Stay.NO
        if not unit.users:
            self.here.drop(unit)

    def join(self, unit: Unit, kind: GatherKind) -> None:
        """Takes part in a gather of other ranks that this rank's schedule does not have."""
        self.here.drop(unit)
        self.here.start(unit, kind=kind)
        self.here.drop(unit)

    def done_but_viewed(self, unit: Unit) -> None:
        """Like ``done``, but leaves buffers to tensors that still view them; the next gather allocates new ones."""
        if unit.users == 1:
            for each in unit.buckets:
                each.bucket.move_params_out()
                each.lies_in(each.bucket.flat)
        self.done(unit, reshard=True)

    # -- one rank alone --------------------------------------------------------------------------------------------

    @contextmanager
    def reading_alone(self, gathering_of: Callable[[Unit], AllGather]) -> Iterator[None]:
        """A context in which this rank gathers alone. Other ranks do not notice: the same units stay gathered.

        Args:
            gathering_of: returns an all-gather of a unit in which no other rank takes part.
        """
        self.here.alone, self.here.held = gathering_of, frozenset(self.here.order)
        try:
            yield
        finally:
            for unit in [each for each in self.here.order if each not in self.here.held]:
                self.here.free(unit)
            self.passes.now, self.here.alone, self.here.held = None, None, frozenset()

    # -- writes of slices ------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Reshards all units: their slices are about to change, or the pass was abandoned."""
        self.passes.now = None
        self._strays.forget_all()
        self.writes.count.update(self.writes.transports)
        self.orders.forget()
        caller = self.passes.caller()
        if caller is not None:
            caller.forget_calls()
        for unit in list(self.here.order):
            self.here.free(unit)

    def write_back(self, unit: Unit) -> None:
        """Collective: writes this rank's slices of a unit whose whole params were written on every rank."""
        self._strays.forget(unit)
        self.writes.before_write(unit.transport)
        for each in unit.buckets:
            each.bucket.take_sources()
            each.param_shard.write(each.own)

    def write_slice(self, unit: Unit, write: Callable[[], None]) -> None:
        """Collective: calls ``write``, which writes slices of a unit that no call uses; every rank writes the same.

        It may be called in a forward, by a module that writes to a param of another one: other units stay.
        """
        self.writes.before_write(unit.transport)
        self.reshard(unit)  # the gathered values are out of date
        write()

    def before_writes(self) -> None:
        """Collective: reshards all units and waits until no rank gathers, before slices are written."""
        for each in self.writes.transports:
            self.writes.before_write(each)
        self.drop_all()

    def give_up(self, units: Iterable[Unit]) -> None:
        """Forgets units whose params are whole from now on."""
        for each in units:
            self.here.order.pop(each, None)
            del self.units[each.name]
