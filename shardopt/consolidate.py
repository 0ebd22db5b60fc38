"""Every state on one rank, with all ranks' help."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from .agreement import agree_on_call
from .arguments import whole
from .binding import Binding
from .bound_states import names_of
from .entry import Entry, Group, named_params
from .shard import Shard
from .states import ParamState


def consolidate(binding: Binding, to: object, groups: Sequence[Group]) -> dict[torch.nn.Parameter, ParamState] | None:
    """Collective: every bound param's state as whole tensors in host memory, on the rank ``to``; None elsewhere.

    Raises:
        TypeError or ValueError: ``to`` is no rank; DisagreementError on the ranks that were given one.
    """
    world = binding.mesh.world
    names = [list(dict.fromkeys((*shard.states, *shard.masters))) for shard in binding.shards]

    def read() -> dict[str, Any]:
        return {"rank to gather on": rank_to_gather_on(to, world.size), "states of buckets": names}

    given = agree_on_call("consolidate_state_dict()", read, world, binding.device)
    return _gathered(binding, given["rank to gather on"], names, groups)


def rank_to_gather_on(to: object, size: int) -> int:
    """``to`` as one of that many ranks.

    Raises:
        TypeError: no number.
        ValueError: no rank has it.
    """
    what = f"consolidate_state_dict(to=) is the rank to gather on, there are {size} ranks: to"
    return whole(to, what, least=0, most=size - 1)


def _gathered(
    binding: Binding, to: int, names: Sequence[Sequence[str]], groups: Sequence[Group]
) -> dict[torch.nn.Parameter, ParamState] | None:
    states: dict[torch.nn.Parameter, ParamState] = {}
    for _, param, group in named_params(groups):
        entry = binding.entries.get(param)
        if entry is not None:
            nothing = dict.fromkeys(names_of(binding, entry, group), torch.empty(0))  # which is replaced below
            states[param] = ParamState(entry.step, dict(entry.carried), nothing)
    members: dict[Shard, list[Entry]] = defaultdict(list)
    for param in states:
        members[binding.entries[param].shard].append(binding.entries[param])
    (coordinate,) = binding.mesh.world.exchange([binding.mesh.shard.rank], binding.device, "finding a rank")[to]
    # One state of one bucket at a time, so that the other ranks' slices never lie here all at once.
    for shard, its_names in zip(binding.shards, names, strict=True):
        for name in its_names:
            own = binding.read_together(shard, name, binding.mesh.world).to(shard.device)
            parts = binding.mesh.shard.collect(own, coordinate, f"consolidating {name}")
            whole = None if parts is None else torch.cat([part.cpu() for part in parts])
            for entry in members[shard]:
                if whole is not None and name in states[entry.param].tensors:
                    # Cloned: a view would bring the whole bucket along into a file.
                    states[entry.param].tensors[name] = shard.as_param(whole, entry.index).clone()
    if binding.mesh.world.rank != to:
        return None
    return {param: state for param, state in states.items() if binding.entries[param].has_state}
