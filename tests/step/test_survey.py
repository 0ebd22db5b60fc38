"""The phases before the update: a survey changes nothing, masters follow before it, and sums are divided after it."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardopt import OffloadError, ShardedAdamW
from shardopt.domain.domain import Domain
from shardopt.domain.hyperparameters import plain_numbers
from shardopt.domain.shard import Shard
from shardopt.step.survey import measure, survey
from tests.support.ranks import Pool
from tests.support.training import Net, loss_of, raises, raw, train_step


def trained(steps: int = 2, **options: Any) -> tuple[Net, ShardedAdamW]:
    model = Net().bfloat16()
    optimizer = ShardedAdamW(model, lr=1e-2, **options)
    for step in range(steps):
        train_step(model, optimizer, step)
    optimizer.zero_grad()
    loss_of(model, steps).backward()
    return model, optimizer


def everything(domain: Domain) -> dict[str, Any]:
    """All that a step depends on."""
    held: dict[str, Any] = {}
    for number, shard in enumerate(domain.shards):
        streams = {name: shard.whole(name) for name in ("master", *shard.states)}
        streams["param"] = shard.params(0, shard.numel)
        held |= {f"{name} of shard {number}": raw(stream) for name, stream in streams.items()}
    for entry in domain.entries.values():
        own = entry.gradient_slice
        assert own is not None
        gradient = (raw(own.total), own.divisor, own.norms, own.is_used, list(own.edits))
        held[entry.name] = (gradient, entry.version, entry.step, entry.has_state, entry.begins_average)
    return held


def surveyed(stage: int) -> list[tuple[bool, int, int]]:
    found = []
    model, optimizer = trained(stage=stage, max_grad_norm=1.0, ema=0.9)
    (domain,) = optimizer.engine.domains
    for is_edited in (False, True):
        with torch.no_grad():
            if is_edited:  # the norms of this gradient are unknown from now on, so that the survey reads all of them
                model.out.weight.grad.local.add_(1.0)
            model.norm.weight.mul_(1.5)  # its master does not follow before the next step
        before = everything(domain)
        groups = optimizer.param_groups
        plan = survey(optimizer.engine.plans, domain, domain.listed(groups), [plain_numbers(group) for group in groups])
        measure(plan, scale=1.0, overflow=False, is_part=False)
        found.append((everything(domain) == before, len(plan.written), len({each.divisor for each in plan.launches})))
    optimizer.step()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_survey_changes_no_param_master_state_or_sum(stage: int, ranks: Pool) -> None:
    """Three ranks: a kernel cannot fold a division by three, so that sums have to be divided, but in the update."""
    for found in ranks.run(surveyed, stage, world=3):
        assert found[0] == (True, 1, 1)
        assert found[1][:2] == (True, 1)


def masters_fail() -> list[bool]:
    model, optimizer = trained(master="split")
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    (domain,) = optimizer.engine.domains
    before = everything(domain)

    def fail(*_: Any) -> None:
        raise OffloadError("no room for a master")

    refresh = fail if dist.get_rank() == 1 else Shard.drop_low_bits
    with patch.object(Shard, "drop_low_bits", refresh), raises(OffloadError, "no room for a master"):
        optimizer.step()
    own = {name for name, value in everything(domain).items() if value != before[name]}
    optimizer.step()
    return [dist.get_rank() == 0 or not own, all("master" in name for name in own)]


def test_masters_that_cannot_follow_on_one_rank_are_an_error_on_all(ranks: Pool) -> None:
    assert ranks.run(masters_fail, world=2) == [[True, True]] * 2


def one_is_a_mean() -> bool:
    """One gradient is divided when it is scaled, all others in the update: by the kernel, or before it."""
    ends = []
    for is_scaled in (False, True):
        model, optimizer = trained(max_grad_norm=0.5)
        if is_scaled:
            model.hidden.weight.grad.mul_(1.0)
        optimizer.step()
        ends.append([raw(param.detach()) for param in model.parameters()])
    return ends[0] == ends[1]


@pytest.mark.parametrize("world", [2, 3])
def test_sums_and_means_meet_in_one_step(world: int, ranks: Pool) -> None:
    assert all(ranks.run(one_is_a_mean, world=world))
