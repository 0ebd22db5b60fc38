"""Every state on one rank, with all ranks' help."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from .agreement import View, agree
from .bound_states import names_of
from .domain import Domain
from .entry import Entry, Group, named_params
from .shard import Shard
from .states import ParamState


def consolidate(domain: Domain, to: int, groups: Sequence[Group]) -> dict[torch.nn.Parameter, ParamState] | None:
    """Collective: every bound param's state as whole tensors in host memory, on the rank ``to``; None elsewhere."""
    states: dict[torch.nn.Parameter, ParamState] = {}
    for _, param, group in named_params(groups):
        entry = domain.entries.get(param)
        if entry is not None:
            nothing = dict.fromkeys(names_of(domain, entry, group), torch.empty(0))  # which is replaced below
            states[param] = ParamState(entry.step, dict(entry.carried), nothing)
    members: dict[Shard, list[Entry]] = defaultdict(list)
    for param in states:
        members[domain.entries[param].shard].append(domain.entries[param])
    names = [list(dict.fromkeys((*shard.states, *shard.masters))) for shard in domain.shards]
    key = {"rank to gather on": to, "states of buckets": names}
    agree(View(key, lambda: key), domain.mesh.world, domain.device)
    (coordinate,) = domain.mesh.world.exchange([domain.mesh.shard.rank], domain.device, "finding a rank")[to]
    # One state of one bucket at a time, so that the other ranks' slices never lie here all at once.
    for shard, its_names in zip(domain.shards, names, strict=True):
        for name in its_names:
            own = domain.read_together(shard, name, domain.mesh.world).to(shard.device)
            parts = domain.mesh.shard.collect(own, coordinate, f"consolidating {name}")
            whole = None if parts is None else torch.cat([part.cpu() for part in parts])
            for entry in members[shard]:
                if whole is not None and name in states[entry.param].tensors:
                    # Cloned: a view would bring the whole bucket along into a file.
                    states[entry.param].tensors[name] = shard.as_param(whole, entry.index).clone()
    if domain.mesh.world.rank != to:
        return None
    return {param: state for param, state in states.items() if domain.entries[param].has_state}
