"""What a script asks of gradients between backward and a step: a reduction, statistics, tied sums, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..arguments import flag, whole
from ..config import check_norm_group
from ..errors import ShardoptError
from ..module.gradient_statistics import statistics_of
from ..module.gradients_at_once import reduce_together
from ..module.gradients_at_once import sum_tied as sum_over
from ..partition.comm.group import Ranks
from ..partition.mesh import everyone_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..engine import Engine


@torch.no_grad()
def reduce_gradients(engine: Engine) -> None:
    """Collective: see :meth:`ShardedOptimizer.reduce_gradients`."""
    with engine.turn.take_together("reduce_gradients()"):
        _reduce_gradients(engine)


def _reduce_gradients(engine: Engine) -> None:
    engine.check_open()
    if engine.takeover is None:
        raise ShardoptError(
            "hand the module over (as first argument or module=), or average gradients over process_group "
            "yourself: reduce_gradients() reduces what backwards under no_sync() accumulated, and without the "
            "module shardopt reduces no gradients."
        )
    if engine.options.reduces_always:
        return  # every backward has reduced them
    engine.bind_module()
    reduce_together(engine.ensure_domains().main, engine.takeover.rounds)


@torch.no_grad()
def gradient_statistics(engine: Engine, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Collective: see :meth:`ShardedOptimizer.gradient_statistics`."""
    with engine.turn.take_together("gradient_statistics()"):
        engine.check_open()
        if engine.takeover is None or engine.options.release_gradients:
            raise ShardoptError(
                "ask param.grad itself, or hand the module over without release_gradients: gradient_statistics() "
                "is of gradients that shardopt reduces and keeps. Here each rank holds whole ones, or none is kept."
            )
        engine.bind_module()
        found: dict[str, dict[str, float]] = {}
        if engine.takeover.rounds is not None:
            *experts, main = engine.takeover.rounds.parts
            for part in (main, *experts):
                found |= statistics_of(part, engine.takeover.rounds, names)
        return found


@torch.no_grad()
def sum_tied(engine: Engine, param: torch.nn.Parameter, group: dist.ProcessGroup | DeviceMesh) -> None:
    """Collective: see :meth:`ShardedOptimizer.sum_tied`."""
    with engine.turn.take_together("sum_tied()"):
        _sum_tied(engine, param, group)


def _sum_tied(engine: Engine, param: torch.nn.Parameter, group: dist.ProcessGroup | DeviceMesh) -> None:
    engine.check_open()
    if not isinstance(param, torch.nn.Parameter):
        raise TypeError(f"sum_tied(param=) takes a param, an nn.Parameter, found {type(param).__name__}.")
    check_norm_group(group, "sum_tied(group=)")
    if not any(param is each for each in engine.params):
        raise ShardoptError(
            "give the copy that this rank trains: sum_tied() was given a param that no param group of this "
            "optimizer has, so no gradient would be summed."
        )
    ranks = Ranks(everyone_of(group), engine.options.tuning.deadline)
    if ranks.rank and engine.options.norm_group is not None:  # only the first rank counts it in the model's norm
        local = engine.local_params.of(param)
        (engine.ensure_domains().domain_of(local) or engine.ensure_domains().main).note_slice(local, False, None)
    sum_over(param, ranks)


def gradient_weight(engine: Engine, tokens: object, average: object) -> None:
    """See :meth:`ShardedOptimizer.gradient_weight`."""
    count, is_mean = whole(tokens, "gradient_weight(tokens=)", least=0), flag(average, "gradient_weight(average=)")
    with engine.turn.take_between("gradient_weight()"):
        engine.check_open()
        if engine.takeover is None or engine.options.release_gradients:
            raise ShardoptError(
                "hand the module over (ShardedAdamW(model, stage=2)), without release_gradients=True: "
                "gradient_weight() weighs gradients that backward adds up, and here they are averaged by DDP, or "
                "used up bucket by bucket before all ranks' tokens are known."
            )
        engine.ensure_domains()
        rounds = engine.takeover.rounds
        assert rounds is not None
        has_experts = any(group.get("process_group") is not None for group in engine.groups)
        is_shared = has_experts and engine.takeover.coverage.is_shared
        if rounds.main.has_stages or engine.takeover.coverage.averaged or is_shared:
            raise ShardoptError(
                "weigh the loss yourself: gradient_weight() weighs the gradients of one backward with the tokens "
                "of one rank, and here schedules of pipeline stages run backwards, or another optimizer trains some "
                "params of a model with experts, or of any model without shardopt."
            )
        halves = [entry.name for entry in rounds.entries if entry.shard.bucket.dtype is torch.float16]
        if halves:
            raise ShardoptError(
                f"keep params in fp32 or bf16: the gradient of {halves[0]} is fp16, in which a product with the "
                "number of tokens overflows."
            )
        rounds.weights.begin(rounds.entries, has_experts=len(rounds.parts) > 1)
        rounds.weights.give(count, is_mean)
