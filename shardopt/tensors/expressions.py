"""Expressions of parts by element: the result is a part, of which this rank computes its slice. Nothing is fetched.

``zeros_like(part)``, ``part * 2``, ``part.abs() + whole``: each element of the result depends on the same element of
the arguments, so a rank's slice of it needs the rank's slices alone. The rest is computed when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .edits import fingerprint, told
from .fetched_view import edit_each
from .held import mapped
from .later import Later
from .noise import Noise, noise_of
from .part import Part, is_cut_alike
from .strides import flattened, in_storage_order

if TYPE_CHECKING:
    from .whole_memory import WholeMemory

_aten = torch.ops.aten

_ALIKE = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like}
_NEW = {_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty}
_COPYING = {_aten.clone, _aten._to_copy}
_FILLING = {_aten.zero_, _aten.fill_, _aten.copy_}
_BY_PART = {_aten.bernoulli.default, _aten.bernoulli.Tensor, _aten.bernoulli_.Tensor}  # with a probability each
_ALIASING = {_aten.detach, _aten.alias}
_MOST_WORDS = 160  # letters; of longer ones a hash is left


class Made:
    """How the values of a result came about: aliases share it.

    Attributes:
        later: computes the whole when it is read; None: nothing does.
        words, fingerprint: as of a :class:`Part`.
        whole: the memory of the whole, once an address was asked for; None again after a write.
    """

    __slots__ = ("fingerprint", "later", "whole", "words")

    def __init__(self, later: Callable[[], Tensor] | None, words: str, fingerprint: Tensor | None = None):
        self.later, self.words, self.fingerprint = later, words, fingerprint
        self.whole: WholeMemory | None = None


class PartResult(Part):
    """The result of an expression of parts. A write by element changes this rank's slice of it, and no record."""

    _made: Made

    @staticmethod
    def __new__(cls, local: Tensor, like: Part, made: Made) -> Self:
        """Makes a part that is cut as ``like``."""
        gather = like._gather_slices
        result = Part.__new__(cls, local, like.start, like, gather, gather_slices=gather)
        result._made, result.draws = made, like.draws
        return result

    @property
    def _fetch(self) -> Callable[[], Tensor] | None:  # type: ignore[override]
        return self._made.later

    @property
    def _whole(self) -> WholeMemory | None:
        return self._made.whole

    @_whole.setter
    def _whole(self, memory: WholeMemory | None) -> None:
        self._made.whole = memory

    @property
    def words(self) -> str:  # type: ignore[override]
        return self._made.words

    @property
    def fingerprint(self) -> Tensor | None:  # type: ignore[override]
        return self._made.fingerprint

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if function.overloadpacket in _ALIASING and isinstance(arguments[0], PartResult):
            return PartResult(arguments[0].local, arguments[0], arguments[0]._made)
        if function is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(function, *arguments)
        if function._schema.name.startswith("aten::_foreach_"):
            found = edit_each(function, arguments, keywords)
            if found is not NotImplemented:
                return found
        found = expression(function, arguments, keywords)
        if found is not None:
            return found
        if any(isinstance(leaf, Part) and leaf.is_shown for leaf in tree_leaves((arguments, keywords))):
            return NotImplemented  # what it shows may be written
        return super()._answer(function, arguments, keywords)


def _unscale(function: Any, tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Answers a GradScaler about gradients that a script assigned: each rank looks at all elements of them."""
    results = [each for each in tensors if isinstance(each, PartResult)]
    plain = [each for each in tensors if not isinstance(each, PartResult)]
    if not all([bool(each.isfinite().all()) for each in results]):  # a list: all ranks read all of them
        found_inf.fill_(1.0)
    if plain:
        function(plain, found_inf, inverse)
    factor = inverse.item()  # once: on a GPU it waits for the device
    for each in results:
        each.mul_(factor)


def expression(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the result of a function by element as a part; None if it is another function, or of other cuts."""
    packet = function.overloadpacket
    parts = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Part)]
    if packet in _NEW and len(parts) == 1:
        return function(torch.empty(0, dtype=parts[0].dtype, device=parts[0].device), *arguments[1:], **keywords)
    if torch.Tag.nondeterministic_seeded in function.tags and isinstance(arguments[0], Part):
        return _drawn(function, arguments, keywords)
    writes = any(each.alias_info is not None for each in function._schema.arguments)
    is_pointwise = torch.Tag.pointwise in function.tags
    if not is_pointwise and packet not in (_FILLING if writes else _ALIKE | _COPYING):
        return None
    keywords = {name: value for name, value in keywords.items() if name != "memory_format"}
    arguments, keywords = mapped(arguments, Tensor, _plain), mapped(keywords, Tensor, _plain)
    if writes:
        return _written(function, arguments, keywords)
    like = max(parts, key=lambda part: part.dim())
    local = _locally(like, arguments, keywords)
    if local is None:
        return None
    own = function(*local[0], **local[1])
    if not isinstance(own, Tensor) or own.shape != like.elements().shape:
        return None
    if packet in _ALIKE:
        # Of the like, its form alone: what is kept for it would be kept for nothing.
        form = like.size(), like.stride(), like.dtype
        keywords.pop("device", None)
        return PartResult(own, like, Made(partial(_alike, function, form, arguments[1:], keywords), packet.__name__))
    return PartResult(own, like, _made(function, arguments, keywords, own.dtype))


def _drawn(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    like, packet = arguments[0], function.overloadpacket
    writes = any(each.alias_info is not None for each in function._schema.arguments)
    if writes and not isinstance(like, PartResult):
        return None
    if packet is _aten.native_dropout:
        dropped = arguments[1] if arguments[2] is not False else 0.0
        kept = torch.rand_like(like) >= dropped
        return like * kept / (1 - dropped if dropped < 1 else 1) if dropped else like.clone(), kept
    if function in _BY_PART:
        found: Tensor = torch.rand_like(like) < arguments[-1]
        return like.copy_(found) if writes else found.to(like.dtype)
    noise = noise_of(function, arguments, keywords, like)
    if noise is None:
        return None
    result = noise_part(noise, like)
    return like.copy_(result) if writes else result


def noise_part(noise: Noise, like: Part) -> PartResult:
    """Returns noise as a part that is cut as ``like``."""
    own = noise.slice(like.start, like.elements().numel(), like.device)
    later = partial(noise.whole, like.size(), like.stride(), torch.device("cpu"))
    return PartResult(own, like, Made(later, noise.words))


def scattered(part: Part) -> Tensor:
    """Returns this rank's elements of a part in their places, and zeros elsewhere."""
    whole = torch.zeros(part.size().numel(), dtype=part.dtype, device=part.device)
    own = part.elements()
    whole[part.start : part.start + own.numel()] = own
    return whole.as_strided(part.size(), part.stride())


def _made(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], dtype: torch.dtype) -> Made:
    wholes: dict[int, Tensor] = {}
    known: list[Tensor] = []
    for leaf in tree_leaves((arguments, keywords)):
        if isinstance(leaf, Part):
            known += [] if leaf.fingerprint is None else [leaf.fingerprint]
        elif isinstance(leaf, Tensor) and id(leaf) not in wholes:
            wholes[id(leaf)] = fingerprint(leaf)
            known.append(wholes[id(leaf)])
    words = told(function, arguments, keywords)
    if len(words) > _MOST_WORDS:
        words = f"{function}(...) {hashlib.blake2b(words.encode(), digest_size=8).hexdigest()}"
    later = Later.of(function, arguments, keywords, dtype, wholes)
    return Made(later, words, _folded(known))


def _folded(prints: Sequence[Tensor]) -> Tensor | None:
    found: Tensor | None = None
    for each in prints:
        found = each if found is None else found * 1000003 + each.to(found.device)
    return found


def _written(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Part | None:
    target = arguments[0]
    if not isinstance(target, PartResult) or any(isinstance(value, Part) for value in keywords.values()):
        return None
    local = _locally(target, arguments, keywords)
    if local is None:
        return None
    # Of the values of before. What is overwritten is no part of it: a buffer that takes a gradient in each step
    # (buffer.copy_(param.grad)) would keep those of all steps.
    if function.overloadpacket in _FILLING:
        made = _made(function, (torch.empty_like(target), *arguments[1:]), keywords, target.dtype)
    else:
        made = _made(function, arguments, keywords, target.dtype)
    function(*local[0], **local[1])
    its = target._made
    its.later, its.words, its.fingerprint, its.whole = made.later, made.words, made.fingerprint, None
    return target


def _locally(like: Part, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the arguments with slices in place of tensors; None if one is cut otherwise."""

    def fits(tensor: Any) -> bool:
        if isinstance(tensor, Part):
            return is_cut_alike(tensor, like)
        return not isinstance(tensor, Tensor) or tensor.dim() <= like.dim()

    if not all(map(fits, tree_leaves((arguments, keywords)))):
        return None

    def local(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Part):
            return tensor.elements()
        return _slice(tensor, like) if tensor.dim() else tensor

    try:
        return mapped(arguments, Tensor, local), mapped(keywords, Tensor, local)
    except RuntimeError:  # it cannot be expanded to the part's shape
        return None


def _plain(tensor: Tensor) -> Tensor:
    """Returns a tensor whose values stay what they are unless the script writes them."""
    is_plain = isinstance(tensor, Part) or type(tensor) in (Tensor, torch.nn.Parameter)
    return tensor if is_plain else tensor.detach().clone()


def _slice(tensor: Tensor, like: Part) -> Tensor:
    whole = flattened(in_storage_order(tensor.detach().expand(like.size()), like.stride()))
    return whole[like.start : like.start + like.elements().numel()]


def _alike(function: Any, form: tuple[Any, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    size, stride, dtype = form
    like = torch.empty_strided(size, stride, dtype=dtype)
    return function(like, *arguments, **keywords)  # type: ignore[no-any-return]
