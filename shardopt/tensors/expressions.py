"""Expressions of parts by element: the result is a part, of which this rank computes its slice. Nothing is fetched.

``zeros_like(part)``, ``part * 2``, ``part.abs() + other``: each element of the result depends on the same element of
the arguments, so a rank's slice of it needs the rank's slices alone. The rest is computed when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .part import Part, fetch_as
from .strides import flattened, in_storage_order

_aten = torch.ops.aten

_ALIKE = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like}
_DRAWN = {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_NEW = {_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty}
_COPYING = {_aten.clone, _aten._to_copy}
_FILLING = {_aten.zero_, _aten.fill_, _aten.copy_}


class PartResult(Part):
    """The result of an expression of parts. A write by element changes this rank's slice of it, and no record."""

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        found = expression(function, arguments, keywords)
        return super()._answer(function, arguments, keywords) if found is None else found


class _Later(NamedTuple):
    """A whole, to be fetched when the result is read."""

    fetch: Callable[[], torch.Tensor]
    device: torch.device


def expression(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the result of a function by element as a part; None if it is another function, or of other cuts."""
    packet = function.overloadpacket
    parts = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Part)]
    if packet in _NEW and len(parts) == 1:
        return function(torch.empty(0, dtype=parts[0].dtype, device=parts[0].device), *arguments[1:], **keywords)
    writes = any(each.alias_info is not None for each in function._schema.arguments)
    if writes and (packet not in _FILLING and torch.Tag.pointwise not in function.tags):
        return None
    if not writes and torch.Tag.pointwise not in function.tags and packet not in _ALIKE | _DRAWN | _COPYING:
        return None
    keywords = {name: value for name, value in keywords.items() if name != "memory_format"}
    if writes:
        return _written(function, parts, arguments, keywords)
    like = max(parts, key=lambda part: part.dim())
    if packet in _DRAWN:
        whole = function(_empty(like), *arguments[1:], **keywords)
        return _result(like, _slice(whole, like), None)
    local = _locally(like, arguments, keywords)
    if local is None:
        return None
    own = function(*local[0], **local[1])
    if not isinstance(own, torch.Tensor) or own.shape != like.local.shape:
        return None
    if packet in _ALIKE:
        return _result(like, own, lambda: function(_empty(like, "cpu"), *arguments[1:], **keywords))
    if any(part._fetch is None for part in parts):
        return _result(like, own, None)
    later = tree_map_only(torch.Tensor, _later, (arguments, keywords))
    return _result(like, own, partial(fetch_as, partial(_whole_of, function, *later), own.dtype, True))


def scattered(part: Part) -> torch.Tensor:
    """Returns this rank's elements of a part in their places, and zeros elsewhere."""
    whole = torch.zeros(part.size().numel(), dtype=part.dtype, device=part.device)
    whole[part.start : part.start + part.local.numel()] = part.local
    return whole.as_strided(part.size(), part.stride())


def is_cut_alike(tensor: torch.Tensor, like: Part) -> bool:
    """True if a tensor is a part of the same elements."""
    if not isinstance(tensor, Part) or tensor.shape != like.shape or tensor.stride() != like.stride():
        return False
    return (tensor.start, tensor.local.numel()) == (like.start, like.local.numel())


def _written(function: Any, parts: Sequence[Part], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Part | None:
    target = arguments[0]
    if not isinstance(target, PartResult) or any(isinstance(value, Part) for value in keywords.values()):
        return None
    local = _locally(target, arguments, keywords)
    if local is None:
        return None
    function(*local[0], **local[1])
    target._fetch = None  # a whole would be that of before
    return target


def _locally(like: Part, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the arguments with slices in place of tensors; None if one is cut otherwise."""

    def fits(tensor: Any) -> bool:
        if isinstance(tensor, Part):
            return is_cut_alike(tensor, like)
        return not isinstance(tensor, torch.Tensor) or tensor.dim() <= like.dim()

    if not all(map(fits, tree_leaves((arguments, keywords)))):
        return None

    def local(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Part):
            return tensor.local
        return _slice(tensor, like) if tensor.dim() else tensor

    try:
        return tree_map_only(torch.Tensor, local, (arguments, keywords))
    except RuntimeError:  # it cannot be expanded to the part's shape
        return None


def _slice(tensor: torch.Tensor, like: Part) -> torch.Tensor:
    whole = flattened(in_storage_order(tensor.detach().expand(like.size()), like.stride()))
    return whole[like.start : like.start + like.local.numel()]


def _empty(like: torch.Tensor, device: str | torch.device | None = None) -> torch.Tensor:
    where = like.device if device is None else device
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=where)


def _later(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, Part):
        return tensor
    assert tensor._fetch is not None
    return _Later(tensor._fetch, tensor.device)


def _whole_of(function: Any, arguments: Any, keywords: Any) -> torch.Tensor:
    def fetched(value: Any) -> Any:
        return value.fetch() if isinstance(value, _Later) else value.cpu() if isinstance(value, torch.Tensor) else value

    its = tuple(map(fetched, arguments))
    return function(*its, **{name: fetched(value) for name, value in keywords.items()})  # type: ignore[no-any-return]


def _result(like: Part, own: torch.Tensor, fetch: Callable[[], torch.Tensor] | None) -> PartResult:
    gather = like._gather_slices
    return PartResult(own, like.start, like, gather, own.dtype, fetch, None, gather)
