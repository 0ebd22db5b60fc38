"""Edits of a part of a gradient in place: each rank changes its own slice, at once and without a message.

An edit by elements needs no other elements: of whole tensors (masks, noise, values) a rank takes those that stand where
its slice does, and of parts that are cut alike their slices. Other edits that leave each element to itself (an index, a
mask of rows) are made on a tensor of the whole's size that holds this rank's slice, and the slice is taken out of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .edits import told, told_wholes
from .fetched_view import by_name, edit_each, written_by
from .gradient_slice import GradientSlice, change
from .part import Part, is_cut_alike
from .strides import flattened, in_storage_order

aten = torch.ops.aten

_SIMPLE = {aten.copy_, aten.fill_, aten.masked_fill_}
# By elements, but not at the places of the arguments' elements, or with numbers that a generator draws for the whole.
_BY_PLACE = {
    *(aten.index_put_, aten._index_put_impl_, aten.index_fill_, aten.index_copy_, aten.index_add_, aten.put_),
    *(aten.masked_scatter_, aten.scatter_, aten.scatter_add_, aten.fill_diagonal_, aten.tril_, aten.triu_),
    *(aten.uniform_, aten.normal_, aten.random_, aten.bernoulli_, aten.exponential_, aten.log_normal_, aten.cauchy_),
    aten.geometric_,
}


@functools.cache
def _is_by_element(function: Any) -> bool:
    """True if each element of the result depends on no other element; torch marks not all in-place forms so."""
    name = function._schema.name.removeprefix("aten::")
    plain = getattr(aten, name.removesuffix("_"), None)
    forms = [function, *(getattr(plain, each) for each in (() if plain is None else plain.overloads()))]
    return function.overloadpacket in _SIMPLE or any(torch.Tag.pointwise in each.tags for each in forms)


@dataclass(frozen=True)
class _Itself:
    """Stands for the gradient that an edit is of, in the text of the edit."""

    words: str = "itself"


_ITSELF = _Itself()


def edit(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Makes an edit of one gradient. Returns the part; NotImplemented if it needs elements that this rank lacks."""
    if function._schema.name.startswith("aten::_foreach_"):
        return edit_each(function, arguments, keywords)
    named, names = by_name(function, arguments, keywords), written_by(function)
    part = named[names[0]]
    if len(names) > 1 or not isinstance(part, Part):
        return NotImplemented
    if torch.Tag.nondeterministic_seeded in function.tags:
        noise = _noise(function, part, arguments, keywords)
        if noise is not None:
            return _edit_slice(aten.copy_.default, part, (part, noise), {})
    if _is_by_element(function):
        return _edit_slice(function, part, arguments, keywords)
    if function.overloadpacket in _BY_PLACE:
        rest = arguments[1:]
        edit_whole(part, str(function), lambda whole, *its, **named: function(whole, *its, **named), rest, keywords)
        return part
    return NotImplemented


def _noise(function: Any, part: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    """Returns what a function draws by element; None if a generator draws it, or torch for the whole."""
    from .expressions import noise_part
    from .noise import noise_of

    if function is aten.bernoulli_.Tensor:
        drawn: Tensor = torch.rand_like(part) < arguments[1]
        return drawn.to(part.dtype)
    found = noise_of(function, arguments, keywords, part)
    return None if found is None else noise_part(found, part)


def _edit_slice(function: Any, part: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    own: GradientSlice = part.whole_slice()
    wholes = told_wholes(arguments, keywords)

    def by(mean: Tensor) -> None:
        def local(tensor: Any) -> Tensor:
            if getattr(tensor, "gradient_slice", None) is own:
                tensor.live_slice()  # one that the script kept from an earlier backward raises
                return mean
            if isinstance(tensor, Part) and is_cut_alike(tensor, part):
                return tensor.elements().to(mean.device)
            whole = tensor.read_whole() if isinstance(tensor, Part) else tensor.detach()
            return slice_of(whole, part, own)

        its, named = tree_map_only(Tensor, local, (arguments, keywords))
        function(*its, **named)

    # Its own edits are compared in their order. How many it had is no part of that: ranks that were refused a step, as
    # one of them had assigned zeros, go on by assigning the same. Test: test_zeros_are_the_mean_on_all_ranks_only.
    given, named = tree_map_only(
        Part, lambda each: _ITSELF if getattr(each, "gradient_slice", None) is own else each, (arguments, keywords)
    )
    change(own, in_dtype(part.dtype, by), told(function, given, named), wholes)
    return part


def edit_whole(
    part: Any,
    name: str,
    call: Callable[..., object],
    arguments: tuple[Any, ...] = (),
    keywords: dict[str, Any] | None = None,
) -> None:
    """Calls a function that changes single elements with a tensor of the whole's size, of which it keeps the slice."""
    own: GradientSlice = part.whole_slice()
    wholes = told_wholes(arguments, keywords or {})
    its, named = tree_map_only(Part, lambda each: each.read_whole().to(part.device), (arguments, keywords or {}))

    def by(mean: Tensor) -> None:
        whole = torch.zeros(part.whole_numel, dtype=mean.dtype, device=part.device)
        here = whole[own.start : own.start + mean.numel()]
        here.copy_(mean)
        call(part.shaped(whole), *its, **named)
        mean.copy_(here)

    change(own, in_dtype(part.dtype, by), told(name, arguments, keywords or {}), wholes)


def in_dtype(dtype: torch.dtype, by: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """Makes a change in the part's dtype, as torch does; elements that it leaves alone keep all their bits."""

    def change(mean: Tensor) -> None:
        if mean.dtype is dtype:
            by(mean)
            return
        before = mean.to(dtype)
        after = before.clone()
        by(after)
        mean.copy_(torch.where(after == before, mean, after.to(mean.dtype)))

    return change


def slice_of(whole: Tensor, part: Any, own: GradientSlice) -> Tensor:
    """Returns what of a tensor, which is expanded to the part's shape, stands where this rank's slice does: 1D."""
    if whole.dim() == 0:
        return whole
    expanded = whole.expand(part.size())
    flat = flattened(in_storage_order(expanded, part.stride()))
    return flat[own.start : own.start + own.total.numel()].to(own.total.device)
