"""Promise: a backward ends with one all-reduce, and a step begins with one exchange of at most 256 bytes; on one rank
nothing is exchanged. What else ranks wait for is the gather of what was updated, which carries one number. Over a
backend's collectives (NCCL's) a round makes as many calls with many ranks as with two.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shardopt import ShardedAdamW, Tuning
from shardopt.partition.comm.group import Ranks
from tests.step.test_host_calls import calls
from tests.support.ranks import Pool
from tests.support.wire import Calls

MOST, FLAG = 256, 8  # bytes
MOST_CALLS = {2: 870, 3: 1585}  # of functions, by stage, in a step of three linears and two ranks
Told = list[tuple[str, int]]  # "exchange" or "all-reduce", and the bytes of this rank's row
Found = dict[tuple[int, bool], tuple[Told, Told, dict[str, int]]]  # of a backward, of a step, and torch's calls in both


def told_of_a_step() -> Found:
    """Of a third step, by stage and whether ranks read each other's memory, with clipping and a new learning rate."""
    found: Found = {}
    exchange, all_reduce = Ranks.exchange, Ranks.all_reduce
    for stage, neighbours in [(stage, neighbours) for stage in (1, 2, 3) for neighbours in (True, False)]:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        opt = ShardedAdamW(model, lr=0.1, stage=stage, tuning=Tuning(keep_below=0, neighbours=neighbours))
        told: Told = []

        def exchanged(ranks: Ranks, row: Sequence[int], phase: str, told: Told = told) -> Any:
            told.append(("exchange", 8 * len(row)))
            return exchange(ranks, row, phase)

        def reduced(ranks: Ranks, vector: torch.Tensor, phase: str, told: Told = told) -> None:
            told.append(("all-reduce", vector.nbytes))
            all_reduce(ranks, vector, phase)

        for step in range(3):
            loss = model(torch.ones(2, 16)).sum()
            told.clear()
            with (
                patch.object(Ranks, "exchange", exchanged),
                patch.object(Ranks, "all_reduce", reduced),
                Calls() as calls,
            ):
                loss.backward()
                in_backward = list(told)
                told.clear()
                clip_grad_norm_(model.parameters(), 0.1)
                opt.param_groups[0]["lr"] = 0.1 / (step + 1)
                opt.step()
            opt.zero_grad()
        found[stage, neighbours] = in_backward, list(told), dict(calls.found)
        opt.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_exchanges_of_a_step(world: int, ranks: Pool) -> None:
    for setting, (in_backward, in_step, of_groups) in ranks.run(told_of_a_step, world=world)[0].items():
        if world == 1:
            assert not of_groups, setting
            continue
        assert [kind for kind, _ in in_backward] == ["all-reduce"], setting
        (kind, nbytes), *waits = in_step
        assert kind == "exchange" and FLAG < nbytes <= MOST, setting
        stage, _ = setting  # at stage 3 no rank reads what was updated before it needs it
        assert len(waits) <= (1 if stage == 3 else 2) and set(waits) <= {("exchange", FLAG)}, setting


def calls_over_a_backend(stage: int) -> tuple[dict[str, int], int]:
    """Of torch's groups, and of all functions, in a fourth step, in which gloo's collectives are the device's."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    with patch.object(Ranks, "has_collectives", lambda ranks, _: ranks.size > 1):
        opt = ShardedAdamW(model, lr=0.1, stage=stage, tuning=Tuning(keep_below=0, neighbours=False))

        def step() -> None:
            model(torch.ones(2, 16)).sum().backward()
            opt.step()
            opt.zero_grad()

        step()
        step()
        with Calls() as of_groups:
            step()
        of_all = calls(step)
        opt.close()
    return dict(of_groups.found), of_all


@pytest.mark.parametrize("stage", [2, 3])
def test_calls_do_not_grow_with_the_ranks(stage: int, ranks: Pool) -> None:
    # By a power of two gradients are divided without rounding, as they are used.
    two, four = (ranks.run(calls_over_a_backend, stage, world=world)[0] for world in (2, 4))
    assert two == four and not {"send", "recv_"} & two[0].keys(), (two, four)
    assert two[1] <= MOST_CALLS[stage], two
    assert two[0]["alltoall_base_"] == 1, two  # the roll call
