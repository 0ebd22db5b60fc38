"""Surgery: the params that a module has now are bound in place of those that it had, with their states by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import agreed
from ..domain.relocate import move_states
from ..domain.unsharded import check_not_unsharded
from ..errors import ShardoptError
from ..module.surgery import names_of
from ..step.step import check_unbroken

if TYPE_CHECKING:
    from ..engine import Engine
    from ..module.takeover import ModuleTakeover


@torch.no_grad()
def rebind(engine: Engine) -> None:
    """Collective: see :meth:`ShardedOptimizer.rebind`."""
    with engine.turn.take_together("rebind()"):
        _rebind(engine)


def _rebind(engine: Engine) -> None:
    view: dict[str, Any] = {}
    with agreed(view, engine.ranks()):
        takeover = _rebindable(engine)
        plan = takeover.coverage.plan_rebinding()
        names = names_of(takeover.module)
        view["rebind()"] = [
            {names[param]: [list(param.shape), param in plan.kept] for param in params} for params in plan.groups
        ]
        states = plan.states(engine.states.all(engine.groups))
    away, engine.away = engine.away, None
    takeover.unbind()
    for domain in engine.domains:
        domain.release()
    if takeover.casts is not None:
        takeover.casts.undo()
    engine.retire_domains()
    engine.planners.clear()
    engine.local_params.update_dtensors()
    engine.unbind()
    engine.release = None
    engine.states.start_anew({engine.local_params.of(param): state for param, state in states.items()})
    for group, params in zip(engine.groups, plan.groups, strict=True):
        group["params"] = params
    engine.bind_module()
    if away is not None and move_states(engine.domains, away):
        engine.away = away


def _rebindable(engine: Engine) -> ModuleTakeover:
    """Returns the takeover of a module that can be bound anew. Raises ShardoptError if it cannot."""
    engine.check_open()
    if engine.takeover is None:
        raise ShardoptError(
            "replace params in param_groups (group['params'][i] = new, and del optimizer.state[old]): rebind() "
            "looks for them in the module, and none was handed over."
        )
    engine.check_weights("rebind()")
    check_not_unsharded(engine.domains, "rebind()")
    if len(engine.domains) > 1:
        raise ShardoptError(
            "construct a new optimizer, and load the state dict of this one: rebind() is not there for models with "
            "experts, whose param groups have their own process_group."
        )
    for domain in engine.domains:
        check_unbroken(domain)
    engine.finish_gathers()
    engine.settle_states()
    return engine.takeover
