"""Views of a gradient of which this rank holds a slice: a write through one changes the slice.

They are held tensors, as views of states are: read when a value is asked for, and each rank writes its own slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import StateError
from .edits import told, told_wholes
from .gradient_edits import in_dtype
from .gradient_slice import change
from .held import HeldTensor, view_of
from .strides import flattened, in_storage_order


class GradientSource:
    """The gradient's side of its views. They keep the part alive; this does not, or the part would keep itself."""

    is_memory = is_whole = False

    def __init__(self, part: Any):
        self._part = weakref.ref(part)
        self._noted: tuple[str, list[Tensor]] = "", []

    @property
    def part(self) -> Any:
        """The part whose views these are."""
        part = self._part()
        assert part is not None
        return part

    def read(self) -> Tensor:
        """Returns the whole of now, which this rank alone reads from the others."""
        part = self.part
        return part.read_whole().to(part.device)  # type: ignore[no-any-return]

    def open(self) -> Tensor:
        """Returns this rank's slice in its places, and zeros elsewhere, for a write."""
        part = self.part
        if torch._C._current_graph_task_id() >= 0:
            raise StateError(
                "write to it after backward: other ranks may not have come to this gradient, and would not make this "
                f"write. It was made in backward to a view of {part!r}."
            )
        whole, own = torch.zeros(part.whole_numel, dtype=part.dtype, device=part.device), part.elements()
        whole[part.start : part.start + own.numel()] = own
        return part.shaped(whole)  # type: ignore[no-any-return]

    def note(self, function: Any, arguments: Sequence[Any]) -> None:
        """Notes a write, which other ranks are to make as well."""
        leaves = tree_leaves(arguments)
        wholes = [each for each in leaves if not isinstance(each, HeldTensor)]
        self._noted = told(function, leaves, {}), told_wholes(wholes)

    def store(self, changed: Tensor) -> None:
        """Takes this rank's slice of what was written."""
        part, (text, wholes) = self.part, self._noted
        own = part.whole_slice()
        values = flattened(in_storage_order(changed, part.stride()))[part.start : part.start + own.total.numel()]
        change(own, in_dtype(part.dtype, lambda mean: mean.copy_(values)), f"a view: {text}", wholes)


def gradient_view(part: Any, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the view, or the list of views, that ``function`` makes of a part."""
    if part.views is None:
        part.views = GradientSource(part)
    return view_of(part, part.views, (), function, arguments, keywords)
