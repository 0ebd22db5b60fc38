"""The code broken on purpose: what a parity test must notice, or it is not a parity test.

Each cheat is a context in which the real code does one thing wrong. The oracle and the torch class are not touched.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardopt import ShardedOptimizer
from shardopt.kernels import native_backend
from shardopt.kernels.tables import Tables
from shardopt.optim.like import recipe
from shardopt.partition.comm import reduce_scatter as scatter
from shardopt.partition.comm import reduce_scatter_peer as neighbour_scatter
from shardopt.partition.comm.all_gather import AllGather
from shardopt.partition.comm.transport import Transport
from shardopt.partition.gradient_buckets import DeviceSum
from shardopt.partition.reducer import Reducer
from shardopt.step import step as step_module
from shardopt.step.launches import Launch
from shardopt.step.params import AlikeParams
from tests.support.cases import Case, Keywords

SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"}
STEP = native_backend.run
NUMBERS = step_module.plain_numbers
EVALUATE = AlikeParams.evaluate
SUM_INTO = scatter.sum_into
DELIVER = Reducer.deliver
JOB = DeviceSum.reduction
NO_SYNC = ShardedOptimizer.no_sync


def does_nothing(*_: Any) -> None:
    pass


def summed(spec: Any, number: int, streams: Any, tables: Tables) -> None:
    """Gradients summed over two ranks where the mean is meant."""
    factors = tables.factors._replace(unscale=tables.factors.unscale * 2)
    STEP(spec, number, streams, tables._replace(factors=factors))


def last_rank_idle(*arguments: Any) -> None:
    if dist.get_rank() != dist.get_world_size() - 1:
        STEP(*arguments)


def nothing_gathered(*_: Any) -> AllGather:
    """A rank's updated params never reach the others."""
    return AllGather(lambda window: lambda: None)


def zeroes_second_moment(spec: Any, number: int, streams: Any, tables: Tables) -> None:
    STEP(spec, number, streams, tables)
    for name, state in zip(spec.names, streams.states, strict=True):
        if name in SECOND_MOMENTS:
            state.zero_()


def twice_the_learning_rate(group: Any) -> dict[str, Any]:
    numbers = NUMBERS(group)
    return {**numbers, "lr": 2 * numbers["lr"]}


def slightly_larger_learning_rate(group: Any) -> dict[str, Any]:
    numbers = NUMBERS(group)
    return {**numbers, "lr": 1.0001 * numbers["lr"]}


def decay_dropped(group: Any) -> dict[str, Any]:
    return {**NUMBERS(group), "weight_decay": 0.0}


def counts_one_too_many(alike: AlikeParams, numbers: Any) -> None:
    for history in alike.histories:
        history.step += 1
    EVALUATE(alike, numbers)
    for history in alike.histories:
        history.step -= 1


# -- where shardopt reduces the gradients ------------------------------------------------------------------------------


def not_divided(launch: Launch) -> Launch:
    """The sum of gradients is taken for their mean."""
    return replace(launch, divisor=1)


def last_rank_is_alone(target: Any, terms: Any, add: bool) -> None:
    """The slice of the last rank holds that one's own gradients; the right order of magnitude."""
    if dist.get_rank() == dist.get_world_size() - 1:
        terms = iter([[term.clone() for term in terms][dist.get_rank()] * dist.get_world_size()])
    SUM_INTO(target, terms, add)


def later_backwards_dropped(target: Any, terms: Any, add: bool) -> None:
    if not add:
        SUM_INTO(target, terms, add)


def earlier_backwards_overwritten(target: Any, terms: Any, add: bool) -> None:
    SUM_INTO(target, terms, False)


def last_rank_leaves_later_ones_out(self: Reducer, number: int, grads: Any, strides: Any) -> None:
    """Its second and later micro-batches never reach the sum."""
    if dist.get_rank() == dist.get_world_size() - 1 and self._filling[number].held:
        grads = {index: torch.zeros_like(grad) for index, grad in grads.items()}
    DELIVER(self, number, grads, strides)


@contextmanager
def forgetful_no_sync(self: ShardedOptimizer) -> Iterator[None]:
    with NO_SYNC(self):
        yield
    for group in self.param_groups:
        for param in group["params"]:
            param.grad = None


class SummingBy:
    """Another sum in place of ours, whichever way gradients travel."""

    def __init__(self, cheat: Any):
        self._patches = [patch.object(each, "sum_into", cheat) for each in (scatter, neighbour_scatter)]

    def __enter__(self) -> None:
        for each in self._patches:
            each.start()

    def __exit__(self, *_: Any) -> None:
        for each in self._patches:
            each.stop()


_PREVIOUS: dict[torch.dtype, Any] = {}


def adds_another_bucket(self: DeviceSum, buffer: Any, add: bool) -> Any:
    """On the first rank, a buffer still holds what was in the last one."""
    previous = _PREVIOUS.get(buffer.dtype)
    _PREVIOUS[buffer.dtype] = buffer.clone()
    if previous is not None and dist.get_rank() == 0:
        numel = min(buffer.numel(), previous.numel())
        buffer[:numel] += previous[:numel].nan_to_num()  # what pads a param may be anything
    return JOB(self, buffer, add)


CHEATS: dict[str, Any] = {
    "a step that does nothing": patch.object(native_backend, "run", does_nothing),
    "twice the learning rate": patch.object(step_module, "plain_numbers", twice_the_learning_rate),
    "learning rate off by 1e-4": patch.object(step_module, "plain_numbers", slightly_larger_learning_rate),
    "gradients summed": patch.object(native_backend, "run", summed),
    "one shard not updated": patch.object(native_backend, "run", last_rank_idle),
    "gather dropped": patch.object(Transport, "all_gather", nothing_gathered),
    "second moment zeroed": patch.object(native_backend, "run", zeroes_second_moment),
    "decay dropped": patch.object(step_module, "plain_numbers", decay_dropped),
    "step off by one": patch.object(AlikeParams, "evaluate", counts_one_too_many),
}

# These need the module handed over, several backwards before a step, and two ranks or more.
REDUCING_CHEATS: dict[str, Any] = {
    "gradients not divided": patch.object(Launch, "divided", not_divided),
    "one shard's gradient not reduced": SummingBy(last_rank_is_alone),
    "later backwards dropped": SummingBy(later_backwards_dropped),
    "earlier backwards overwritten": SummingBy(earlier_backwards_overwritten),
    "later backwards dropped on one rank": patch.object(Reducer, "deliver", last_rank_leaves_later_ones_out),
    "no_sync() forgets": patch.object(ShardedOptimizer, "no_sync", forgetful_no_sync),
    "another bucket added": patch.object(DeviceSum, "reduction", adds_another_bucket),
}


@contextmanager
def cheating(cheat: str | None) -> Iterator[None]:
    """A context in which the step is wrong in the named way; None: right."""
    context: AbstractContextManager[Any] = nullcontext() if cheat is None else (CHEATS | REDUCING_CHEATS)[cheat]
    _PREVIOUS.clear()
    with context:
        yield


def shows(cheat: str, case: Case, keywords: Keywords) -> bool:
    """Whether this optimizer has what the cheat takes away."""
    if cheat == "second moment zeroed":
        return bool(SECOND_MOMENTS & set(case.states))
    if cheat == "decay dropped":
        return bool(keywords.get("weight_decay", case.name == "AdamW"))
    if cheat == "step off by one":
        return case.shows_step(keywords)
    if cheat == "learning rate off by 1e-4":  # of a small one the difference is below the rounding of the param
        return max(recipe(case.ours)[1]["lr"], keywords.get("lr", 0)) >= 1e-3
    return True
