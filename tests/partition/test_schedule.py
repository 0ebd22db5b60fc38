"""The schedule of stage 3 is data: within a forward, and within a backward, no unit travels twice.

Whatever the order of uses and the budget. What is gathered ahead or kept stays within the budget."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardopt import ShardedSGD, Tuning
from shardopt.units.schedule import Budget, Schedule, Use, plan_schedule
from shardopt.units.unit import UnitState
from tests.support.tables import rows_of

if TYPE_CHECKING:
    from shardopt.units.gatherer import Gatherer

NAMES = "ABCDEF"
ORDERS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=14)
SIZES = st.fixed_dictionaries({name: st.integers(1, 9) for name in NAMES})
BUDGETS = st.builds(
    Budget,
    nbytes=st.one_of(st.just(float("inf")), st.integers(0, 40)),
    units=st.one_of(st.just(float("inf")), st.integers(0, 5)),
    looks_ahead=st.booleans(),
)


def gathers(uses: Sequence[Use], before: Sequence[str]) -> list[str]:
    """The units that travel in a pass, in their order."""
    here, found = set(before), []
    for use in uses:
        here &= set(use.here)
        for name in (use.unit, *use.ahead):
            if name not in here:
                here.add(name)
                found.append(name)
    return found


@settings(max_examples=400, deadline=None)
@given(ORDERS, ORDERS, SIZES, BUDGETS)
def test_no_unit_travels_twice(forward: list[str], backward: list[str], nbytes: dict[str, int], budget: Budget) -> None:
    schedule = plan_schedule(forward, backward, nbytes, budget)
    for order, uses, before in (
        (forward, schedule.forward, ()),
        (backward, schedule.backward, schedule.kept),
    ):
        used = [use.unit for use in uses]
        assert used == [name for at, name in enumerate(order) if not at or order[at - 1] != name]
        travel = gathers(uses, before)
        assert sorted(travel) == sorted(set(order) - set(before)), "each unit once, unless it was kept"
        for at, use in enumerate(uses):
            assert use.unit in use.here and not set(use.reshard) & set(
                schedule.kept if uses is schedule.forward else ()
            )
            # Used before and again later in the pass: held, whatever the budget.
            between = {name for name in used[:at] if name in used[at + 1 :]} - {use.unit}
            assert between <= set(use.held)
            if not budget.looks_ahead:
                assert not use.ahead
            elif use.ahead:
                assert budget.allows(len(use.here), sum(nbytes[name] for name in use.here))
            following = uses[at + 1].here if at + 1 < len(uses) else (schedule.kept if uses is schedule.forward else ())
            assert set(use.reshard) == set(use.here) - set(following) - ({use.unit} & set(following))
    assert budget.allows(len(schedule.kept), sum(nbytes[name] for name in schedule.kept)) or not schedule.kept
    assert schedule.forward[-1].unit == forward[-1] and set(schedule.kept) <= set(schedule.forward[-1].here)


def test_what_is_gathered() -> None:
    """The picture of the docstring."""
    nbytes = dict.fromkeys("ABCDE", 1)
    schedule = plan_schedule("ABCDE", "EDCBA", nbytes, Budget(3))
    assert ["".join(sorted(use.here)) for use in schedule.forward] == ["ABC", "BCD", "CDE", "CDE", "CDE"]
    assert ["".join(sorted(use.here)) for use in schedule.backward] == ["CDE", "BCD", "ABC", "AB", "A"]
    assert schedule.kept == ("E", "D", "C") and schedule.orders == (tuple("ABCDE"), tuple("EDCBA"))
    nothing = plan_schedule("ABCA", "ACBA", dict.fromkeys("ABC", 1), Budget(0))
    assert [use.here for use in nothing.forward] == [("A",), ("B", "A"), ("C", "A"), ("A",)] and not nothing.kept
    text = str(schedule).splitlines()
    assert text[2].split() == ["A", "-", "B,", "C", "A"] and text[-1] == "kept from forward to backward: E, D, C"
    assert str(Schedule()).startswith("no schedule: no step was taken yet")


# -- the states of a unit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows_of(UnitState), ids=str)
def test_states_of_a_unit(row: tuple[str, str, str]) -> None:
    start, event, end = UnitState[row[0]], row[1], UnitState[row[2]]
    model = nn.Linear(32, 32)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    opt = ShardedSGD(model, lr=0.1, stage=3, tuning=Tuning(keep_below=0))
    opt.bind()
    gatherer: Gatherer = opt.engine.domain.gatherer
    (unit,) = gatherer.units.values()
    events = {"unshard": gatherer.here.start, "wait": gatherer.here.wait, "reshard": gatherer.here.drop}
    for each in {UnitState.SHARDED: (), UnitState.UNSHARDING: ("unshard",), UnitState.UNSHARDED: ("unshard", "wait")}[
        start
    ]:
        events[each](unit)
    assert unit.state is start
    events[event](unit)
    assert unit.state is end
    assert (unit.gathering is not None) == (end is UnitState.UNSHARDING)
    resident = sum(each.bucket.resident_bytes for each in unit.buckets)
    assert resident == (0 if end is UnitState.SHARDED else unit.nbytes) and (unit in gatherer.here.order) == bool(
        resident
    )
    if end is UnitState.UNSHARDED:
        gatherer.need(unit)
        assert torch.equal(model.weight, weight) and torch.equal(model.bias, bias)
    opt.close()
