"""The schedule of stage 3: which units are gathered during each use of a unit. Frozen data.

It is made from the order in which a step used the units, and from a budget. With five units of equal size and a budget
of three, over a connection that carries params while a rank computes::

    forward    A    B    C    D    E       backward   E    D    C    B    A
    gathered   ABC  BCD  CDE  CDE  CDE                CDE  BCD  ABC  AB   A

The gather of a unit starts with the first use that lists it. What no use lists any more is resharded before that use.
``E``, ``D`` and ``C`` end the forward and begin the backward: they are kept. A unit that is used again in the same
forward, or the same backward, is never resharded in between, even above the budget: within one pass no unit travels
twice.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property


@dataclass(frozen=True)
class Budget:
    """The limits of what is gathered at once: ahead of its use, or kept after it. The unit in use has no limit.

    Attributes:
        nbytes: of all gathered units.
        units: their number.
        looks_ahead: True if units are gathered ahead: they travel while this rank computes.
        resharded: True, or patterns of the units that forward may reshard. The others stay until backward, whatever
            the limits say.
        lists: the units that are gathered ahead of each unit, whatever the limits say; None: as many as these allow.
    """

    nbytes: float = math.inf
    units: float = math.inf
    looks_ahead: bool = True
    resharded: bool | tuple[str, ...] = True
    lists: Mapping[str, Sequence[str]] | None = None

    def keeps(self, unit: str) -> bool:
        """True if a unit stays from forward to backward because the user said so."""
        if isinstance(self.resharded, bool):
            return not self.resharded
        return not any(fnmatchcase(unit, pattern) for pattern in self.resharded)

    def allows(self, units: int, nbytes: int) -> bool:
        """True if so many units of so many bytes may be gathered at once."""
        return units <= self.units and nbytes <= self.nbytes


@dataclass(frozen=True)
class Use:
    """One use of a unit, or several without another unit's in between.

    Attributes:
        unit: its name.
        held: other units that were used before it and stay.
        ahead: units whose gather starts with it, since they are used next.
        reshard: units that are resharded after it.
    """

    unit: str
    held: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    reshard: tuple[str, ...] = ()

    @cached_property
    def here(self) -> tuple[str, ...]:
        """The units that are gathered, or on their way, during this use."""
        return self.unit, *self.held, *self.ahead

    @cached_property
    def stays(self) -> frozenset[str]:
        """What is not resharded as the use begins."""
        return frozenset(self.here)


@dataclass(frozen=True)
class Schedule:
    """The uses of a forward and of the backward that follows, the same on all ranks.

    ``print(schedule)`` shows a line for each use.

    Attributes:
        kept: units that stay gathered from the forward to the backward.
    """

    forward: tuple[Use, ...] = ()
    backward: tuple[Use, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def orders(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The order of uses in the forward and in the backward."""
        return tuple(use.unit for use in self.forward), tuple(use.unit for use in self.backward)

    def __str__(self) -> str:
        if not self.forward:
            return (
                "no schedule: no step was taken yet, or no unit is gathered (at stage 3 only; params of fewer elements "
                "than Tuning(keep_below=...) stay whole)"
            )
        return "\n".join(_table(self))

    def most_bytes(self, nbytes: Mapping[str, int]) -> int:
        """Returns the most bytes that are gathered at once."""
        return _most((*self.forward, *self.backward), nbytes)[1]


def plan_schedule(
    forward: Sequence[str], backward: Sequence[str], nbytes: Mapping[str, int], budget: Budget
) -> Schedule:
    """Returns the schedule for these orders of uses; ``nbytes`` has the bytes of each unit."""
    said = [unit for unit in dict.fromkeys(backward) if unit in forward and budget.keeps(unit)]
    kept = tuple(dict.fromkeys((*said, *_kept(forward, backward, nbytes, budget))))
    return Schedule(
        _uses(forward, (), kept, nbytes, budget),
        _uses(backward, kept, (), nbytes, budget),
        kept,
    )


def in_sequence(schedules: Sequence[Schedule]) -> Schedule:
    """Returns one schedule of several modules that are called one after the other."""
    return Schedule(
        tuple(use for each in schedules for use in each.forward),
        tuple(use for each in reversed(schedules) for use in each.backward),
        tuple(unit for each in schedules for unit in each.kept),
    )


def assumed_orders(units: Iterable[tuple[str, bool]]) -> tuple[list[str], list[str]]:
    """Returns the order of uses in a forward and a backward before any was seen.

    A module that owns params and calls others uses its unit before and after theirs.

    Args:
        units: by the names of modules in the order of the model, True for those that modules use early and late.
    """
    named, forward, around = dict(units), list[str](), list[str]()
    parts = [name.split(".") for name in named if name]
    holders = {".".join(each[:length]) for each in parts for length in range(len(each))}  # "", the model, among them
    for name in named:
        while around and not _is_within(name, around[-1]):
            forward.append(around.pop())
        forward.append(name)
        if name in holders:
            around.append(name)
    spread = [name for name, is_spread in named.items() if is_spread and name not in holders]
    ends = [*reversed(around), *spread]
    forward += sorted(ends, key=lambda name: name == forward[0])  # what begins the model ends it
    return forward, forward[::-1]


def _is_within(unit: str, other: str) -> bool:
    return unit != other and (not other or unit.startswith(f"{other}."))


def _kept(
    forward: Sequence[str], backward: Sequence[str], nbytes: Mapping[str, int], budget: Budget
) -> tuple[str, ...]:
    """Returns the units that backward uses first, as many as the budget allows until the forward ends."""
    kept: list[str] = []
    total = 0
    for unit in dict.fromkeys(backward):
        total += nbytes[unit]
        if unit not in forward or not budget.allows(len(kept) + 1, total):
            break
        kept.append(unit)
    silent = Budget(budget.nbytes, budget.units, looks_ahead=False)
    least = _most(_uses(forward, (), (), nbytes, silent), nbytes)
    while kept:  # rarely more than once: backward runs the other way round
        units, most = _most(_uses(forward, (), kept, nbytes, silent), nbytes)
        if budget.allows(units, most) or (units, most) == least:
            break
        kept.pop()
    return tuple(kept)


def _most(uses: Sequence[Use], nbytes: Mapping[str, int]) -> tuple[int, int]:
    """Returns the most units, and the most bytes, that are gathered at once."""
    return (
        max((len(use.here) for use in uses), default=0),
        max((sum(nbytes[each] for each in use.here) for use in uses), default=0),
    )


def _uses(
    order: Sequence[str], before: Sequence[str], after: Sequence[str], nbytes: Mapping[str, int], budget: Budget
) -> tuple[Use, ...]:
    """Returns the uses of one pass.

    Args:
        before: units that are gathered when the pass begins.
        after: units that stay gathered when it ends.
    """
    order = [unit for at, unit in enumerate(order) if not at or order[at - 1] != unit]
    last = {unit: at for at, unit in enumerate(order)}
    here, stays, following, uses = dict.fromkeys(before), frozenset(after), 0, list[Use]()
    for at, unit in enumerate(order):
        here = {each: None for each in here if last.get(each, -1) >= at or each in stays}
        here[unit] = None
        held, total = tuple(each for each in here if each != unit), sum(nbytes[each] for each in here)
        ahead: list[str] = []
        if budget.looks_ahead and budget.lists is not None:
            listed = budget.lists.get(unit, ())
            ahead = [each for each in dict.fromkeys(listed) if last.get(each, -1) > at and each not in here]
            here |= dict.fromkeys(ahead)
        while budget.looks_ahead and budget.lists is None and following < len(order):
            candidate = order[following]
            if candidate not in here:
                total += nbytes[candidate]
                if not budget.allows(len(here) + 1, total):
                    break
                here[candidate] = None
                ahead.append(candidate)
            following += 1
        done = tuple(each for each in here if last.get(each, -1) <= at and each not in stays)
        uses.append(Use(unit, held, tuple(ahead), done))
    return tuple(uses)


def _table(schedule: Schedule) -> Iterator[str]:
    rows = [("use of", "held meanwhile", "gathered ahead", "resharded after it")]
    for title, uses in (("forward", schedule.forward), ("backward", schedule.backward)):
        rows.append((f"{title}:", "", "", ""))
        for use in uses:
            rows.append((f"  {_listed([use.unit])}", _listed(use.held), _listed(use.ahead), _listed(use.reshard)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        yield "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    yield f"kept from forward to backward: {_listed(schedule.kept)}"


def _listed(units: Sequence[str]) -> str:
    return ", ".join(unit or "(model)" for unit in units) or "-"
