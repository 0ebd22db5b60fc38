"""Surgery: the params that a module has now are bound in place of those that it had, with their states by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.agreement import agreed
from ..domain.relocate import move_states
from ..domain.unsharded import check_not_unsharded
from ..errors import BindingError, ShardoptError
from ..module.coverage import names_of
from ..step.step import check_unbroken

if TYPE_CHECKING:
    from ..domain.param_state import ParamState
    from ..engine import Engine
    from ..module.coverage import Coverage
    from ..module.takeover import ModuleTakeover


@dataclass(frozen=True)
class Rebinding:
    """The params of all groups from now on.

    Attributes:
        groups: by number of the group, its params.
        kept: the param whose state each one keeps.
    """

    groups: list[list[nn.Parameter]]
    kept: dict[nn.Parameter, nn.Parameter]

    def states(self, present: Mapping[nn.Parameter, ParamState]) -> dict[nn.Parameter, ParamState]:
        """Returns copies of the present states that are kept, by their params from now on."""
        found = {new: present[old].copy() for new, old in self.kept.items() if old in present}
        for new, state in found.items():
            if self.kept[new] is not new:
                state.tensors.pop("master", None)
        return found


@torch.no_grad()
def rebind(engine: Engine) -> None:
    """Collective: see :meth:`ShardedOptimizer.rebind`."""
    with engine.turn.take_together("rebind()"):
        _rebind(engine)


def _rebind(engine: Engine) -> None:
    view: dict[str, Any] = {}
    with agreed(view, engine.ranks()):
        takeover = _rebindable(engine)
        plan = _plan(takeover.coverage, engine.groups)
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
    engine.plans.clear()
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


def _plan(coverage: Coverage, groups: Sequence[Mapping[str, Any]]) -> Rebinding:
    """Plans what params the groups have from now on: those of the module as it is. Changes nothing.

    Params are told by name. One that stays the same object keeps all that belongs to it; a new one in its place keeps
    the states, if it has the same shape, and takes its master from its own values.

    Args:
        groups: the param groups, with params that may have left the module.

    Raises:
        BindingError: it cannot be told to which group a new param belongs.
    """
    names, bound = names_of(coverage.module), coverage.bound
    by_name = {name: param for param, name in names.items()}
    listed = {param for group in groups for param in group["params"]}
    kept: dict[nn.Parameter, nn.Parameter] = {}
    placed: list[list[nn.Parameter]] = []
    for group in groups:
        placed.append([])
        for old in group["params"]:
            was = bound.get(old)
            new = old if old in names or was is None else by_name.get(was.name)
            if new is None or (new is not old and new in listed) or new not in names:
                continue  # its layer is gone
            placed[-1].append(new)
            if was is not None and was.shape == tuple(new.shape):
                kept[new] = old
    known = coverage.trained().union(*placed)
    more = {name: param for param, name in names.items() if param.requires_grad and param not in known}
    if more and len(groups) > 1:
        raise BindingError(
            f"call add_param_group() with {next(iter(more))} first, or freeze it: it is a new param, and rebind() "
            f"knows none by that name, so it could be of any of {len(groups)} param groups. Nothing has changed."
        )
    placed[0] += more.values()
    return Rebinding(placed, kept)
