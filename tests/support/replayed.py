"""Replayed steps, each compared with the step that would be planned anew."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from shardopt.domain.domain import Domain
from shardopt.domain.listed import ListedParams
from shardopt.step import step
from shardopt.step.launches import Launch, StepPlan
from shardopt.step.params import ParamUpdate
from shardopt.step.survey import Plans, _with_gradients, freeze, replay, written_params


def compared(is_on: bool = True) -> AbstractContextManager[Any]:
    """A context in which each replay is compared, or none within one in which they are."""
    return patch.object(step, "replay", _compared if is_on else replay)


def _compared(plans: Plans, domain: Domain, listed: ListedParams, numbers: Sequence[dict[str, Any]]) -> StepPlan | None:
    plan = replay(plans, domain, listed, numbers)
    if plan is not None:
        _compare(domain, plan, listed, numbers)
    return plan


def _compare(domain: Domain, plan: StepPlan, listed: ListedParams, numbers: Sequence[dict[str, Any]]) -> None:
    histories = [entry.history for entry in domain.entries.values()]
    updates = list(_with_gradients(domain, listed))
    anew = freeze({}, domain, listed, numbers, updates).plan(numbers, updates)
    for entry, history in zip(domain.entries.values(), histories, strict=True):
        entry.history = history
    assert not written_params(domain) and anew.states == plan.states and anew.facts == plan.facts
    assert list(map(_told, anew.updates)) == list(map(_told, plan.updates))
    assert list(map(_told_of_launch, anew.launches)) == list(map(_told_of_launch, plan.launches))
    carried = [[(each.step, each.carried, after) for each, (_, after) in its.advances] for its in (anew, plan)]
    assert carried[0] == carried[1]


def _told(update: ParamUpdate) -> tuple[Any, ...]:
    return (*update[:3], update.grad.data_ptr(), *update[4:])


def _told_of_launch(launch: Launch) -> tuple[Any, ...]:
    rows, noise = launch.gradients.rows.tolist(), None if launch.noise is None else launch.noise.tolist()
    told = [(row, *_told(each)) for row, each in launch.updates.items()]
    return launch.shard, launch.spec, launch.divisor, launch.is_on_host, rows, launch.scalars.tolist(), noise, told
