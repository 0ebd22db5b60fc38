"""Reads and writes the states of bound params, in torch's shapes: a sharded state is shown as parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..domain.full_state_dict import take_parts_along
from ..domain.param_state import ParamState
from ..domain.remote_states import writing
from ..errors import ShardoptError, StateError
from ..tensors.part import Part

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import Group, ParamRecord
    from ..remote.epoch import Moment


def read_state(domain: Domain, entry: ParamRecord, group: Group) -> ParamState:
    """Returns the state of one param: views of the shard if one rank holds everything, else parts.

    Raises:
        BindingError: ``param.data`` was assigned a tensor of another number of dimensions.
    """
    if not entry.shard.bucket.keeps_dims(entry.index):
        entry.check()
    of, names = (entry.shard, entry.index), names_of(domain, entry, group)
    # Before the counters: a step of another thread may change them meanwhile.
    moments = {name: domain.epoch.now(name, of) for name in names}
    tensors = {name: _read_tensor(domain, entry, name, moments[name]) for name in names}
    margins = {name: tensor.to(entry.param.device) for name, tensor in entry.margins.items()}
    return ParamState(entry.step, dict(entry.carried), tensors, margins)


def names_of(domain: Domain, entry: ParamRecord, group: Group) -> list[str]:
    """Returns the names of the tensors of elements in the param's state, in torch's order."""
    shard = entry.shard
    needed = domain.rule.variant(group, entry.shape).states
    return [*(name for name in needed if name in shard.states), *shard.masters]


def _read_tensor(domain: Domain, entry: ParamRecord, name: str, moment: Moment) -> torch.Tensor:
    shard, index = entry.shard, entry.index
    if domain.mesh.shard.size == 1:
        own = shard.read(name, index)  # decodes, or reads from a disk, no more than this param
        return own.as_strided(shard.bucket.shape_of(index), shard.strides(index))

    def gather(_: torch.Tensor) -> torch.Tensor:
        return shard.as_param(domain.gather(shard, name), index).clone()

    take_parts_along()
    where, fetch = shard.slice_of(index), domain.fetcher(shard, index, name, moment)
    return Part(shard.read(name, index), where.start, entry.param, gather, fetch=fetch)


def complete_parts(domain: Domain, param: torch.nn.Parameter, state: ParamState) -> None:
    """Fetches what parts of a loaded state lack of this rank's slice of a bound param. Changes nothing but ``state``.

    Raises:
        StateError: they cannot be fetched: the optimizer is gone, or has moved on.
    """
    entry = domain.entries.get(param)
    if entry is None:
        return  # its slice is known at binding, where ranks exchange what they lack
    where = entry.shard.slice_of(entry.index)
    start, stop = where.start, where.start + where.local.stop - where.local.start
    for name, tensor in state.tensors.items():
        if isinstance(tensor, Part) and not tensor.holds(start, stop):
            whole = _fetched(tensor, f"{name} of {entry.name} this rank needs elements [{start}:{stop}]")
            own = entry.shard.in_order(entry.index, whole)[start:stop].clone()
            state.tensors[name] = Part(own, start, entry.param)


def _fetched(part: Part, needed: str) -> torch.Tensor:
    try:
        return part.read_whole()
    except ShardoptError as error:
        raise StateError(
            "load this dict before the first forward or step, when ranks exchange what they lack, or load one of whole "
            "tensors (a file that torch.save wrote, or after consolidate_state_dict()). Of "
            f"{needed}, the part holds [{part.start}:{part.start + part.local.numel()}], and the rest cannot be "
            f"fetched any more ({error}). Nothing was loaded."
        ) from error


def put_state(domain: Domain, param: torch.nn.Parameter, state: ParamState, has_state: bool) -> None:
    """Loads this rank's slice of one param's checked state; without one the param returns to before its first step."""
    entry = domain.entries[param]
    if has_state and _shows(entry, state):  # a loop that moves states to a device assigned what it read
        return
    shard = entry.shard
    with writing(domain, shard, entry.index, [*shard.masters, *shard.states]):
        with domain.all_or_nothing():
            entry.shard.home.renew(zeroed=())  # a state dict taken before keeps its values
            entry.shard.zero(entry.index)
            if has_state:
                entry.write_state(state)
            else:
                entry.write_initial()
        entry.forget()
        if domain.state_edits is not None:
            domain.state_edits.forget([domain.number_of(entry)])
        entry.note_replaced()
        if has_state:
            entry.load_counters(state)
            entry.note_loaded(state)


def _shows(entry: ParamRecord, state: ParamState) -> bool:
    """True if the state's tensors are what the shard shows; the same on all ranks.

    Of parts of a state dict storages are compared: on a rank that owns nothing of the param the slice is empty, and a
    view of the shard as well. What is decoded or read from a disk is new memory: an empty slice of it has none.
    """
    if (state.step, state.carried) != (entry.step, entry.carried) or not entry.has_state:
        return False
    shard, shown = entry.shard, entry.margins
    margins = {name: each for name, each in state.margins.items() if name not in state.same}
    if any(name not in shown or _memory_of(shown[name]) != _memory_of(each) for name, each in margins.items()):
        return False
    others = {name: tensor for name, tensor in state.tensors.items() if name not in state.same}
    if not others.keys() <= {*shard.states, *shard.masters}:
        return False
    mine = ((shard.read(name, entry.index), tensor) for name, tensor in others.items())
    locals_ = ((own, tensor.local if isinstance(tensor, Part) else tensor) for own, tensor in mine)
    return all(_memory_of(own) == _memory_of(tensor) and own.untyped_storage().data_ptr() for own, tensor in locals_)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def load_states(domain: Domain, loaded: Mapping[torch.nn.Parameter, ParamState]) -> None:
    """Loads this rank's slices of checked states; params without one return to before their first step.

    Raises:
        OffloadError: the store cannot keep the states; nothing changed.
    """
    if not domain.shards:
        return
    entries = domain.entries
    keeps = {e.shard for param, e in entries.items() if "master" not in loaded.get(param, ParamState()).tensors}
    with domain.epoch.loading():
        with domain.all_or_nothing():
            for shard in domain.shards:
                shard.renew(keeps_masters=shard in keeps)
            for param, entry in entries.items():
                if param in loaded:
                    entry.write_state(loaded[param])
                else:
                    entry.write_initial()
        domain.state_edits = None
        for param, entry in entries.items():
            entry.forget()
            if param in loaded:
                entry.load_counters(loaded[param])
                entry.note_loaded(loaded[param])
