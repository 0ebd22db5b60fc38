"""Replayed steps, each compared with the step that would be planned anew."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from shardopt.domain.domain import Domain
from shardopt.domain.param import Group
from shardopt.step.launches import Launch, StepPlan
from shardopt.step.param_update import ParamUpdate
from shardopt.step.survey import StepPlanner, _frozen_step, _with_gradients, states_of_shards, written_params

_REPLAY = StepPlanner.replay


def compared(is_on: bool = True) -> AbstractContextManager[Any]:
    """A context in which each replay is compared, or none within one in which they are."""
    return patch.object(StepPlanner, "replay", _compared if is_on else _REPLAY)


def _compared(self: StepPlanner, groups: Sequence[Group], numbers: Sequence[dict[str, Any]], *others: Any) -> Any:
    plan = _REPLAY(self, groups, numbers, *others)
    if plan is not None:
        _compare(plan.domain, plan, groups, numbers)
    return plan


def _compare(domain: Domain, plan: StepPlan, groups: Sequence[Group], numbers: Sequence[dict[str, Any]]) -> None:
    listed = domain.listed(groups)
    histories = [entry.history for entry in domain.entries.values()]
    updates, states = list(_with_gradients(domain, listed)), states_of_shards(domain, listed, numbers)
    anew = _frozen_step(domain, listed, numbers, updates, states).plan(numbers, updates)
    for entry, history in zip(domain.entries.values(), histories, strict=True):
        entry.history = history
    assert not written_params(domain) and anew.states == plan.states and anew.facts == plan.facts
    assert list(map(_told, anew.updates)) == list(map(_told, plan.updates))
    assert list(map(_told_of_launch, anew.launches)) == list(map(_told_of_launch, plan.launches))
    carried = [[(each.step, each.carried, after.carried) for each, after in its.advances] for its in (anew, plan)]
    assert carried[0] == carried[1]


def _told(update: ParamUpdate) -> tuple[Any, ...]:
    return (*update[:3], update.grad.data_ptr(), *update[4:])


def _told_of_launch(launch: Launch) -> tuple[Any, ...]:
    rows, noise = launch.gradients.rows.tolist(), None if launch.noise is None else launch.noise.tolist()
    told = [(row, *_told(each)) for row, each in launch.updates.items()]
    return launch.shard, launch.spec, launch.divisor, launch.is_on_host, rows, launch.scalars.tolist(), noise, told
