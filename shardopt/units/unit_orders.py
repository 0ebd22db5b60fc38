"""The orders in which a step used units, and the schedules that are made of them: the same on all ranks.

The first step shows the orders; until then they are those of the modules. Each module that a script calls has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations
from typing import TYPE_CHECKING

from ..errors import DisagreementError
from .schedule import Schedule, assumed_orders, in_sequence, plan_schedule

if TYPE_CHECKING:
    from .schedule import Budget, Use
    from .unit import Unit


class Direction(Enum):
    """The kind of a pass. Each kind has an order of its own."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"
    """A forward that no backward follows: ranks may differ in how many they run, so none joins another's gathers."""


Order = tuple[str, Sequence[str]]  # the direction of a pass, and its uses


@dataclass
class ModelPass:
    """A forward or a backward that runs."""

    direction: Direction
    uses: tuple[Use, ...] = ()  # of the schedule
    called: str = ""  # the name of the called module
    at: int = 0  # the first of ``uses`` that has not begun
    # Its order counts, and units may be gathered as quantizing leaves them: it trains. What ranks do in ``unsharded()``
    # or to evaluate may differ, and is exact.
    is_traced: bool = True
    is_watched: bool = False  # looks for writes that resharding drops
    order: list[str] = field(default_factory=list)  # of the units that were used
    joined: list[str] = field(default_factory=list)  # units that were gathered for the other ranks, and not used
    past: list[str] = field(default_factory=list)  # units that this rank uses no more, or omitted
    departed: bool = False  # a use came at another place than in the schedule

    def find(self, unit: Unit) -> int | None:
        """Returns the position of this unit's next use; None if the schedule has none."""
        return next((at for at in range(self.at, len(self.uses)) if self.uses[at].unit == unit.name), None)


class UnitOrders:
    """The orders of the passes of one step, and the schedules.

    Attributes:
        passes: the orders of uses in this step.
        departed: one of them contradicts the schedule.
    """

    def __init__(self, units: Mapping[str, Unit], budget: Budget):
        self._units, self._budget = units, budget
        self.passes: list[Order] = []
        self.departed = False
        self._schedules: dict[str, Schedule] = {}  # by the name of the called module
        self._is_guess = True  # the schedules were made before any step
        self._has_new = False  # this step used a unit that its schedule does not have
        self._is_refused = False  # the ranks' orders differ

    @property
    def schedule(self) -> Schedule:
        """The schedule of all modules that a script calls, in the order of the model."""
        schedules = list(self._schedules.values())
        return schedules[0] if len(schedules) == 1 else in_sequence(schedules)

    def schedule_of(self, called: str) -> Schedule:
        """Returns the schedule of the called module of this name; it is empty if there is none."""
        return self._schedules.get(called, Schedule())

    def guess(self) -> None:
        """Makes schedules, if there are none, from the order of modules.

        Nothing is gathered ahead, for the order may be another.
        """
        if not self._schedules:
            silent = replace(self._budget, looks_ahead=False)
            self._schedules = {
                called: self._planned(*orders, silent) for called, orders in self._orders_of_modules().items()
            }

    def forget_schedules(self) -> None:
        """Forgets the schedules: the units that they were made for no longer exist."""
        self._schedules, self._is_guess = {}, True

    # -- what the step does ----------------------------------------------------------------------------------------

    def note_use(self, unit: Unit, direction: Direction) -> None:
        """Notes a use that the schedule of the pass does not have: a graph may run through several modules."""
        schedule = self.schedule_of(unit.called)
        uses = schedule.forward if direction is Direction.FORWARD else schedule.backward
        self._has_new |= all(use.unit != unit.name for use in uses)

    def note_pass(self, ended: ModelPass) -> None:
        """Notes the order of a pass that counts."""
        if ended.is_traced:
            self.passes.append((ended.direction.value, tuple(ended.order)))
            self.departed |= ended.departed and not self._is_guess

    @property
    def told(self) -> tuple[Sequence[Order], bool]:
        """The orders of this step as another rank is told them, and whether one of them contradicts the schedule."""
        return self.passes, self.departed

    def copy_from(self, passes: Sequence[Order], departed: bool) -> None:
        """Takes over the orders of another rank in this step: this rank only joined its gathers."""
        self.passes, self.departed = [(direction, tuple(order)) for direction, order in passes], departed

    def forget(self) -> None:
        """Forgets the passes of this step."""
        self.passes, self.departed = [], False

    def refuse(self) -> None:
        """Records that the ranks' orders differ: no step is taken until the next forward."""
        self._is_refused = True

    def begin_forward(self) -> None:
        """Forgets the passes that were refused."""
        if self._is_refused:
            self._is_refused = False
            self.forget()

    # -- what all ranks agree on -----------------------------------------------------------------------------------

    @property
    def proposes(self) -> bool:
        """True if the schedule lacks what this step used: ranks then make another one together."""
        return self._is_guess or self._has_new or self.departed

    def adopt(self, told: Sequence[tuple[Sequence[Order], bool]]) -> None:
        """Makes the schedule from what all ranks tell of this step.

        A unit that only some ranks used, or none in this step, stays in the order: a rank may use it in the next one.

        Raises:
            DisagreementError: two ranks used units in another order; on every rank.
        """

        def once(order: Sequence[str]) -> Sequence[str]:  # a rank may skip any use of a unit that several modules use
            return [name for name in order if not self._units[name].is_spread]

        everyones = [passes for passes, _ in told]
        for rank, passes in enumerate(everyones):
            for (direction, first), (other, order) in zip(everyones[0], passes, strict=False):
                # A backward through two forwards may use a unit of either: its own order says nothing.
                is_forward = direction == other == Direction.FORWARD.value
                pair = contradiction(once(first), once(order)) if is_forward else None
                if pair is not None:
                    self.refuse()
                    raise DisagreementError(
                        "call the modules in one order on every rank, then zero_grad() and go on: ranks used units in "
                        f"another order, so no rank took the step and nothing changed. The forward of rank 0 used "
                        f"{pair[0]} before {pair[1]}, that of rank {rank} after it."
                    )
        keeps_own = not (self._is_guess or any(departed for _, departed in told))
        for called, guesses in self._orders_of_modules().items():
            orders = [_last(self._passes_of(called, passes)) for passes in everyones]
            if keeps_own:
                orders.append(self._schedules.get(called, Schedule()).orders)
            forward, backward = (
                _common(each, guess) for each, guess in zip(zip(*orders, strict=True), guesses, strict=True)
            )
            if forward and backward:
                self._schedules[called], self._is_guess = self._planned(forward, backward, self._budget), False
        self._has_new = False

    def _passes_of(self, called: str, passes: Sequence[Order]) -> list[Order]:
        """Returns the uses of the units of one called module, without the passes of others."""
        own = [(kind, [name for name in order if self._units[name].called == called]) for kind, order in passes]
        return [each for each, (_, whole) in zip(own, passes, strict=True) if each[1] or not whole]

    def _orders_of_modules(self) -> dict[str, tuple[list[str], list[str]]]:
        """Returns by called module the order of uses that its modules suggest."""
        by_called: dict[str, list[tuple[str, bool]]] = {}
        for unit in sorted(self._units.values(), key=lambda unit: unit.number):
            by_called.setdefault(unit.called, []).append((unit.name, unit.is_spread))
        return {called: assumed_orders(units) for called, units in by_called.items()}

    def _planned(self, forward: Sequence[str], backward: Sequence[str], budget: Budget) -> Schedule:
        nbytes = {unit.name: unit.nbytes for unit in self._units.values()}
        return plan_schedule(forward, backward, nbytes, budget)


def _last(passes: Sequence[Order]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the order of uses of the last forward, and of the last backward."""
    last = dict(passes)
    return last.get(Direction.FORWARD.value, ()), last.get(Direction.BACKWARD.value, ())


def _common(orders: Sequence[Sequence[str]], of_modules: Sequence[str]) -> Sequence[str]:
    """Returns one order for ranks that used these. Where they skip units, it is that of the modules, if all keep it."""
    if all(each == orders[0] for each in orders):
        return orders[0]
    if all(is_part_of(each, of_modules) for each in orders):
        return of_modules
    return merge_orders([*orders, of_modules])


def is_part_of(order: Sequence[str], whole: Sequence[str]) -> bool:
    """True if ``order`` is what remains of ``whole`` without some of its uses."""
    following = iter(whole)
    return all(unit in following for unit in order)


def contradiction(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Returns two units that these orders use in another order; None if each order may be a part of the same one."""
    common = set(one) & set(other)
    first, second = ([unit for unit in order if unit in common] for order in (one, other))
    if is_part_of(first, second) or is_part_of(second, first):
        return None
    for pair in combinations(dict.fromkeys(first), 2):
        ours, theirs = ([unit for unit in order if unit in pair] for order in (first, second))
        if not (is_part_of(ours, theirs) or is_part_of(theirs, ours)):
            return pair
    return None


def merge_orders(orders: Sequence[Sequence[str]]) -> list[str]:
    """Returns the longest of these orders of uses, plus the uses that only others have, each after its predecessor."""
    longest = max(range(len(orders)), key=lambda number: len(orders[number]))
    merged = list(orders[longest])
    for order in orders:
        for at, unit in enumerate(order):
            if unit not in merged:
                merged.insert(merged.index(order[at - 1]) + 1 if at else 0, unit)
    return merged
