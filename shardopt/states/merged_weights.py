"""Weights that a user's function makes of those of a module, as they go out: adapters merged into what they adapt.

The function is asked for each module, the outermost first, with the module's weights on the meta device. It returns the
tensors that go out in their place, or None, and is then asked for the modules inside. So names, shapes and dtypes are
known before anything is gathered. The weights of a module follow each other in a stream; the function gets them once
all are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..domain.param_names import without_wrappers

if TYPE_CHECKING:
    from .weight_stream import WeightStream
    from .weights import Weight

Merge = Callable[[nn.Module, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]


@dataclass(frozen=True, eq=False)
class MergedModule:
    """A module whose weights go out merged.

    Attributes:
        name: as the stream has it.
        locals: the names in the stream of its weights -> their names in the module.
        made: what the function made of them on the meta device, by names in the module.
    """

    name: str
    module: nn.Module
    locals: Mapping[str, str]
    made: Mapping[str, torch.Tensor]

    @property
    def metadata(self) -> dict[str, torch.Tensor]:
        """Names and tensors that go out."""
        return {f"{self.name}.{local}" if self.name else local: each for local, each in self.made.items()}

    def merge(self, function: Merge, whole: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields what goes out.

        Raises:
            ValueError: it is not what the function said.
        """
        found = _checked(function(self.module, whole), self.name) or {}
        for (name, said), local in zip(self.metadata.items(), self.made, strict=True):
            made = found.get(local)
            if made is None or len(found) != len(self.made) or (made.shape, made.dtype) != (said.shape, said.dtype):
                raise ValueError(
                    "return tensors of the same names, shapes and dtypes from merge= for values as for tensors on the "
                    f"meta device: for {self.name!r} it made {_told(self.made)} there, and now {_told(found)}."
                )
            yield name, made


def _checked(made: Any, name: str) -> Mapping[str, torch.Tensor] | None:
    if made is None or (isinstance(made, Mapping) and all(isinstance(each, torch.Tensor) for each in made.values())):
        return made
    raise TypeError(
        f"return a dict of tensors by name, or None, from merge=: for module {name!r} it returned {made!r:.80}, "
        "which no weights can be read from."
    )


def _told(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}


def merged_modules(root: nn.Module, weights: Sequence[Weight], merge: Merge) -> list[MergedModule]:
    """Returns the modules whose weights the function takes."""
    inside: dict[str, list[Weight]] = {"": list(weights)}
    for weight in weights:
        parts = weight.name.split(".")
        for end in range(1, len(parts)):
            inside.setdefault(".".join(parts[:end]), []).append(weight)
    inner = root.module if isinstance(root, DistributedDataParallel) else root
    found: list[MergedModule] = []
    taken: set[Weight] = set()
    for full, module in inner.named_modules():
        name = without_wrappers(full)
        own = inside.get(name, ())
        if not own or any(weight in taken for weight in own):
            continue
        names = {weight.name: weight.name[len(name) + 1 :] if name else weight.name for weight in own}
        made = _checked(merge(module, {names[weight.name]: weight.meta() for weight in own}), name)
        if made is not None:
            found.append(MergedModule(name, module, names, dict(made)))
            taken.update(own)
    return found


def merged_metadata(weights: Sequence[Weight], merged: Sequence[MergedModule]) -> dict[str, torch.Tensor]:
    """Returns names and tensors on the meta device of what goes out, in its order."""
    module_of = {name: each for each in merged for name in each.locals}
    found: dict[str, torch.Tensor] = {}
    for weight in weights:
        each = module_of.get(weight.name)
        found.update({weight.name: weight.meta()} if each is None else each.metadata)
    return found


class MergedStream(Iterator[tuple[str, torch.Tensor]]):
    """A stream of weights, with those of some modules merged. Every rank takes all of them."""

    def __init__(self, stream: WeightStream, merged: Sequence[MergedModule], merge: Merge, dtype: torch.dtype | None):
        """
        Args:
            dtype: of merged weights of floating point that go out; None: as they were made.
        """
        self._stream, self._merge, self._dtype = stream, merge, dtype
        self._module_of = {name: each for each in merged for name in each.locals}
        self._ready: deque[tuple[str, torch.Tensor]] = deque()

    @torch.no_grad()
    def __next__(self) -> tuple[str, torch.Tensor]:
        """Returns the next pair. Collective, as the stream's."""
        while not self._ready:
            name, whole = next(self._stream)
            found = self._module_of.get(name)
            if found is None:
                return name, whole
            own = {found.locals[name]: whole}
            while len(own) < len(found.locals):
                name, whole = next(self._stream)
                own[found.locals[name]] = whole
            try:
                self._ready.extend((name, self._cast(made)) for name, made in found.merge(self._merge, own))
            except BaseException:
                self.close()  # the other ranks hear of it within a bucket
                raise
        return self._ready.popleft()

    def _cast(self, made: torch.Tensor) -> torch.Tensor:
        return made.to(self._dtype) if self._dtype is not None and made.is_floating_point() else made

    @property
    def is_open(self) -> bool:
        """True until its end, on this rank."""
        return self._stream.is_open or bool(self._ready)

    def close(self) -> None:
        """Ends the stream on all ranks, as the stream's own."""
        self._ready.clear()
        self._stream.close()
