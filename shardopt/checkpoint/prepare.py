"""States made before the first step, for those who fill what they find: torch's distributed checkpoint."""

import torch

from ..errors import StateError
from ..optim.optimizer import ShardedOptimizer


@torch.no_grad()
def prepare_states(optimizer: ShardedOptimizer) -> None:
    """Collective: gives every param that has no state yet the one from which a first step begins.

    ``torch.distributed.checkpoint.load({"optim": optimizer}, ...)`` fills the states that there are. A new optimizer
    has none, so nothing would be loaded, silently: call this before. Params are bound here, as at the first
    step: move, cast and wrap the model before. (:func:`load_checkpoint` needs no such call.)

    Raises:
        StateError: the rule hands scalars on from step to step (NAdam, ASGD), which only a step can begin.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(f"prepare_states() takes one of shardopt's optimizers, found {type(optimizer).__name__}.")
    rule = optimizer.rule
    if rule.carried:
        raise StateError(
            f"{rule.name} hands on {list(rule.carried)} from step to step, and what they are before the first one "
            "only a step can tell: take one, then load over it."
        )
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
