"""A held part: what a script holds of a state that lies on several ranks. A write changes this rank's slice of it.

It shows what is there now. Each rank writes its own slice, at once and without a message, so every rank must make the
write. A write of elements needs no others: ``mul_``, an index, a mask. Views of it are held tensors, whose values are
fetched when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from .expressions import expression, noise_part, scattered
from .fetched_view import by_name, makes_views, written_by
from .held import HeldTensor, Source, mapped, view_of, write_to
from .noise import noise_of
from .part import Part, is_cut_alike

if TYPE_CHECKING:
    from .whole_memory import WholeMemory

_aten = torch.ops.aten


class SliceSource(Source, Protocol):
    """The record's side of a held part."""

    @property
    def start(self) -> int:
        """The index of the first local element."""

    def elements(self) -> torch.Tensor:
        """Returns this rank's elements of now, 1D."""

    def consolidated(self) -> torch.Tensor | None:
        """Returns the whole of now, in host memory, if it was consolidated on this rank; None otherwise."""

    def fetch(self) -> Callable[[], torch.Tensor]:
        """Returns what reads the whole as it is now, from this rank alone."""

    def draw(self) -> str:
        """Returns the name of the next noise for the param."""

    def gather(self) -> torch.Tensor:
        """Collective: returns the whole."""

    def gather_slices(self, local: torch.Tensor) -> torch.Tensor:
        """Collective: returns the whole of what every rank passes as its slice."""


class HeldPart(Part):
    """A part that shows what the record has now, and whose writes reach the record."""

    is_shown = True
    _source: SliceSource
    _root: torch.Tensor | None = None  # as of a held tensor

    @staticmethod
    def __new__(cls, source: SliceSource, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Self:
        """Makes a part with the size and strides of ``like``."""
        part = cls._wrapper(like, dtype, device)
        part._source = source
        return part

    @property
    def source(self) -> SliceSource:
        """The record's side."""
        return self._source

    @property
    def is_view(self) -> bool:
        """False: its views are held tensors."""
        return False

    # What a part keeps, of now.

    @property
    def local(self) -> torch.Tensor:
        return self._source.elements()

    @property
    def start(self) -> int:  # type: ignore[override]
        return self._source.start

    @property
    def _fetch(self) -> Callable[[], torch.Tensor]:  # type: ignore[override]
        return self._source.fetch()

    def _gather(self, _: torch.Tensor) -> torch.Tensor:
        return self._source.gather()

    @property
    def draws(self) -> Callable[[], str] | None:  # type: ignore[override]
        return self._source.draw

    @property
    def _gather_slices(self) -> Callable[[torch.Tensor], torch.Tensor]:  # type: ignore[override]
        return self._source.gather_slices

    def read_whole(self) -> torch.Tensor:
        return self._fetch()

    def _memory(self, asked: str) -> WholeMemory:
        kept, self._whole = self._whole, None  # of another moment, unless it is found again
        found = super()._memory(asked)
        del kept
        return found

    def plain(self) -> Part:
        """Returns a part with the values of now, which stays when the record is replaced."""
        return Part(self.local, self.start, self, dtype=self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        torch.Tensor.__setitem__(self, index, value)

    def _take(self, values: torch.Tensor, call: str) -> None:
        self._whole_view()._take(values, call)

    def set_(self, *arguments: Any) -> Self:
        """Takes the values of a tensor of this shape and dtype; it does not show that tensor's memory from then on."""
        self._whole_view().set_(*arguments)
        return self

    def _call_for_each(self, name: str, arguments: tuple[Any, ...]) -> Self:
        self._whole_view()._call_for_each(name, arguments)
        return self

    def _whole_view(self) -> HeldTensor:
        view = HeldTensor.of(self._source, self.size(), self.stride(), self.dtype, self.device)
        view._root = self
        return view

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if function in (_aten.detach.default, _aten.alias.default):
            part = arguments[0]
            alias = HeldPart(part._source, part, part.dtype, part.device)
            alias._root = part if part._root is None else part._root
            return alias
        if makes_views(function) and isinstance(arguments[0], HeldPart):
            return view_of(arguments[0], arguments[0]._source, (), function, arguments[1:], keywords)
        named = by_name(function, arguments, keywords)
        written: list[HeldPart] = []
        mapped([named.get(name) for name in written_by(function)], HeldPart, written.append)
        if written:
            return cls._write_by(function, arguments, keywords, written)
        if function.overloadpacket in (_aten.clone, _aten._to_copy):
            # A plain tensor, which is the script's own: it can be saved after later steps, and keeps no record.
            whole = arguments[0].source.consolidated()
            if whole is not None:
                return function(whole.to(arguments[0].device), *arguments[1:], **keywords)
        found = expression(function, arguments, keywords)
        if found is not None:
            return found
        return super()._answer(function, arguments, keywords)

    @classmethod
    def _write_by(
        cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], written: list[HeldPart]
    ) -> Any:
        """Calls a function on views of the wholes, and returns the parts in place of these views."""
        views: dict[int, HeldPart] = {}
        target = written[0]
        if torch.Tag.nondeterministic_seeded in function.tags and target is arguments[0]:
            noise = noise_of(function, arguments, keywords, target)
            if noise is not None:
                return target.copy_(noise_part(noise, target))
        takes_slices = len(written) == 1 and _takes_slices(function, arguments)

        def view(part: Part) -> torch.Tensor:
            if not any(part is each for each in written):
                return scattered(part) if takes_slices and is_cut_alike(part, target) else _whole_view_of(part)
            found = target._whole_view() if part is target else _whole_view_of(part)
            views[id(found)] = part  # type: ignore[assignment]
            return found

        its = mapped(arguments, Part, view), mapped(keywords, Part, view)
        found = write_to(function, *its, (arguments, keywords))
        return mapped(found, HeldTensor, lambda tensor: views.get(id(tensor), tensor))


def _takes_slices(function: Any, arguments: tuple[Any, ...]) -> bool:
    """True if a write needs of another part of the same cut the elements that this rank writes."""
    if function.overloadpacket in (_aten.index_put_, _aten._index_put_impl_):
        return bool(arguments[2].numel() == 1)  # a mask and a number
    return torch.Tag.pointwise in function.tags or function.overloadpacket in (_aten.copy_, _aten.masked_fill_)


def _whole_view_of(part: Part) -> torch.Tensor:
    return part._whole_view() if isinstance(part, HeldPart) else part
