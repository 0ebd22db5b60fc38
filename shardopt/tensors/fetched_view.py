"""A view of a part: it reads as any tensor, and refuses writes, which would go to what was fetched and be lost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError


class Guarded:
    """A tensor of which torch's own C functions must not write the memory: what they do by themselves it does here.

    Without it torch would make this tensor show other memory, or use the address of memory that is not there.
    """

    __slots__ = ()

    @property
    def data(self) -> Any:
        """The same tensor without its history, as ``detach()`` returns it."""
        return self.detach()  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        # Module.to() and cpu() assign the tensor itself where they move nothing. Test: a Lightning trainer's end.
        if id(values) != id(self):
            self._take(values, "a write to .data")

    def apply_(self, *arguments: Any) -> Any:
        return self._call_for_each("apply_", arguments)

    def map_(self, *arguments: Any) -> Any:
        return self._call_for_each("map_", arguments)

    def map2_(self, *arguments: Any) -> Any:
        """Calls a function of three numbers for each element, as torch's own does, or is refused as :meth:`map_` is."""
        return self._call_for_each("map2_", arguments)

    def _take(self, values: torch.Tensor, call: str) -> None:
        """Takes the values of a tensor, which ``call`` gave."""
        raise NotImplementedError

    def _call_for_each(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Answers the method ``name``, which calls a function for each element."""
        raise NotImplementedError


class FetchedView(Guarded, torch.Tensor):
    """What ``part[3]``, ``part.t()`` or ``part.unbind()`` return: views of the whole, which was fetched for them.

    Copies, files and results of functions are plain tensors.
    """

    _plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> Self:
        view: Self = torch.Tensor._make_subclass(cls, plain)
        view._plain = plain
        return view

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    # What C functions refuse for any subclass, or do without a look at the class.

    def numpy(self, *, force: bool = False) -> Any:
        array = self._plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self._plain.tolist()

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._plain.clone().__dlpack__(*arguments, **keywords)  # whoever takes it may write to it

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self._plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain)

    def _take(self, values: torch.Tensor, call: str) -> None:
        _refuse(call)

    def _call_for_each(self, name: str, arguments: tuple[Any, ...]) -> NoReturn:
        _refuse(f"{name}()")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        kinds: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(keywords or {})
        if writes_to(cls, function, tuple(arguments), keywords):
            _refuse(function)
        its = tree_map_only(cls, lambda view: view._plain, (tuple(arguments), keywords))
        return as_views(function, function(*its[0], **its[1]))


def as_views(function: Any, found: Any) -> Any:
    """Returns what a function found, views of its arguments as views that refuse writes."""
    return tree_map_only(torch.Tensor, FetchedView, found) if makes_views(function) else found


def makes_views(function: Any) -> bool:
    """True if a function's result shares memory with its argument; the schema of ``_unsafe_view`` does not say so."""
    return function.is_view or function is torch.ops.aten._unsafe_view.default


@functools.cache
def written_by(function: Any) -> tuple[str, ...]:
    """Returns the names of the arguments that a function writes to."""
    schema = function._schema.arguments
    return tuple(each.name for each in schema if each.alias_info is not None and each.alias_info.is_write)


def by_name(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by their names."""
    return {**dict(zip((each.name for each in function._schema.arguments), arguments, strict=False)), **keywords}


def writes_to(kind: type, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """True if the function would change an argument of this kind."""
    if is_collective(function):
        written: Any = written_by_collective(function, arguments)
    else:
        named = by_name(function, arguments, keywords)
        written = [named.get(name) for name in written_by(function)]
    return any(isinstance(leaf, kind) for leaf in tree_leaves(written))


def is_collective(function: Any) -> bool:
    """True for a collective of ``torch.distributed``."""
    return bool(function.namespace == "c10d")


def written_by_collective(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the tensors to which a collective writes: schemas of collectives do not say so.

    A broadcast of a whole that all ranks read alike writes nothing.
    """
    name = function._schema.name
    return arguments[0] if arguments and name.endswith("_") and name != "c10d::broadcast_" else ()


def _refuse(call: object) -> NoReturn:
    raise StateError(
        "write to the param (at stage 3 in `with optimizer.unsharded():`), assign its state, or write to what "
        f"part.full_tensor() returned, which every rank calls: {call} would change a view of a tensor of which this "
        "rank holds a slice only, and so a copy that nothing reads."
    )


def edit_each(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Makes the edits of a ``_foreach_`` function one by one; NotImplemented if it makes none."""
    method = function._schema.name.removeprefix("aten::_foreach_")
    if not method.endswith("_") or not hasattr(torch.Tensor, method):
        return NotImplemented
    named = by_name(function, arguments, keywords)
    (tensors, *others), names = named.values(), list(named)[1:]
    for number, tensor in enumerate(tensors):
        each = [value[number] if isinstance(value, list | tuple) else value for value in others]
        its = dict(zip(names, each, strict=True))
        if method in ("addcmul_", "addcdiv_") and "scalars" in its:
            scalar = its.pop("scalars")
            its["value"] = float(scalar[number]) if isinstance(scalar, torch.Tensor) else scalar
        by_place = [its.pop(name) for name in list(its) if name not in ("alpha", "value")]
        getattr(tensor, method)(*by_place, **its)
    return None
