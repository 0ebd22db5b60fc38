"""Frozen params of a module at stage 3: those that are sharded, and those that no bucket can hold, which stay whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import warn
from ..tensors.unsharded_guard import is_sharded
from .param_names import matching, name_of

if TYPE_CHECKING:
    from .domain import Domain
    from .param import Candidate

_NAMED = 3  # params that the warning names


def frozen_of(
    domain: Domain, module: torch.nn.Module, candidates: Sequence[Candidate] = ()
) -> list[torch.nn.Parameter]:
    """Returns the frozen params of the module that are to be sharded and are not yet.

    Args:
        candidates: params that are about to be bound.
    """
    taken: set[torch.Tensor] = {*domain.entries, *(param for _, param, _ in candidates)}
    return [param for param in _unsharded(domain, module) if _can_be_sharded(param) and param not in taken]


def warn_of_whole_frozen(domain: Domain, module: torch.nn.Module) -> None:
    """Warns of frozen params that stage 3 would shard if a bucket could hold them."""
    whole = [param for param in _unsharded(domain, module) if not _can_be_sharded(param)]
    if not whole:
        return
    names = ", ".join(str(name_of(module, domain.locals.outer_of(param))) for param in whole[:_NAMED])
    rest = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
    warn(
        "load these frozen params as dense tensors if they should be sharded, or name them in "
        f"Tuning(keep=...): {names}{rest} ({', '.join(sorted(set(map(_kind, whole))))}) stay whole on every rank, "
        f"{sum(map(_bytes_of, whole))} bytes, because buckets of stage 3 hold plain dense tensors alone."
    )


def kept_whole(domain: Domain) -> Collection[torch.Tensor]:
    """Returns the params that stage 3 would shard if ``Tuning.keep`` did not name them."""
    if not domain.shards_params:
        return frozenset()
    kept = matching(domain.options.module, domain.options.tuning.keep)
    return frozenset(domain.locals.of(param) for param in kept if isinstance(param, torch.nn.Parameter))


def _unsharded(domain: Domain, module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns the domain's frozen params that are large enough for stage 3 to shard, and are whole."""
    if not domain.shards_params:
        return []
    kept = kept_whole(domain)
    return [
        param
        for param in map(domain.locals.of, module.parameters())
        if not param.requires_grad
        and param.numel() >= domain.options.tuning.keep_below
        and not is_sharded(domain.locals.outer_of(param))
        and param not in kept
        and domain.locals.outer_of(param) in domain.members
    ]


def _can_be_sharded(param: torch.Tensor) -> bool:
    return param.layout is torch.strided and not param.is_quantized and not _wraps(param)


def _wraps(tensor: Any) -> bool:
    """True of a subclass whose values lie in other tensors."""
    return is_traceable_wrapper_subclass(tensor)


def _kind(param: torch.Tensor) -> str:
    if _wraps(param):
        return type(param).__name__
    return str(param.dtype if param.layout is torch.strided else param.layout)


def _bytes_of(tensor: Any) -> int:
    """Returns the bytes of the values."""
    if _wraps(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes_of(getattr(tensor, name)) for name in names)
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.numel() * tensor.element_size())
