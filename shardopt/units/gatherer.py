"""Unshards units while they are needed: stage 3.

Between uses a rank holds its own slice of each bucket and no memory for the rest. A unit is gathered for a use, and
stays until another unit is used; then it is resharded, which frees its memory, unless the :class:`Schedule` keeps it.
The first step shows the order of uses, from which the schedule is made; it begins with the order of the modules.

Where ranks read each other's memory, a gather needs no call of another rank. Over any other connection it needs all
ranks. There the schedule issues the gathers, in its order: a rank that did not use a unit joins its gather once it
uses a later one, or the pass ends. A use that the schedule does not have is gathered on demand, and the order is
compared among ranks by the step, which adopts it.

A script may call several modules, the stages of a pipeline that this rank holds: each has passes, and a schedule, of
its own. Units that stay from forward to backward (``Budget.resharded``) then stay until the step, for backwards of
other micro-batches follow.

Units of experts are gathered over fewer ranks than the rest, by a transport of their own. They have their place in the
one order of all units, so that gathers of ranks that overlap cannot wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import CommunicationError
from .gathered import GatheredUnits
from .slice_writes import SliceWrites
from .stray_writes import StrayWrites
from .unit import GatheredBucket, Stay, UnitState
from .unit_orders import Direction, ModelPass, UnitOrders

if TYPE_CHECKING:
    from ..partition.bucket import Bucket
    from ..partition.comm.all_gather import AllGather, Window
    from .schedule import Budget, Use
    from .unit import ParamShard, Unit
    from .unit_orders import Order


class Gatherer:
    """Gathers units and reshards them.

    Attributes:
        here: the units that are gathered, or on their way.
        writes: the order between gathers and writes of slices.
        orders: of uses in this step, and the schedules.
    """

    def __init__(self, budget: Budget, outlives_backward: bool = False, watches_training: bool = False):
        """
        Args:
            outlives_backward: what stays from forward to backward stays until the step.
            watches_training: looks for stray writes in training too, not only in evaluation.
        """
        self.budget, self._outlives_backward = budget, outlives_backward
        self.writes, self._strays = SliceWrites(), StrayWrites(watches_training)
        self.here = GatheredUnits(self.writes, self._strays)
        self.units: dict[str, Unit] = {}
        self.orders = UnitOrders(self.units, budget)
        self.on_past: Callable[[Sequence[str]], None] = lambda _: None  # is called with what was added to ``past``
        # Is called before a use that the schedule does not have: by hand, or in another order.
        self.on_demand: Callable[[Unit], None] = lambda _: None
        self.on_drop: Callable[[], None] = lambda: None  # is called when no unit has a user any more
        self._held: frozenset[Unit] = frozenset()  # the units that were gathered when this rank began to read alone
        self.unsharded_contexts = 0  # contexts that are open in which all units are gathered
        self.now: ModelPass | None = None  # the pass that runs

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

    def use(self, unit: Unit) -> None:
        """Gathers a unit that a forward or a backward needs now, and the units that the schedule gathers ahead.

        It stays, and its params may be shown, until ``done`` was called as often. After an error in ``use``, do not
        call ``done``.
        """
        now = self.now
        if not self._advance_to(unit):
            self.here.start(unit, now is not None and now.is_traced, self.direction is Direction.EVALUATION)
        self._arrive(unit)
        if self.here.freed:
            self.here.give_pages_back()

    def need(self, unit: Unit) -> None:
        """Gathers a unit like ``use``, outside of the order of uses that ranks compare, and shows all of it, exact."""
        self.here.start(unit)
        self._arrive(unit)
        self.show(unit)

    def _arrive(self, unit: Unit) -> None:
        """Waits for a unit that is on its way, which has a user more then."""
        if self.writes.written and self.here.alone is None:
            self.writes.after_writes()
        if unit.state is not UnitState.UNSHARDED:
            self.here.wait(unit)
            if self.now is not None and self.now.is_watched:
                self._strays.watch(unit)
        unit.users += 1  # last: after an error the unit has no user

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
        if unit.is_needed:
            return
        if reshard:
            self.here.drop(unit)
            return
        now = self.now
        if now is None or not now.order or now.order[-1] != unit.name:
            # A use that ends after those of other units counts again: the schedule holds the unit.
            self._advance_to(unit)
            self.here.give_pages_back()
        # The unit may be resharded at any time. A param that is read then holds anything; a write to it is lost.
        for each in unit.buckets:
            each.bucket.guard()

    def forget_uses(self, unit: Unit, count: int) -> None:
        """Ends uses by calls that an interrupt ended. Gathers and reshards nothing, for which ranks might wait."""
        unit.users = max(unit.users - count, 0)  # the interrupt may have come in ``done``
        if not unit.is_needed:
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
        self.on_demand(unit)
        self.writes.after_writes()
        self.here.start(unit)
        if unit.stays is Stay.NO:
            unit.stays = Stay.GATHERED

    def reshard(self, unit: Unit) -> None:
        """Reshards a unit that no call uses. If a call uses it, it is resharded after the call, as by default."""
        unit.stays = Stay.NO
        if not unit.users:
            self.here.drop(unit)

    def join(self, unit: Unit, evaluates: bool) -> None:
        """Takes part in a gather of other ranks that this rank's schedule does not have."""
        self.here.drop(unit)
        self.here.start(unit, evaluates=evaluates)
        self.here.drop(unit)

    def done_but_viewed(self, unit: Unit) -> None:
        """Like ``done``, but leaves buffers to tensors that still view them; the next gather allocates new ones."""
        if unit.users == 1:
            for each in unit.buckets:
                each.bucket.move_params_out()
                each.lies_in(each.bucket.flat)
        self.done(unit, reshard=True)

    def _reshard_over_budget(self, more: Unit | None, spared: Callable[[Unit], bool]) -> None:
        """Reshards units that are not in use, the least recently used first, until ``more`` fits into the budget."""
        order = self.here.order
        for unit in list(order):
            here = [*order, *(() if more is None or more in order else (more,))]
            if self.budget.allows(len(here), sum(each.nbytes for each in here)):
                return
            if unit.may_go and unit is not more and not spared(unit):
                self.here.drop(unit, keeps_pages=more is not None)

    # -- passes ----------------------------------------------------------------------------------------------------

    def begin_pass(self, direction: Direction, called: str = "") -> None:
        """Begins a forward or a backward. It has an order of uses from here on, until :meth:`end_pass`.

        Args:
            called: the name of the called module that runs.
        """
        # A backward under no_sync() does not say when it ends; a forward that still runs has failed.
        self.end_pass(completed=self.direction is Direction.BACKWARD)
        self._strays.check(waits=True)
        if direction is Direction.FORWARD:
            self.orders.begin_forward()
        if self.unsharded_contexts or self.is_alone or direction is Direction.EVALUATION:
            is_watched = not (self.unsharded_contexts or self.is_alone)
            self.now = ModelPass(direction, is_traced=False, is_watched=is_watched)
            return
        if self.waits_for_others:
            self.orders.guess()
        schedule, is_forward = self.orders.schedule_of(called), direction is Direction.FORWARD
        uses = schedule.forward if is_forward else schedule.backward
        self.now = ModelPass(direction, uses, called, is_watched=is_forward and self._strays.in_training)

    @property
    def direction(self) -> Direction | None:
        """The kind of the pass that runs now; None between passes."""
        return None if self.now is None else self.now.direction

    def _advance_to(self, unit: Unit) -> bool:
        """Goes on to the next use: reshards, joins gathers and starts others as the schedule says.

        Returns:
            True if the schedule has the use, so that the unit is on its way.
        """
        now = self.now
        if now is not None and now.order and now.order[-1] == unit.name:
            return False  # the same use goes on
        at = None
        if now is not None:
            now.order.append(unit.name)
            if unit.name in now.joined:
                now.joined.remove(unit.name)
            is_next = now.at < len(now.uses) and now.uses[now.at].unit == unit.name  # nearly always
            at = now.at if is_next else now.find(unit)
            if at is None and any(use.unit == unit.name for use in now.uses):
                now.departed = True
            elif at is None and now.is_traced:
                self.orders.note_use(unit, now.direction)
        if self.here.alone is not None:
            self._reshard_over_budget(unit, lambda each: each in self._held or self._stays_for_now(each))
            return False
        if now is None or at is None:
            self.on_demand(unit)
            self._reshard_over_budget(unit, self._stays_for_now)
            return False
        if self.here.waits_for_others:
            if now.at:  # before this rank gathers for the next use, which waits for ranks that wait for sums
                self._mark_past(now, now.uses[now.at - 1].reshard)
            self._release_joined(now, now.uses[at], least=0)
            self._join(now, at)
        self._run(now, now.uses[at])
        now.at = at + 1
        return True

    def _join(self, now: ModelPass, until: int) -> None:
        """Issues the gathers of uses that this rank omits, because other ranks need the units."""
        for use in now.uses[now.at : until]:
            self._run(now, use)
            if use.unit not in now.order:
                now.joined.append(use.unit)
                self._release_joined(now, use, least=1)
                self._mark_past(now, (use.unit,))
        now.at = max(now.at, until)

    def _mark_past(self, now: ModelPass, names: Sequence[str]) -> None:
        """Reports that units get no more gradients in a backward: experts without input on this rank got none."""
        if now.direction is Direction.BACKWARD and names:
            now.past.extend(names)
            self.on_past(names)

    def join_remaining(self) -> None:
        """Issues the gathers of this backward that other ranks may still need: this rank uses no more units."""
        if self.waits_for_others:
            if self.now is None:  # it used none at all
                self.begin_pass(Direction.BACKWARD)
            assert self.now is not None
            self._join(self.now, len(self.now.uses))

    @property
    def owes_gathers(self) -> bool:
        """True if other ranks wait in this backward for gathers that this rank has not issued."""
        now = self.now
        is_done = now is not None and now.direction is Direction.BACKWARD and now.at == len(now.uses)
        return self.waits_for_others and not is_done

    @property
    def past(self) -> Sequence[str]:
        """The names of the units that this rank uses no more in this backward, or omitted."""
        now = self.now
        return now.past if now is not None and now.direction is Direction.BACKWARD else ()

    def _run(self, now: ModelPass, use: Use) -> None:
        """Issues the gathers of a use, and reshards what it does not list."""
        self.here.drop_all_but(use.stays.union(now.joined) if now.joined else use.stays, keeps_pages=True)
        self.here.start(self.units[use.unit], now.is_traced)
        for name in use.ahead:
            self.here.start(self.units[name], now.is_traced)

    def _stays_for_now(self, unit: Unit) -> bool:
        """True if a unit stays in this pass above the budget although the schedule does not say so."""
        if self.direction is Direction.FORWARD:
            return unit.is_spread or self.budget.keeps(unit.name)
        return self.direction is Direction.EVALUATION and unit.is_spread

    def _release_joined(self, now: ModelPass, use: Use, least: int) -> None:
        """Lets joined units be resharded for which the budget has no room, but for ``least`` of them.

        They stay that long because this rank may use them next: no other rank would take part in a second gather.
        """
        while len(now.joined) > least:
            units = [self.units[name] for name in dict.fromkeys((*use.here, *now.joined))]
            if self.budget.allows(len(units), sum(each.nbytes for each in units)):
                break
            now.joined.pop(0)

    def end_pass(self, completed: bool = True) -> None:
        """Ends a forward or a backward, if one runs.

        Args:
            completed: False after an error: this rank joins no more gathers.
        """
        now, self.now = self.now, None
        if now is None:
            return
        if self.is_alone:
            self.here.drop_all_but({unit.name for unit in self._held})
            return
        if not completed:
            self._strays.forget_all()
            for unit in self.here.order if self._outlives_backward else ():
                if unit.stays is Stay.GATHERED:  # ranks may have come to different units before the error
                    unit.stays = Stay.NO
            with suppress(CommunicationError):  # the error that ended the pass says more
                self.here.drop_all_but(())
            return
        if self.waits_for_others:
            self._join(now, len(now.uses))
        if now.direction is Direction.FORWARD and now.uses:
            self.here.drop_all_but(self.orders.schedule_of(now.called).kept)
        elif now.direction is not Direction.BACKWARD and not self.waits_for_others:
            self._reshard_over_budget(
                None, lambda unit: now.direction is Direction.FORWARD and self.budget.keeps(unit.name)
            )
        else:  # ranks go on from the same state, whatever each of them did
            self.here.drop_all_but(())
        self.orders.note_pass(now)
        if now.is_watched:
            self._strays.look_at_all()
            self._strays.check()

    @property
    def departures(self) -> Sequence[Order]:
        """The orders of this step that contradict the schedule, and must be the same on all ranks.

        None where ranks read each other's memory: there a gather needs no call of another rank.
        """
        return self.orders.departures if self.waits_for_others else ()

    # -- one rank alone --------------------------------------------------------------------------------------------

    @contextmanager
    def reading_alone(self, gathering_of: Callable[[Unit], AllGather]) -> Iterator[None]:
        """A context in which this rank gathers alone. Other ranks do not notice: the same units stay gathered.

        Args:
            gathering_of: returns an all-gather of a unit in which no other rank takes part.
        """
        self.here.alone, self._held = gathering_of, frozenset(self.here.order)
        try:
            yield
        finally:
            for unit in [each for each in self.here.order if each not in self._held]:
                self.here.free(unit)
            self.now, self.here.alone, self._held = None, None, frozenset()

    # -- writes of slices ------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Reshards all units: their slices are about to change, or the pass was abandoned."""
        self.now = None
        self._strays.forget_all()
        self.writes.count.update(self.writes.transports)
        self.orders.forget()
        self.on_drop()
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
