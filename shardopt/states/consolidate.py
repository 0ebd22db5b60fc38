"""Gathers every state on one rank; all ranks take part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import whole
from ..domain.agreement import agree_on_call
from ..domain.masters import take_sources
from ..domain.param import named_params
from ..domain.param_state import ParamState
from .shard_io import names_of

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import Group, ParamRecord
    from ..domain.shard import Shard


def consolidate(domain: Domain, to: object, groups: Sequence[Group]) -> dict[torch.nn.Parameter, ParamState] | None:
    """Collective: returns every bound param's state as whole tensors in host memory on the rank ``to``, None elsewhere.

    Raises:
        TypeError or ValueError: ``to`` is not a rank; DisagreementError on the ranks that were given another one.
    """
    world = domain.mesh.world
    take_sources(domain)
    names = [list(dict.fromkeys((*shard.states, *shard.masters))) for shard in domain.shards]

    def read() -> dict[str, Any]:
        return {"rank to gather on": rank_to_gather_on(to, world.size), "states of buckets": names}

    given = agree_on_call("consolidate_state_dict()", read, world)
    return _gathered(domain, given["rank to gather on"], names, groups)


def rank_to_gather_on(to: object, size: int) -> int:
    """Returns ``to`` as the number of one of ``size`` ranks.

    Raises:
        TypeError: it is not a number.
        ValueError: no rank has it.
    """
    what = f"consolidate_state_dict(to=) is the rank to gather on, there are {size} ranks: to"
    return whole(to, what, least=0, most=size - 1)


def _gathered(
    domain: Domain, to: int, names: Sequence[Sequence[str]], groups: Sequence[Group]
) -> dict[torch.nn.Parameter, ParamState] | None:
    states: dict[torch.nn.Parameter, ParamState] = {}
    for _, param, group in named_params(groups):
        entry = domain.entries.get(param)
        if entry is not None:
            empty = dict.fromkeys(names_of(domain, entry, group), torch.empty(0))  # replaced below
            states[param] = ParamState(entry.step, dict(entry.carried), empty, dict(entry.margins))
    members: dict[Shard, list[ParamRecord]] = defaultdict(list)
    for param in states:
        members[domain.entries[param].shard].append(domain.entries[param])
    (coordinate,) = domain.mesh.world.exchange([domain.mesh.shard.rank], "finding a rank")[to]
    # One state of one bucket at a time, so that this rank never holds the other ranks' slices of all of them.
    for shard, its_names in zip(domain.shards, names, strict=True):
        for name in its_names:
            own = domain.read_together(shard, name, domain.mesh.world).to(shard.device)
            parts = domain.mesh.shard.gather(own, coordinate, f"consolidating {name}")
            whole = None if parts is None else torch.cat([part.cpu() for part in parts])
            for entry in members[shard]:
                if whole is not None and name in states[entry.param].tensors:
                    # Cloned: torch.save would write the whole bucket for a view of it.
                    states[entry.param].tensors[name] = shard.as_param(whole, entry.index).clone()
    if domain.mesh.world.rank != to:
        return None
    return {param: state for param, state in states.items() if domain.entries[param].has_state}
