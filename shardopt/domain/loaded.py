"""One param's state, whole or a part, on its way into a shard."""

from collections.abc import Mapping

import torch

from ..rules.rule import EMA
from ..tensors.part import Part
from .param import Entry
from .param_state import ParamState
from .shard import Shard

# No param ever has it: what is kept beside a param is of no use, and the next step finds that it was written.
_OF_OTHER_WEIGHTS = -1


def write_tensors(shard: Shard, index: int, state: ParamState) -> None:
    """Takes this rank's slices for the bucket's param ``index``."""
    shard.ensure_states(name for name in state.tensors if name != "master")
    for name, tensor in state.tensors.items():
        if name == "master" and not shard.masters:
            continue
        shard.write(name, index, shard.slice_of(index).start, _own_values(shard, index, tensor))
    if state.step and EMA in shard.kept.states and EMA not in state.tensors:
        shard.begin_average(index)


def begin_states(shard: Shard, index: int, initial: Mapping[str, float]) -> None:
    """Fills states of the bucket's param ``index``, which are zeros, with what they hold before a first step."""
    where = shard.slice_of(index)
    for name, value in initial.items():
        if value:
            shard.write(name, index, where.start, torch.full((where.local.stop - where.local.start,), value))


def expect_weights(entry: Entry, state: ParamState) -> None:
    """The model's weights, which the master must round to, may be loaded after its states: the next step looks."""
    shard, master = entry.shard, state.tensors.get("master")
    entry.version = None
    entry.begins_average = bool(state.step) and EMA in shard.kept.states and EMA not in state.tensors
    if not shard.masters or shard.has_whole_masters:
        return
    if master is None:
        entry.version = _OF_OTHER_WEIGHTS
        return
    own, kept = _own_values(shard, entry.index, master), shard.read("master", entry.index)
    if not torch.equal(kept, own.to(kept.device)):
        shard.awaiting[entry.index] = own.clone()


def _own_values(shard: Shard, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Of a state of the bucket's param ``index``, what lies in this shard, 1D."""
    where = shard.slice_of(index)
    if isinstance(tensor, Part):
        first, flat = where.start - tensor.start, tensor.local
    else:
        first, flat = where.start, shard.in_order(index, tensor.detach())
    return flat[first : first + where.local.stop - where.local.start]
