"""One form for the files of other libraries: names, shapes, and tensors that are read on demand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# These hyper-parameters say how a step is computed, not its result; they are not carried over.
HOW = ("foreach", "fused", "capturable", "differentiable")


class Values:
    """A tensor in a file. Its elements are read in row-major order, and held from the first of them to the last."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, load: Callable[[], torch.Tensor], place: Any = None):
        """``load`` gives the whole, on the host; ``place``, where known, is equal for two names of one tensor."""
        self.shape, self.dtype, self.place, self._load = tuple(shape), dtype, place, load
        self._held: torch.Tensor | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> "Values":
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else None
        return Values(tensor.shape, tensor.dtype, lambda: tensor, place)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tensor(self) -> torch.Tensor:
        return self._load().detach()

    def item(self) -> float:
        return float(self.tensor().item())

    def as_dtype(self, dtype: torch.dtype) -> "Values":
        """Rounded to the nearest, where it rounds."""
        return self if dtype is self.dtype else Values(self.shape, dtype, lambda: self.tensor().to(dtype), self.place)

    def read(self, start: int, stop: int) -> torch.Tensor:
        if self._held is None:
            self._held = self.tensor().contiguous().reshape(-1)
        held = self._held
        if stop == self.numel:
            self._held = None
        return held[start:stop]


@dataclass(frozen=True)
class ForeignParam:
    """
    Attributes:
        aliases: its other names, where it is tied.
        state: as ``torch.optim`` keeps it: numbers (step) and Values by name, "master" among them; empty before the
            first step.
    """

    values: Values
    aliases: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Foreign:
    """
    Attributes:
        origin: what it was read from, in words.
        params: those of the groups, and frozen ones.
        groups: of the one optimizer: names of a group's params in their order, and its hyper-parameters.
    """

    origin: str
    params: Mapping[str, ForeignParam]
    buffers: Mapping[str, Values]
    groups: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]


def plain_hyper(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyper-parameters that an import keeps, as numbers."""
    return {key: _plain(value) for key, value in hyper.items() if key not in HOW}


def _plain(value: Any) -> Any:
    if isinstance(value, Values):
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_plain(each) for each in value)  # type: ignore[call-arg]
    return value
