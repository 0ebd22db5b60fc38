"""Frozen params of a module at stage 3: those that are sharded, and those that no bucket can hold, which stay whole.

A quantized param is sharded as its inner tensors, codes and scales, each in its own dtype: so none of them is rounded,
in a bucket or on the wire. Tensors of at most one block stay whole: code books, which all params of a kind share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import warn
from ..partition.layout import BLOCK
from ..tensors.inner_tensors import Inner, is_packed, is_wrapper, kept_beside, views_of
from ..tensors.unsharded_guard import is_sharded
from .members import plain_tensors
from .param_names import matching, name_of
from .precision import dtype_in_model

if TYPE_CHECKING:
    from .domain import Domain
    from .param import Candidate

_NAMED = 3  # params that the warning names


def frozen_of(
    domain: Domain, module: torch.nn.Module, candidates: Sequence[Candidate] = ()
) -> list[torch.nn.Parameter]:
    """Returns the frozen params of the module that are to be sharded and are not yet; of quantized ones what is inside.

    Args:
        candidates: params that are about to be bound.
    """
    taken: set[torch.Tensor] = {*domain.entries, *(param for _, param, _ in candidates)}
    here = [param for param in _unsharded(domain, module) if param not in taken and _can_be_sharded(domain, param)]
    found: list[torch.nn.Parameter] = [param for param in here if not (is_wrapper(param) or is_packed(param))]
    if len(found) < len(here):
        known = set(found)
        modules = {param: each for each in module.modules() for param in each._parameters.values() if param is not None}
        for param in here:
            if param not in known:
                inner = _inner_of(param, modules[domain.locals.outer_of(param)])
                domain.inner.update(inner)
                found += inner  # type: ignore[arg-type]
    return found


def warn_of_whole_frozen(domain: Domain, module: torch.nn.Module) -> None:
    """Warns of frozen params that stage 3 would shard if a bucket could hold them."""
    whole = [param for param in _unsharded(domain, module) if not _can_be_sharded(domain, param)]
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


def _can_be_sharded(domain: Domain, param: torch.nn.Parameter) -> bool:
    if not is_wrapper(param):
        return param.layout is torch.strided and not param.is_quantized
    # A cast by ``compute_dtype`` is the wrapper's own business, and may change what is inside.
    return dtype_in_model(domain)(param) is param.dtype and all(
        type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.layout is torch.strided
        and each.device == param.device
        and not each.is_meta
        for each in plain_tensors(param)
    )


def _inner_of(param: torch.nn.Parameter, module: torch.nn.Module) -> dict[torch.Tensor, Inner]:
    """Returns the inner tensors of a quantized param that are to be sharded; the first one shows the others with it."""
    if is_wrapper(param):
        first, *others = plain_tensors(param)
        return {first: Inner(param, (param,)), **dict.fromkeys(others, Inner(param))}
    scales = [
        each
        for each in kept_beside(module).values()
        if type(each) is torch.Tensor
        and each.layout is torch.strided
        and each.numel() > BLOCK
        and each.device == param.device
    ]
    return {param: Inner(param, tuple(views_of(module, param))), **dict.fromkeys(scales, Inner(param))}


def _kind(param: torch.Tensor) -> str:
    if is_wrapper(param):
        return type(param).__name__
    return str(param.dtype if param.layout is torch.strided else param.layout)


def _bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of the values."""
    if is_wrapper(tensor):
        return sum(map(_bytes_of, plain_tensors(tensor)))
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.numel() * tensor.element_size())
