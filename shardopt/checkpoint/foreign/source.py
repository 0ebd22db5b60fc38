"""What was read from another library's files: names, shapes, and tensors that are loaded on demand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

import torch

# Hyper-parameters that select an implementation and change no result; they are not imported.
HOW = ("foreach", "fused", "capturable", "differentiable")


Read = TypeVar("Read")
Hyper = Mapping[str, Any]  # hyper-parameters of a group, as the library saved them
State = Mapping[str, Any]  # of a param, by name: LazyTensors and numbers


def picked(kind: type[Read], given: Mapping[str, Any]) -> Read:
    """Returns a dataclass whose fields are keys of another library's dict; a field with a default may be missing.

    Raises:
        KeyError: a key is missing.
    """
    described: Any = kind
    required = [each.name for each in fields(described) if each.default is each.default_factory is MISSING]
    optional = [each.name for each in fields(described) if each.name not in required and each.name in given]
    return kind(**{name: given[name] for name in (*required, *optional)})


class LazyTensor:
    """A tensor in a file. Elements are read in row-major order; it stays loaded until the last element is read."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, load: Callable[[], torch.Tensor], place: object = None
    ):
        """``load`` returns the tensor, on the host; ``place``, if known, is equal for two names of one tensor."""
        self.shape, self.dtype, self.place, self._load = tuple(shape), dtype, place, load
        self._held: torch.Tensor | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> "LazyTensor":
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else None
        return LazyTensor(tensor.shape, tensor.dtype, lambda: tensor, place)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tensor(self) -> torch.Tensor:
        return self._load().detach()

    def item(self) -> float:
        return float(self.tensor().item())

    def as_dtype(self, dtype: torch.dtype) -> "LazyTensor":
        """Returns the tensor in another dtype, rounded to nearest."""
        if dtype is self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda: self.tensor().to(dtype), self.place)

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
        aliases: the other names of a tied param.
        state: as in ``torch.optim``: numbers (step) and LazyTensors by name, "master" among them; empty before the
            first step.
    """

    values: LazyTensor
    aliases: tuple[str, ...] = ()
    state: State = field(default_factory=dict)


@dataclass(frozen=True)
class Foreign:
    """
    Attributes:
        origin: the source, in words.
        params: of the groups, and frozen ones.
        groups: of the one optimizer: the names of a group's params in order, and its hyper-parameters.
    """

    origin: str
    params: Mapping[str, ForeignParam]
    buffers: Mapping[str, LazyTensor]
    groups: Sequence[tuple[tuple[str, ...], Hyper]]


def plain_hyper(hyper: Hyper) -> dict[str, Any]:
    """Returns the hyper-parameters that an import keeps, as numbers."""
    return {key: _plain(value) for key, value in hyper.items() if key not in HOW}


def _plain(value: object) -> object:
    if isinstance(value, LazyTensor):
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_plain(each) for each in value)  # type: ignore[call-arg]
    return value
