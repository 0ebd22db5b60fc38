"""The exact values of params that the model sees in less, where a script asks for weights: in its state dicts.

Params of a module with ``compute_dtype`` are whole and rounded at stages 0, 1 and 2, and their masters have the exact
values. With ``gather_dtype`` they are rounded at stages 1 and 2, and each owner keeps its exact slice.
``state_dict()`` shows the exact values, as parts that read the other ranks' slices when they are saved;
``load_state_dict()`` writes them, before torch writes what they round to. At stage 3 the params themselves are slices
of exact values (:mod:`shardopt.domain.sharded_params`).

Inside ``unsharded()`` params of ``compute_dtype`` show fp32 values themselves
(:mod:`shardopt.domain.exact_params`). With ``gather_dtype`` a state dict has whole tensors there: this rank reads them
alone, and what was written to params counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.dtensors import is_dtensor, local_tensor, placed_as, shown_as
from ..domain.full_state_dict import part_of_param
from ..kernels import codecs
from ..tensors.part import Part
from .hooks import ModuleHook, remove_all

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard


class ExactWeights:
    """The hooks on modules that own such params."""

    def __init__(self, root: nn.Module):
        self._root = root
        self._of: dict[nn.Parameter, tuple[Domain, ParamRecord]] = {}
        self._hooks: list[Any] = []

    def attach(self, domains: Iterable[Domain]) -> None:
        """Puts hooks on the modules whose params are bound to these domains, in place of those from before."""
        self.close()
        for domain in domains:
            for entry in domain.entries.values():
                if entry.shard.is_cast or entry.shard.exact_slice is not None:
                    self._of[entry.outer] = domain, entry
        for module in self._root.modules() if self._of else ():
            if any(param in self._of for param in module._parameters.values() if param is not None):
                self._hooks.append(module.register_state_dict_post_hook(ModuleHook(self._show)))
                self._hooks.append(module.register_load_state_dict_pre_hook(ModuleHook(self._take)))

    def close(self) -> None:
        """Removes the hooks."""
        remove_all(self._hooks)
        self._of = {}

    def _show(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """Shows fp32 values in a state dict of the module."""
        for name, param in module._parameters.items():
            shown = state_dict.get(prefix + name)
            # With keep_vars=True the dict has the params themselves.
            if param in self._of and shown is not None and not isinstance(shown, nn.Parameter):
                domain, entry = self._of[param]
                if domain.exact is not None and entry.shard.exact_slice is None:
                    continue  # the param shows them
                if domain.whole_contexts and _is_rounded(entry.shard):
                    whole = _whole_of(domain, entry, local_tensor(shown))
                    state_dict[prefix + name] = shown_as(param, whole)
                elif entry.shard.gathered is None and not domain.is_averaged and _is_rounded(entry.shard):
                    state_dict[prefix + name] = shown_as(param, _part_of(domain, entry))

    @torch.no_grad()
    def _take(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Collective if parts are loaded: writes fp32 values to masters, before torch writes them to params."""
        for name, param in module._parameters.items():
            given = state_dict.get(prefix + name)
            if param not in self._of or not isinstance(given, torch.Tensor) or given.shape != param.shape:
                continue
            domain, entry = self._of[param]
            if entry.shard.gathered is not None or (domain.exact is not None and entry.shard.exact_slice is None):
                continue  # the param shows exact values, and takes what is given
            if is_dtensor(param) and not is_dtensor(given):
                continue  # torch refuses it
            own = local_tensor(placed_as(param, given))
            if isinstance(own, Part):
                own = own.full_tensor()
                state_dict[prefix + name] = shown_as(param, own)
            if not own.is_meta and (own.dtype is not param.dtype or entry.shard.exact_slice is not None):
                _write(domain, entry, own)


def _is_rounded(shard: Shard) -> bool:
    """True if the bucket shows less than the shard keeps."""
    return shard.is_cast or (shard.exact_slice is not None and not shard.exact_slice.is_shown)


def _write(domain: Domain, entry: ParamRecord, whole: torch.Tensor) -> None:
    shard, index = entry.shard, entry.index
    values = shard.in_order(index, whole.detach().to(shard.device, torch.float32).expand(entry.param.size()))
    with domain.epoch.loading(), domain.all_or_nothing():
        if shard.exact_slice is not None:
            shard.write_param(index, 0, values)
        if shard.masters:
            shard.write("master", index, 0, values)
    entry.note_replaced()


def _whole_of(domain: Domain, entry: ParamRecord, shown: torch.Tensor) -> torch.Tensor:
    """Returns the whole fp32 values behind what a param shows; what was written to it counts."""
    shard, index = entry.shard, entry.index
    fetch = domain.fetcher(shard, index, shard.exact)
    if fetch is None:  # other ranks cannot be read
        return shown
    kept = shard.in_order(index, fetch().to(shown.device))
    if shard.exact_slice is not None and not shard.exact_slice.is_shown:  # one rank reads alone, and writes nothing
        return kept.as_strided(entry.param.size(), shard.strides(index))
    found = codecs.follow(kept, shard.in_order(index, shown.detach()), ties=False)
    return found.as_strided(entry.param.size(), shard.strides(index))


def _part_of(domain: Domain, entry: ParamRecord) -> Part:
    """Returns this rank's slice of the exact values as a part, with the shape of the param."""
    shard, index = entry.shard, entry.index

    @torch.no_grad()
    def write(whole: torch.Tensor) -> None:
        _write(domain, entry, whole)
        entry.param.copy_(whole)

    if shard.takes_sources:
        shard.bucket.take_source(index)
    name, fetch, is_alone = shard.exact, domain.fetcher(shard, index, shard.exact), domain.mesh.shard.size == 1
    return part_of_param(shard, index, name, domain.gather, domain.gather_slices, fetch, write, is_alone)
