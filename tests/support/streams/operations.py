"""Every ATen operation is an action: of the current stream if one of its tensors is on the device, else of the host."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .book import Book, length, span
from .counts import KERNELS
from .record import COMPUTE, Cost

# They touch no values.
_MAKE_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "_unsafe_view"}
# The host waits for what they return, or for its size.
_ANSWER_THE_HOST = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "item"}
# They take indices, numbers or values of the host as well.
_TAKE_BOTH = {"copy_", "_to_copy", "index", "index_put_", "set_"}
# They read a part of what they are given, as large as what they make.
_TAKE_A_PART = {"embedding", "index", "gather", "index_select"}
_SET = {"copy_", "zero_", "fill_"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION = "_scaled_dot_product_"


class Operations(TorchDispatchMode):
    """Within, operations are written down."""

    def __init__(self, book: Book):
        super().__init__()
        self._book = book

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        for each in types:  # a mode is not seen within itself: what a part does is to be seen too
            if each.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                with self:
                    return each.__torch_dispatch__(function, types, arguments, keywords)
        found = function(*arguments, **keywords)
        _Operation(self._book, function, arguments, keywords, found).write_down()
        return found


class _Schema(NamedTuple):
    """What is the same in each call of an operation; asked of torch each time it was a third of all that this takes."""

    name: str
    arguments: tuple[tuple[str, bool], ...]  # names, and whether they are written
    is_view: bool


@functools.cache
def _schema_of(function: Any) -> _Schema:
    found = function._schema
    written = [each.alias_info is not None and each.alias_info.is_write for each in found.arguments]
    return _Schema(
        found.name.removeprefix("aten::"),
        tuple(zip((each.name for each in found.arguments), written, strict=True)),
        any(each.alias_info is not None and not each.alias_info.is_write for each in found.returns),
    )


class _Operation:
    """One call."""

    def __init__(self, book: Book, function: Any, arguments: Any, keywords: Any, found: Any):
        self._book, self._schema = book, _schema_of(function)
        self._name = self._schema.name
        self._arguments, self._keywords, self._found = arguments, keywords, found

    def write_down(self) -> None:
        if self._schema.is_view:
            return
        read, written = self._inputs()
        book, makes = self._book, self._book.makes_on_device
        there = [each for each in (*read, *written) if book.is_on_device(each)]
        is_device = bool(there) if makes is None or read or written else makes
        fresh = [each for each in _tensors(self._found) if not any(each is one for one in written)]
        for each in fresh:
            if self._is_new(each):
                book.region(each, is_device)
        if self._name in _MAKE_MEMORY:
            return
        if not is_device:
            self._on_host(read, [*written, *fresh])
            return
        if self._name == "copy_" and len(there) == 1:
            book.copy(written[0], read[0], blocking=not self._value_of("non_blocking"))
            return
        strangers = [each for each in read if each.dim() and not book.is_on_device(each)]
        if strangers and self._name not in _TAKE_BOTH:
            raise RuntimeError(f"Expected all tensors to be on the same device: {self._name} of {strangers[0].shape}")
        book.act(self._name, map(span, read), map(span, (*written, *fresh)), cost=self._cost(read, written, fresh))
        if self._name in _ANSWER_THE_HOST:
            book.host_waits(book.stream.clock)
        else:
            book.counts.note(KERNELS)

    def _cost(self, read: list[Tensor], written: list[Tensor], fresh: list[Tensor]) -> Cost:
        """What is written in place is read as well, but by those that only set it."""
        out = length(map(span, (*written, *fresh)))
        if not out:
            return Cost(COMPUTE)
        if self._name in _TAKE_A_PART:
            return Cost(COMPUTE, 2 * out)
        again = 0 if self._name in _SET else length(map(span, written))
        return Cost(COMPUTE, length(map(span, read)) + out + again, _flops(self._name, read))

    def _is_new(self, tensor: Tensor) -> bool:
        return self._book.regions.known(tensor.untyped_storage()) is None

    def _on_host(self, read: list[Tensor], written: list[Tensor]) -> None:
        for each in (*read, *written):
            self._book.region(each)
        self._book.act(self._name, map(span, read), map(span, written), self._book.host)

    def _value_of(self, name: str) -> Any:
        index = [each for each, _ in self._schema.arguments].index(name)
        return self._arguments[index] if index < len(self._arguments) else self._keywords.get(name)

    def _inputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Those that are read, and those that are written."""
        read: list[Tensor] = []
        written: list[Tensor] = []
        for index, (name, is_written) in enumerate(self._schema.arguments):
            value = self._arguments[index] if index < len(self._arguments) else self._keywords.get(name)
            (written if is_written else read).extend(_tensors(value))
        return read, written


def _flops(name: str, read: list[Tensor]) -> int:
    """Of products of matrices; of attention two products forward and five backward."""
    if name in _PRODUCTS:
        left, right = read[-2:]
        return 2 * left.numel() * right.shape[-1]
    if name.startswith(_ATTENTION) or name.startswith("_flash_attention"):
        query, key = (read[1:] if "backward" in name else read)[:2]
        return (10 if "backward" in name else 4) * query.numel() * key.shape[-2]
    return 0


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        return iter((values,) if values.layout is torch.strided else ())
    if values is None or isinstance(values, int | float | str):
        return iter(())
    return (each for each in tree_leaves(values) if isinstance(each, Tensor) and each.layout is torch.strided)
