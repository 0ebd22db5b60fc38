"""Makes states before the first step, for loaders that fill existing states: torch's distributed checkpoint."""

import torch

from ..errors import StateError
from ..optim.optimizer import ShardedOptimizer


@torch.no_grad()
def prepare_states(optimizer: ShardedOptimizer) -> None:
    """Collective: gives every param without a state the state that precedes a first step.

    ``torch.distributed.checkpoint.load({"optim": optimizer}, ...)`` fills existing states. A new optimizer has none, so
    it would load nothing, without an error: call this first. It binds the params, as the first step does: move, cast
    and wrap the model before. (:func:`load_checkpoint` needs no such call.)

    Raises:
        StateError: the rule carries scalars from step to step (NAdam, ASGD), which only a step can compute.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(f"prepare_states() takes one of shardopt's optimizers, found {type(optimizer).__name__}.")
    rule = optimizer.rule
    if rule.carried:
        raise StateError(
            f"take a step, then load: {rule.name} carries {list(rule.carried)} from step to step, and only a step "
            "computes their first values."
        )
    with optimizer.engine.turn.take_together("prepare_states()"):
        _prepare(optimizer)


def _prepare(optimizer: ShardedOptimizer) -> None:
    rule = optimizer.rule
    optimizer.engine.ensure_bound()
    for group in optimizer.engine.local_groups():
        for param in group["params"]:
            domain = optimizer.engine.states.domain_of(param)
            entry = None if domain is None else domain.entries.get(param)
            if entry is not None and not entry.has_state:
                variant = rule.variant(group, entry.shape)
                entry.shard.ensure_states(variant.states)
                entry.margins = {name: torch.zeros(rule.state_shape(name, entry.shape)) for name in variant.margins}
                entry.has_state = True
    optimizer.engine.states.consolidated = None
