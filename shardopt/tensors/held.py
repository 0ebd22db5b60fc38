"""A held tensor: what a script holds of an optimizer's record. It shows what is there now, and a write reaches it.

It has no memory of its own. What reads it gets the record's values, decoded or fetched where they are not kept as they
look. What writes to it changes those values, which go back into the record when the write ends. A view (``held[3]``,
``held.t()``) is a held tensor too: it remembers the steps that lead to it from the whole::

    held        record --- read ---> values                                      write ends ---> record
    held[3]     record --- read ---> values --- select(0, 3) ---> row: zero_()   write ends ---> record

Copies, files and results of functions are plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch.utils._pytree import tree_leaves

from ..errors import StateError
from .fetched_view import Guarded, by_name, is_collective, makes_views, written_by, written_by_collective
from .part import Part

_aten = torch.ops.aten


class Source(Protocol):
    """The record's side of a held tensor. Values have the shape of the whole.

    Attributes:
        is_memory: the values that ``read`` and ``open`` return are the record's own memory.
        is_whole: this rank writes every element; else only its slice, and what is elsewhere is not real.
    """

    @property
    def is_memory(self) -> bool: ...
    @property
    def is_whole(self) -> bool: ...

    def read(self) -> torch.Tensor:
        """Returns the values of now.

        Raises:
            StateError: what is held has ended.
        """

    def open(self) -> torch.Tensor:
        """Returns the values that a write is to change. Raises as ``read``."""

    def note(self, function: Any, arguments: Sequence[Any]) -> None:
        """Notes a write, which other ranks are to make as well."""

    def store(self, changed: torch.Tensor) -> None:
        """Takes values, which ``open`` returned, into the record."""


class _Step(NamedTuple):
    """A step from a tensor to a view of it."""

    function: Any
    arguments: tuple[Any, ...]  # but for the tensor
    keywords: dict[str, Any]
    number: int | None  # in the list of views that the function returns

    def __call__(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """Returns the view; ``first``: where the whole begins in its storage."""
        arguments = self.arguments
        if self.function is _aten.as_strided.default:  # its offset is one of the storage
            size, stride, *rest = arguments
            offset = rest[0] if rest and rest[0] is not None else tensor.storage_offset() - first
            arguments = size, stride, offset + first
        found = self.function(tensor, *arguments, **self.keywords)
        return found if self.number is None else found[self.number]  # type: ignore[no-any-return]


class HeldTensor(Guarded, torch.Tensor):
    """A tensor that shows what a record has now, and whose writes reach the record."""

    _source: Source
    _steps: tuple[_Step, ...] = ()
    _root: torch.Tensor | None = None  # of a view: what was handed out, whose life tells that somebody holds it
    _kept: torch.Tensor | None = None  # whose address was asked for

    @staticmethod
    def __new__(cls, source: Source, like: torch.Tensor, steps: tuple[_Step, ...] = ()) -> Self:
        """Makes a tensor that looks as ``like``."""
        return cls.of(source, like.size(), like.stride(), like.dtype, like.device, steps, int(like.storage_offset()))

    @classmethod
    def of(
        cls,
        source: Source,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        steps: tuple[_Step, ...] = (),
        offset: int = 0,
    ) -> Self:
        held: Self = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(held)  # else C functions would take address 0
        held._source, held._steps, held._root = source, steps, None
        return held

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    @property
    def source(self) -> Source:
        """The record's side."""
        return self._source

    @property
    def is_view(self) -> bool:
        """True if this is a view of what was handed out."""
        return bool(self._steps)

    def plain(self) -> torch.Tensor:
        """Returns the values of now as a plain tensor, which may be the record's memory."""
        return self._of(self._source.read())

    def _of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns what this view is of the values of the whole."""
        if self._steps:
            first = int(whole.storage_offset())
            for step in self._steps:
                whole = step(whole, first)
        return whole

    def write(self, name: str, call: Callable[[torch.Tensor], object]) -> None:
        """Makes ``call``, which changes the plain tensor that it is given, on the record."""
        whole = self._source.open()
        call(self._of(whole))
        self._source.note(name, self._steps_in_words)
        self._source.store(whole)

    @property
    def _steps_in_words(self) -> list[str]:
        return [f"{step.function} {step.arguments} {step.keywords} {step.number}" for step in self._steps]

    # -- what C functions refuse for any subclass, or do without a look at the class -----------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """Returns an array; it can be written where the record keeps these very values in memory."""
        array, source = self.plain().numpy(force=force), self._source
        if not (source.is_memory and source.is_whole):
            array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        plain, source = self.plain(), self._source
        if not (source.is_memory and source.is_whole):
            plain = plain.clone()  # whoever takes it may write to it
        return plain.__dlpack__(*arguments, **keywords)

    def data_ptr(self) -> int:
        return self._memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._memory().untyped_storage()

    def storage_offset(self) -> int:
        return int(self._memory().storage_offset() if self._source.is_memory else super().storage_offset())

    def _memory(self) -> torch.Tensor:
        """Returns what those see who read memory: the record's, or a copy that lives as long as this tensor."""
        if not self._source.is_memory:
            self._kept = self.plain().clone() if self._kept is None else self._kept.copy_(self.plain())
            return self._kept
        return self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = found = self.plain().clone()
        return found

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self.plain())
        except StateError:
            return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, ended)"

    def set_(self, source: Any = None, *arguments: Any) -> Self:
        """Takes the values of a tensor of this shape and dtype; it does not show that tensor's memory from then on."""
        if arguments or not isinstance(source, torch.Tensor):
            _refuse("set_() of a storage, or of nothing")
        self._take(source, "set_()")
        return self

    def _take(self, values: torch.Tensor, call: str) -> None:
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            _refuse(
                f"a tensor of shape {tuple(values.shape)}, {values.dtype} on {values.device} in place of its own, of "
                f"shape {tuple(self.shape)}, {self.dtype} on {self.device},"
            )
        with torch.no_grad():
            self.copy_(values)

    def _call_for_each(self, name: str, arguments: tuple[Any, ...]) -> Self:
        its = mapped(arguments, HeldTensor, HeldTensor.plain)
        self.write(name, lambda plain: getattr(plain, name)(*its))
        return self

    # -- everything else ---------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        kinds: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments, keywords = tuple(arguments), dict(keywords or {})
        if makes_views(function) or function is _aten.detach.default or function is _aten.alias.default:
            return view_of(arguments[0], arguments[0]._source, arguments[0]._steps, function, arguments[1:], keywords)
        if written_by(function):
            return write_to(function, arguments, keywords)
        if is_collective(function):
            _check_collective(function, arguments)
        its = mapped(arguments, HeldTensor, HeldTensor.plain)
        return function(*its, **mapped(keywords, HeldTensor, HeldTensor.plain))


def view_of(
    tensor: torch.Tensor,
    source: Source,
    steps: tuple[_Step, ...],
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """Returns the view, or the list of views, that ``function`` makes of a tensor which these steps lead to."""
    offset = int(torch.Tensor.storage_offset(tensor))  # within the whole
    shape = torch.empty(0, dtype=tensor.dtype, device="meta").as_strided(tensor.size(), tensor.stride(), offset)
    found = function(shape, *arguments, **keywords)

    def held(like: torch.Tensor, index: int | None) -> HeldTensor:
        its = (*steps, _Step(function, arguments, keywords, index))
        place = tensor.device, its, int(like.storage_offset())
        view = HeldTensor.of(source, like.size(), like.stride(), like.dtype, *place)
        view._root = getattr(tensor, "_root", None)
        if view._root is None:
            view._root = tensor
        return view

    if isinstance(found, torch.Tensor):
        return held(found, None)
    return type(found)(held(each, index) for index, each in enumerate(found))


def write_to(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], noted: Sequence[Any] | None = None
) -> Any:
    """Calls a function that writes to held tensors, and takes what it wrote into their records.

    Args:
        noted: the arguments as other ranks have them; None: these.
    """
    named, names = by_name(function, arguments, keywords), written_by(function)
    written: list[HeldTensor] = []
    mapped([named.get(name) for name in names], HeldTensor, written.append)
    if torch.Tag.inplace_view in function.tags and written:
        _refuse(function)
    if not all(each._source.is_whole for each in written):
        leaves = tree_leaves((arguments, keywords))
        is_out = all(each.is_out for each in function._schema.arguments if each.name in names)
        check_by_element(function, written, leaves, is_out)
    wholes: dict[int, torch.Tensor] = {}
    for each in written:
        if id(each._source) not in wholes:
            wholes[id(each._source)] = each._source.open()
    given: list[tuple[torch.Tensor, HeldTensor]] = []

    def plain(held: HeldTensor) -> torch.Tensor:
        whole = wholes.get(id(held._source))
        found = held._of(held._source.read() if whole is None else whole)
        given.append((found, held))
        return found

    found = function(*mapped(arguments, HeldTensor, plain), **mapped(keywords, HeldTensor, plain))
    for values, held in given:
        if values.shape != held.shape:
            _refuse(f"{function}, which resizes it,")
    stored = set()
    for each in written:
        if id(each._source) not in stored:
            stored.add(id(each._source))
            told = [*each._steps_in_words, noted or (arguments, keywords)]
            each._source.note(function, told)
            each._source.store(wholes[id(each._source)])
    back = {id(values): held for values, held in given}
    return mapped(found, torch.Tensor, lambda tensor: back.get(id(tensor), tensor))


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns arguments, or results, of a function with each tensor of a kind changed. torch's own takes 50 us."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([mapped(each, kind, change) for each in value])
    if isinstance(value, dict):
        return {name: mapped(each, kind, change) for name, each in value.items()}
    return value


# Functions, besides those that torch marks so, of which each written element depends on no other one of the tensor.
_BY_ELEMENT = {
    *(_aten.copy_, _aten.fill_, _aten.zero_, _aten.masked_fill_, _aten.masked_scatter_, _aten.fill_diagonal_),
    *(_aten.index_put_, _aten._index_put_impl_, _aten.index_fill_, _aten.index_copy_, _aten.index_add_, _aten.put_),
    *(_aten.scatter_, _aten.scatter_add_, _aten.tril_, _aten.triu_, _aten.uniform_, _aten.normal_, _aten.random_),
    *(_aten.bernoulli_, _aten.exponential_, _aten.geometric_, _aten.log_normal_, _aten.cauchy_),
}


@functools.cache
def is_by_element(function: Any) -> bool:
    """True if each element that a function writes, or returns, depends on no other element of a tensor."""
    if torch.Tag.pointwise in function.tags:
        return True
    name = function._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        single = getattr(_aten, name.removeprefix("_foreach_"), None)
        return single is not None and any(is_by_element(getattr(single, each)) for each in single.overloads())
    return function.overloadpacket in _BY_ELEMENT


def check_by_element(function: Any, written: Sequence[Any], leaves: Sequence[Any], is_out: bool) -> None:
    """Raises StateError if a write to a tensor of which this rank has a slice needs elements that it does not have."""
    if not is_out and not is_by_element(function):
        _refuse_slice(f"{function} looks at more than one element")
    steps = {id(each._source): each._steps for each in written}
    for leaf in leaves:
        if isinstance(leaf, Part):
            _refuse_slice(f"{function} reads a part that is cut otherwise, or other elements of it")
        if not isinstance(leaf, HeldTensor) or leaf._source.is_whole:
            continue
        if steps.get(id(leaf._source)) is not leaf._steps and steps.get(id(leaf._source)) != leaf._steps:
            _refuse_slice(f"{function} reads another tensor, or other elements, of which this rank has a slice")


def _check_collective(function: Any, arguments: tuple[Any, ...]) -> None:
    for each in tree_leaves(written_by_collective(function, arguments)):
        if isinstance(each, HeldTensor) and not each._source.is_memory:
            _refuse_slice(f"{function} would write to a copy of it")


def _refuse_slice(why: str) -> NoReturn:
    raise StateError(
        "read it whole first (held.full_tensor() on every rank), or write by elements: this rank has a slice of this "
        f"tensor, and {why}, so the result would be that of a part. Nothing was written."
    )


def _refuse(call: object) -> NoReturn:
    raise StateError(
        "write values in place (copy_(), an index), or assign optimizer.state[param][name] = tensor: this tensor shows "
        f"what the optimizer's record holds, and {call} would give it another shape or other memory, which no step "
        "reads. Nothing was written."
    )
