"""The pass that runs, a forward or a backward: its schedule says what is gathered and resharded with each use.

Where a gather needs all ranks, a rank that did not use a unit joins its gather here, once it uses a later one or the
pass ends. A gather that the schedule does not have asks the ranks that do not run it: see :mod:`shardopt.remote.apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ..errors import CommunicationError
from ..partition.comm.tags import GatherKind
from .unit import Stay
from .unit_orders import Direction, ModelPass

if TYPE_CHECKING:
    import torch

    from .gathered import GatheredUnits
    from .schedule import Budget, Use
    from .stray_writes import StrayWrites
    from .unit import Unit
    from .unit_orders import UnitOrders


class Caller(Protocol):
    """Knows the calls that need units: the hooks of all modules, which lie above."""

    def before_gathers(self, gathers: Direction | Unit) -> None:
        """A use follows that the schedule does not have: by hand, or in another order."""

    def pass_over(self, units: Sequence[str]) -> None:
        """Units of these names get no more gradients in the backward that runs."""

    def forget_calls(self) -> None:
        """No unit has a user any more."""

    def read(self, param: torch.nn.Parameter, is_read: bool) -> bool:
        """Gathers a resharded param for a call in the model's code, else returns False."""

    def computes(self) -> bool:
        """True in the model's own code: in a forward, a backward or another method."""


class Passes:
    """Follows the schedule, one pass after the other.

    Attributes:
        now: the pass that runs.
        caller: returns who knows the calls; weak: a cycle would outlive the optimizer.
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        here: GatheredUnits,
        orders: UnitOrders,
        budget: Budget,
        strays: StrayWrites,
        outlives_backward: bool,
    ):
        self._units, self._here, self._orders, self._budget = units, here, orders, budget
        self._strays, self._outlives_backward = strays, outlives_backward
        self.caller: Callable[[], Caller | None] = lambda: None
        self.now: ModelPass | None = None

    def begin(self, direction: Direction, called: str = "") -> None:
        """Begins a forward or a backward. It has an order of uses from here on, until :meth:`end`.

        Args:
            called: the name of the called module that runs.
        """
        # A backward under no_sync() does not say when it ends; a forward that still runs has failed.
        self.end(completed=self.direction is Direction.BACKWARD)
        self._strays.check(waits=True)
        if direction is Direction.FORWARD:
            self._orders.begin_forward()
        if self._here.unsharded_contexts or self._here.alone is not None or direction is Direction.EVALUATION:
            is_watched = not (self._here.unsharded_contexts or self._here.alone is not None)
            self.now = ModelPass(direction, is_traced=False, is_watched=is_watched)
            return
        if self._here.waits_for_others:
            self._orders.guess()
        schedule, is_forward = self._orders.schedule_of(called), direction is Direction.FORWARD
        uses = schedule.forward if is_forward else schedule.backward
        self.now = ModelPass(direction, uses, called, is_watched=is_forward and self._strays.in_training)

    @property
    def direction(self) -> Direction | None:
        """The kind of the pass that runs now; None between passes."""
        return None if self.now is None else self.now.direction

    @property
    def kind(self) -> GatherKind:
        """What a gather on demand is for."""
        if self.now is None or not (self.now.is_traced or self.direction is Direction.EVALUATION):
            return GatherKind.SCHEDULED
        return GatherKind.ON_DEMAND if self.now.is_traced else GatherKind.EVALUATION

    def advance_to(self, unit: Unit) -> bool:
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
                self._orders.note_use(unit, now.direction)
        if self._here.alone is not None:
            self._reshard_over_budget(unit, lambda each: each in self._here.held or self._stays_for_now(each))
            return False
        if now is None or at is None:
            self.before_gathers(unit)
            scheduled = self._scheduled_now(now)
            self._reshard_over_budget(unit, lambda each: each.name in scheduled or self._stays_for_now(each))
            return False
        if self._here.waits_for_others:
            if now.at:  # before this rank gathers for the next use, which waits for ranks that wait for sums
                self._mark_past(now, now.uses[now.at - 1].reshard)
            if now.joined:
                self._release_joined(now, now.uses[at], least=0)
            if now.at < at:
                self._join(now, at)
        self._run(now, now.uses[at])
        now.at = at + 1
        return True

    def _scheduled_now(self, now: ModelPass | None) -> Collection[str]:
        """Returns the units that the schedule has gathered for uses to come: other ranks gather them once."""
        if now is None or not now.is_traced or not self._here.waits_for_others:
            return ()
        if now.at:
            return now.uses[now.at - 1].stays
        return self._orders.schedule_of(now.called).kept if now.direction is Direction.BACKWARD else ()

    def _join(self, now: ModelPass, until: int) -> None:
        """Issues the gathers of uses that this rank omits, because other ranks need the units."""
        for use in now.uses[now.at : until]:
            self._run(now, use)
            if use.unit not in now.order:
                now.joined.append(use.unit)
                self._release_joined(now, use, least=1)
                self._mark_past(now, use.reshard)
        now.at = max(now.at, until)

    def _mark_past(self, now: ModelPass, names: Sequence[str]) -> None:
        """Reports that units get no more gradients in a backward: experts without input on this rank got none."""
        if now.direction is Direction.BACKWARD and names:
            now.past.extend(names)
            self._pass_over(names)

    def join_remaining(self) -> None:
        """Issues the gathers of this backward that other ranks may still need: this rank uses no more units."""
        if self._here.waits_for_others:
            if self.now is None:  # it used none at all
                self.begin(Direction.BACKWARD)
            now = self.now
            assert now is not None
            # The backward of a call of the whole model ends here: no hook tells of it.
            for unit in sorted(self._here.order, key=lambda unit: -unit.number):
                if unit.is_around and unit.users and now.find(unit) is not None:
                    self.advance_to(unit)
            self._join(now, len(now.uses))

    @property
    def owes_gathers(self) -> bool:
        """True if other ranks wait in this backward for gathers that this rank has not issued."""
        now = self.now
        is_done = now is not None and now.direction is Direction.BACKWARD and now.at == len(now.uses)
        return self._here.waits_for_others and not is_done

    def tell_past(self) -> None:
        """Reports again what this rank uses no more in this backward, or omitted: a round has begun since."""
        now = self.now
        if now is not None and now.direction is Direction.BACKWARD and now.past:
            self._pass_over(now.past)

    def _pass_over(self, names: Sequence[str]) -> None:
        caller = self.caller()
        if caller is not None:
            caller.pass_over(names)

    def _run(self, now: ModelPass, use: Use) -> None:
        """Issues the gathers of a use, and reshards what it does not list."""
        self._here.drop_all_but(use.stays.union(now.joined) if now.joined else use.stays, keeps_pages=True)
        self._here.start(self._units[use.unit], now.is_traced)
        for name in use.ahead:
            self._here.start(self._units[name], now.is_traced)

    def _stays_for_now(self, unit: Unit) -> bool:
        """True if a unit stays in this pass above the budget although the schedule does not say so."""
        if self.direction is Direction.FORWARD:
            return unit.is_spread or self._budget.keeps(unit.name)
        return self.direction is Direction.EVALUATION and unit.is_spread

    def _release_joined(self, now: ModelPass, use: Use, least: int) -> None:
        """Lets joined units be resharded for which the budget has no room, but for ``least`` of them.

        They stay that long because this rank may use them next: no other rank would take part in a second gather.
        """
        while len(now.joined) > least:
            units = [self._units[name] for name in dict.fromkeys((*use.here, *now.joined))]
            if self._budget.allows(len(units), sum(each.nbytes for each in units)):
                break
            now.joined.pop(0)

    def end(self, completed: bool = True) -> None:
        """Ends a forward or a backward, if one runs.

        Args:
            completed: False after an error: this rank joins no more gathers.
        """
        now, self.now = self.now, None
        if now is None:
            return
        if self._here.alone is not None:
            self._here.drop_all_but({unit.name for unit in self._here.held})
            return
        if not completed:
            self._strays.forget_all()
            for unit in self._here.order if self._outlives_backward else ():
                if unit.stays is Stay.GATHERED:  # ranks may have come to different units before the error
                    unit.stays = Stay.NO
            with suppress(CommunicationError):  # the error that ended the pass says more
                self._here.drop_all_but(())
            return
        if self._here.waits_for_others:
            self._join(now, len(now.uses))
        if now.direction is Direction.FORWARD and now.uses:
            self._here.drop_all_but(self._orders.schedule_of(now.called).kept)
        elif now.direction is not Direction.BACKWARD and not self._here.waits_for_others:
            self._reshard_over_budget(
                None, lambda unit: now.direction is Direction.FORWARD and self._budget.keeps(unit.name)
            )
        else:  # ranks go on from the same state, whatever each of them did
            self._here.drop_all_but(())
        self._orders.note_pass(now)
        if now.is_watched:
            self._strays.look_at_all()
            self._strays.check()

    def before_gathers(self, unit: Unit) -> None:
        """Says that a use follows that the schedule does not have."""
        caller = self.caller()
        if caller is not None:
            caller.before_gathers(unit)

    def _reshard_over_budget(self, more: Unit | None, spared: Callable[[Unit], bool]) -> None:
        """Reshards units that are not in use, the least recently used first, until ``more`` fits into the budget."""
        order = self._here.order
        for unit in list(order):
            here = [*order, *(() if more is None or more in order else (more,))]
            if self._budget.allows(len(here), sum(each.nbytes for each in here)):
                return
            if not (unit.users or unit is more or spared(unit)) and unit.stays is Stay.NO:
                self._here.drop(unit, keeps_pages=more is not None)
