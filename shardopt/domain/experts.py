"""Experts: params that fewer ranks share than the rest have a domain of their own, and units of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BindingError
from .members import Members
from .model_units import CONTAINERS, units_of

if TYPE_CHECKING:
    from ..config import Options
    from .domain import Domain
    from .model_units import UnitPlan
    from .param import Group


def check_experts(options: Options, everyone: Sequence[int], experts: Sequence[Sequence[int]]) -> None:
    """Raises BindingError if a module's experts cannot be taken over.

    Args:
        everyone: the ranks of the main domain.
        experts: those of each expert domain of this rank.
    """
    beyond = sorted({rank for ranks in experts for rank in ranks} - {*everyone})
    if beyond:
        raise BindingError(
            "give the optimizer the process_group of all ranks that have a batch, or the params without the module "
            f"(stage 1): ranks {beyond} share experts with this one and are not in the optimizer's process_group, "
            f"{[*everyone]}, by whose number gradients are divided. Nobody would know the number of batches."
        )
    if options.release_gradients and experts:
        raise BindingError(
            "omit release_gradients: param groups have their own process_group, and a step that is taken in backward "
            "is decided on the ranks of one group. An Inf or NaN in one expert would be skipped on its ranks alone."
        )


def set_members(main: Domain, others: Mapping[Any, Domain], groups: Sequence[Group]) -> None:
    """Sets the members of each domain.

    Args:
        others: by the ``process_group`` of the param groups whose params they hold.
    """
    found: dict[Any, list[torch.Tensor]] = {own: [] for own in others}
    for group in groups:
        own = group.get("process_group")
        if own is not None:
            found[own].extend(group["params"])
    main.members = Members(frozenset(param for params in found.values() for param in params))
    for own, params in found.items():
        others[own].members = Members(frozenset(params), are_others=False, number=[*others].index(own) + 1)
        others[own].leader = main


def own_units(domain: Domain, module: torch.nn.Module, given: Sequence[Any]) -> list[tuple[int, UnitPlan]]:
    """Returns the units that hold params of a domain, and the number of each in the module.

    Params of experts in a block are a unit of their own, which is gathered together with the rest of the block. An
    expert that is a unit by itself is gathered for the call of the module around it, whether it gets a token or not: a
    rank that omitted it would wait for others in an exchange of tokens, while they wait for its slice.

    Args:
        given: as for :func:`units_of`.
    """
    found, members = [], domain.members
    callers = _callers(module, module) if members.number else {}
    for number, unit in enumerate(units_of(module, given)):
        params = tuple(param for param in unit.params if param in members)
        if params and members.number:
            name, modules = f"{unit.name} (experts {members.number})", unit.modules
            if len(params) == len(unit.params):
                modules = tuple(dict.fromkeys([*(callers.get(each, module) for each in modules), *modules]))
            unit = replace(unit, name=name, modules=modules)
        if params:
            found.append((number, replace(unit, params=params)))
    return found


def _callers(module: torch.nn.Module, caller: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module]:
    """Returns for each module inside the nearest one around it that is more than a container."""
    found: dict[torch.nn.Module, torch.nn.Module] = {}
    for child in module.children():
        found[child] = caller
        found |= _callers(child, caller if type(child) in CONTAINERS else child)
    return found
