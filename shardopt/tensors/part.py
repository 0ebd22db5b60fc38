"""A part: a tensor with a param's full shape outside and this rank's slice inside.

The states in ``state_dict()`` are parts wherever more than one rank holds them. A part answers what its slice or its
description can answer. What reads the rest, saving it above all, asks the other ranks for theirs, which answer without
noticing; what would write is refused by name. ``full_tensor()`` gathers faster, with every rank's help.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError

# What can be done to the slice alone, element by element, with the same meaning for the whole.
_ELEMENTWISE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}

# Wholes whose memory was asked for, by what fetches them: parts of one param (tied weights) then show one memory.
_WHOLES: "weakref.WeakValueDictionary[Callable[[], torch.Tensor], torch.Tensor]" = weakref.WeakValueDictionary()


class Part(torch.Tensor):
    """A rank's slice of one state of one param.

    Attributes:
        local: 1D, the elements ``[start, start + local.numel())`` of the whole in storage order; may be empty.
        start: index of the first local element.
    """

    start: int
    _local: torch.Tensor
    _gather: Callable[[torch.Tensor], torch.Tensor] | None
    _fetch: Callable[[], torch.Tensor] | None = None
    _whole: torch.Tensor | None = None  # in memory of its own, once that was asked for

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        start: int,
        like: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        fetch: Callable[[], torch.Tensor] | None = None,
    ) -> Self:
        """A part shaped as ``like`` (size and strides), outside of ``local``'s dtype where none is given.

        ``gather`` turns every rank's slice into the whole, with the help of all; ``fetch`` asks the other ranks for
        theirs, and gives the whole in host memory.
        """
        part = cls._wrapper(like, dtype or local.dtype, local.device)
        part.start, part._local, part._gather, part._fetch = start, local, gather, fetch
        return part

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__()

    @classmethod
    def _wrapper(cls, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=dtype, device=device
        )
        # C functions that ask no class (torch.utils.dlpack.to_dlpack) then raise, where they would hand out address 0.
        torch._C._set_throw_on_mutable_data_ptr(wrapper)
        return wrapper

    @property
    def local(self) -> torch.Tensor:
        return self._local

    def full_tensor(self) -> torch.Tensor:
        """The whole, on every rank. Every rank must make this call, for the same parts in the same order."""
        if self._gather is None:
            raise StateError(
                "this part is a copy, apart from its optimizer: take one from optimizer.state_dict() and gather it."
            )
        return self._gather(self.local)

    # Whoever writes files without pickle (safetensors) reads memory. A copy of the whole is made for it, on this rank
    # alone and in host memory, which may have room for it. It lives as long as the part, because two tensors at one
    # address are taken for one.

    def data_ptr(self) -> int:
        return self._memory("data_ptr()").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._memory("untyped_storage()").untyped_storage()

    def _memory(self, asked: str) -> torch.Tensor:
        if self._whole is None:
            if self._fetch is None:
                raise refusal(asked)
            self._whole = _WHOLES.get(self._fetch)
        if self._whole is None:
            assert self._fetch is not None
            self._whole = _WHOLES[self._fetch] = self._fetch()
        return self._whole

    # What torch does at the address of a tensor's memory, without asking whether there is any: it would crash.

    def apply_(self, *arguments: Any) -> Self:
        raise self._refused("apply_()")

    def map_(self, *arguments: Any) -> Self:
        raise self._refused("map_()")

    def map2_(self, *arguments: Any) -> Self:
        raise self._refused("map2_()")

    def const_data_ptr(self) -> int:
        raise self._refused("const_data_ptr()")

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        raise self._refused("__dlpack__()")

    def _refused(self, call: str) -> StateError:
        return refusal(call)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"local=[{self.start}:{self.start + self.local.numel()}])"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return Part(self.local.clone(), self.start, self, dtype=self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves the whole, as a plain tensor."""
        if self._fetch is not None:
            return self._fetch().__reduce_ex__(protocol)
        raise StateError(
            f"{self!r} holds this rank's slice only, and a file of it would silently lack the rest. Call "
            "optimizer.consolidate_state_dict(to=0) on every rank first; then optimizer.state_dict() on rank 0 is "
            "plain tensors that torch.save can write."
        )

    # What torch's distributed checkpoint asks of a tensor of which each rank holds something else.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from .dcp import write_items

        return write_items(self, self.local, self.start, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        from .dcp import chunk_list

        return chunk_list(self, self.local, self.start)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from .dcp import shard_at

        return shard_at(self, self.local, self.start, index)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        kinds: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        return cls._answer(function, tuple(arguments), dict(keywords or {}))

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if function not in _ELEMENTWISE:
            return _of_whole(function, arguments, keywords)
        part = next(argument for argument in arguments if isinstance(argument, Part))
        local = tree_map_only(Part, lambda each: each.local, (arguments, keywords))
        local[1].pop("memory_format", None)  # the slice is 1D
        # A copy or a cast is a value of its own, which the ranks' live slices no longer make up.
        live = function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        dtype = local[1].get("dtype") or part.dtype
        fetch = part._fetch
        if fetch is not None and not live:
            fetch = partial(_fetch_as, fetch, dtype)
        return Part(function(*local[0], **local[1]), part.start, part, part._gather if live else None, dtype, fetch)


def _fetch_as(fetch: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return fetch().to(dtype)


def _of_whole(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Whatever only reads, of what the other ranks are asked for. Its result has the part's device."""
    parts = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Part)]
    if writes_to(Part, function, arguments, keywords) or any(part._fetch is None for part in parts):
        raise refusal(function)

    def whole(part: Part) -> torch.Tensor:
        assert part._fetch is not None
        return (part._fetch() if part._whole is None else part._whole).to(part.device)

    arguments, keywords = tree_map_only(Part, whole, (arguments, keywords))
    return function(*arguments, **keywords)


def writes_to(kind: type, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether the function would change an argument of this kind."""
    schema = function._schema.arguments
    named = dict(zip((each.name for each in schema), arguments, strict=False)) | keywords
    written = [named.get(each.name) for each in schema if each.alias_info is not None and each.alias_info.is_write]
    return any(isinstance(leaf, kind) for leaf in tree_leaves(written))


def refusal(function: Any) -> StateError:
    """The error for a function that a part cannot answer."""
    return StateError(
        f"{function} was called on a part, a tensor of which this rank holds a slice only: the result would "
        "silently lack the rest. Call part.full_tensor() on every rank, or read part.local, this rank's slice."
    )


class ParamPart(Part):
    """What a sharded param shows of itself. ``copy_()`` of a whole tensor, which every rank must call, writes it."""

    _write: Callable[[torch.Tensor], None]

    @staticmethod
    def of(part: Part, write: Callable[[torch.Tensor], None]) -> "ParamPart":
        """The same, with a way to write this rank's slice of a whole tensor to where the param is."""
        own = ParamPart(part.local, part.start, part, part._gather, part.dtype, part._fetch)
        own._write = write
        return own

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        part = arguments[0] if arguments else None
        if function is torch.ops.aten.copy_.default and isinstance(part, cls) and not isinstance(arguments[1], Part):
            part._write(arguments[1])
            return part
        return super()._answer(function, arguments, keywords)


class Mask(Part):
    """What ``isfinite``, ``isinf`` and ``isnan`` of a part give: elements of this rank's slice, all() and any() of all.

    Attributes:
        every: whether all elements of the whole are true.
        some: whether any is.
    """

    every: bool
    some: bool

    @staticmethod
    def __new__(cls, local: torch.Tensor, start: int, like: torch.Tensor, every: bool, some: bool) -> Self:
        mask = super().__new__(cls, local, start, like)
        mask.every, mask.some = every, some
        return mask

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        mask = arguments[0]
        if len(arguments) == 1 and isinstance(mask, Mask):
            if function is torch.ops.aten.all.default:
                return torch.scalar_tensor(mask.every, dtype=torch.bool, device=mask.device)
            if function is torch.ops.aten.any.default:
                return torch.scalar_tensor(mask.some, dtype=torch.bool, device=mask.device)
            if function in (torch.ops.aten.logical_not.default, torch.ops.aten.bitwise_not.default):
                return Mask(~mask.local, mask.start, mask, not mask.some, not mask.every)
        return super()._answer(function, arguments, keywords)
