"""Promise: on a GPU a step makes as many kernels, blocking copies and waits of the host as this table says, no more.

The numbers are those of today, counted on a stand-in of CUDA (``tests/support/streams``): the package's own, not the
model's. One that grows fails its test. One that shrinks fails it too: write the smaller number down.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardopt import ShardedAdamW, ShardedOptimizer, Tuning
from tests.support.streams import Machine
from tests.support.streams.counts import BLOCKING_COPIES, COLLECTIVES, HOST_WAITS, KERNELS
from tests.support.training import one_thread

WIDTH = 48  # a weight is a bucket
FEW, MANY = 4, 12  # buckets


class Cost(NamedTuple):
    """Of a phase: so many for each bucket, and so many once."""

    kernels: tuple[int, int] = (0, 0)
    blocking_copies: tuple[int, int] = (0, 0)
    host_waits: tuple[int, int] = (0, 0)
    collectives: tuple[int, int] = (0, 0)


_KINDS = (KERNELS, BLOCKING_COPIES, HOST_WAITS, COLLECTIVES)

# At most 2 small kernels a bucket and step, statistics included; one wait at the end of backward, a blocking copy being
# a wait as well, and none in the step; one launch for all shards of one spec.
_REDUCE = Cost(kernels=(2, 3), host_waits=(0, 1), collectives=(1, 1))
_STEP = Cost(kernels=(0, 1))
_GATHERING = _STEP._replace(collectives=(1, 0))
_BY_HAND = Cost(kernels=(0, 7), blocking_copies=(0, 1))

BUDGETS: dict[str, dict[str, Cost]] = {
    "stage 0": {"backward": _REDUCE._replace(collectives=(2, 1)), "step": _STEP},
    "stage 1": {"backward": _REDUCE, "step": _GATHERING},
    "stage 2": {"backward": _REDUCE, "step": _GATHERING},
    "stage 3": {
        "forward": Cost(kernels=(1, 0), collectives=(1, 0)),
        # All units but the two that stay from forward are gathered again.
        "backward": _REDUCE._replace(kernels=(3, 1), collectives=(2, -1)),
        "step": _STEP,
    },
    # The gradient is in hand only in the step.
    "stage 0, params only": {"step": _BY_HAND},
    "stage 1, params only": {"step": _BY_HAND._replace(collectives=(1, 0))},
    "stage 2, clipped by torch": {
        "backward": _REDUCE,
        "clip_grad_norm_": Cost(kernels=(0, 2), host_waits=(0, 1)),  # reached: one wait
        "step": _GATHERING,
    },
    "stage 2, max_grad_norm": {"backward": _REDUCE, "step": _GATHERING},
    "stage 1, release_gradients": {
        # No wait in mid-backward, where the device would run dry.
        "backward": Cost(kernels=(8, 4), host_waits=(0, 1), collectives=(2, 1)),
        "step": Cost(),
    },
}
BUDGETS["stage 1, release_gradients, offloaded"] = BUDGETS["stage 1, release_gradients"]
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1, release_gradients, offloaded": {"release_gradients": True, "offload": "cpu"},
    "stage 2, max_grad_norm": {"max_grad_norm": 1e-3},
    "stage 1, release_gradients": {"release_gradients": True},
}


class Iteration:
    """One of training, phase by phase."""

    def __init__(self, machine: Machine, name: str, buckets: int):
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(buckets))
        self.machine, self.model = machine, machine.move(nn.Sequential(*layers).bfloat16())
        self.clips = "clipped" in name
        self.optimizer: ShardedOptimizer = ShardedAdamW(
            self.model.parameters() if "params only" in name else self.model,
            lr=1e-3,
            stage=int(name.removeprefix("stage ")[0]),
            process_group=machine.group,
            tuning=Tuning(bucket_bytes=5000, keep_below=1000, live_bytes=20_000),
            **OPTIONS.get(name, {}),
        )

    def run(self) -> None:
        x = self.machine.tensor(torch.ones(4, WIDTH).bfloat16())
        with self.machine.during("forward"):
            loss = self.model(x).float().square().mean()
        with self.machine.during("backward"):
            loss.backward()
        if self.clips:
            with self.machine.during("clip_grad_norm_"):
                nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        with self.machine.during("step"):
            self.optimizer.step()
        self.optimizer.zero_grad()


def third_iteration(name: str, buckets: int) -> Machine:
    """The first two bind params, make states and learn the order of buckets."""
    with Machine(world=8) as machine:
        iteration = Iteration(machine, name, buckets)
        iteration.run()
        iteration.run()
        machine.counts.forget()
        iteration.run()
        iteration.optimizer.close()
    return machine


def costs(name: str) -> dict[str, Cost]:
    few, many = (third_iteration(name, buckets).counts.by_phase for buckets in (FEW, MANY))

    def cost(phase: str, kind: str) -> tuple[int, int]:
        low, high = few.get(phase, {}).get(kind, 0), many.get(phase, {}).get(kind, 0)
        each, rest = divmod(high - low, MANY - FEW)
        assert rest == 0, f"{kind} of {phase}: {low} for {FEW} buckets, {high} for {MANY}"
        return each, low - each * FEW

    return {phase: Cost(*(cost(phase, kind) for kind in _KINDS)) for phase in {*few, *many, *BUDGETS[name]}}


@pytest.mark.parametrize("name", BUDGETS)
@one_thread()
def test_costs_of_today(name: str) -> None:
    assert {phase: cost for phase, cost in costs(name).items() if cost != Cost() or phase in BUDGETS[name]} == BUDGETS[
        name
    ]


# What the first kernel of the next forward waits for; the goal is one of them, its own.
@pytest.mark.parametrize("stage", (1, 2))
@one_thread()
def test_the_next_forward_waits_for_all_gathers(stage: int) -> None:
    with Machine(world=8) as machine:
        iteration = Iteration(machine, f"stage {stage}", FEW)
        iteration.run()
        before = machine.collectives_begun
        iteration.run()
        begun = machine.collectives_begun - before
        assert begun == FEW + FEW + 1  # reductions, gathers and norms: agreements travel beside the device
        assert machine.collectives_waited_for - before == begun
        iteration.optimizer.close()


# -- a new wait is seen ------------------------------------------------------------------------------------------------


def waits_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """``.item()`` in the update."""
    from shardopt.step import update

    streams: Callable[..., Any] = update._streams
    source = "def _streams(*arguments):\n    arguments[2].streams[0][0].item()\n    return streams(*arguments)\n"
    names: dict[str, Any] = {"streams": streams}
    exec(compile(source, str(update.__file__), "exec"), names)
    monkeypatch.setattr(update, "_streams", names["_streams"])


@one_thread()
def test_a_new_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_in_step(monkeypatch)
    assert costs("stage 1")["step"] == BUDGETS["stage 1"]["step"]._replace(host_waits=(1, 0))
