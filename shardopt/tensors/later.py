"""What is computed of a whole once it is read: a part that a function returned holds this instead of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from .edits import fingerprint
from .held import mapped
from .part import Part, fetch_as

# A history that grows with every step (an average of gradients, say) is given up: each gradient in it is kept, on all
# ranks, for as long as it can be read.
_MOST_CALLS = 150  # one within the other
_MOST_SOURCES = 16
_MOST_STEPS = 1  # between the first gradient and the last


@dataclass(frozen=True)
class OfMoment:
    """Reads the whole mean gradient of a moment, in the dtype of its part. Ranks keep their slices while this lives."""

    fetch: Any
    moment: tuple[int, int]
    kept: object
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    steps: int  # that were taken before

    def __call__(self) -> Tensor:
        whole: Tensor = self.fetch(self.moment)
        return whole.as_strided(self.size, self.stride).to(self.dtype)


@dataclass(frozen=True, eq=False)
class _Fetched:
    fetch: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class _Given:
    """A whole that the script gave."""

    whole: Tensor
    fingerprint: Tensor

    def on_host(self) -> Tensor:
        if int(fingerprint(self.whole)) != int(self.fingerprint):
            raise StateError(
                "read the result before its arguments change, or give it a clone() of them: a tensor of shape "
                f"{tuple(self.whole.shape)} that it was made of was written to since. full_tensor() on every rank "
                "returns what it was."
            )
        return self.whole.cpu()


class Later:
    """Computes the whole of a result in host memory: of wholes that are fetched then, each once.

    Attributes:
        sources: what fetches them.
        depth: how many functions are called one within the other.
    """

    def __init__(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], dtype: torch.dtype):
        self._function, self._arguments, self._keywords, self._dtype = function, arguments, keywords, dtype
        self._writes = any(each.alias_info is not None for each in function._schema.arguments)
        self.sources: frozenset[Callable[[], Tensor]] = frozenset()
        self.depth = 1
        for each in (*arguments, *keywords.values()):
            if isinstance(each, _Fetched):
                inner = each.fetch
                self.sources |= inner.sources if isinstance(inner, Later) else {inner}
                self.depth = max(self.depth, 1 + inner.depth if isinstance(inner, Later) else 1)

    @staticmethod
    def of(
        function: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        dtype: torch.dtype,
        prints: dict[int, Tensor],
    ) -> Later | None:
        """Returns what computes the result; None if its arguments cannot be read, or its history is too long.

        Args:
            prints: the fingerprints of whole tensors, by ``id``.
        """
        fetches: dict[int, Callable[[], Tensor] | None] = {}

        def later(tensor: Tensor) -> Any:
            if not isinstance(tensor, Part):
                return _Given(tensor.detach(), prints[id(tensor)])
            found = fetches.get(id(tensor)) or tensor._fetch
            fetches[id(tensor)] = found
            return None if found is None else _Fetched(found)

        its, named = mapped(arguments, Tensor, later), mapped(keywords, Tensor, later)
        if None in fetches.values():
            return None
        for name in ("device", "layout", "pin_memory", "non_blocking"):
            named.pop(name, None)
        made = Later(function, its, named, dtype)
        steps = [each.steps for each in made.sources if isinstance(each, OfMoment)]
        if made.depth > _MOST_CALLS or len(made.sources) > _MOST_SOURCES:
            return None
        return None if steps and max(steps) - min(steps) > _MOST_STEPS else made

    def __call__(self) -> Tensor:
        of_gradients = any(isinstance(each, OfMoment) for each in self.sources)
        return fetch_as(lambda: self._compute({}), self._dtype, not of_gradients)

    def _compute(self, known: dict[Any, Tensor]) -> Tensor:
        def value(each: Any) -> Any:
            if isinstance(each, _Given):
                return each.on_host()
            if not isinstance(each, _Fetched):
                return each
            if each.fetch not in known:
                inner = each.fetch
                known[inner] = inner._compute(known) if isinstance(inner, Later) else inner()
            return known[each.fetch]

        its = list(map(value, self._arguments))
        if self._writes:
            its[0] = its[0].clone()
        found = self._function(*its, **{name: value(each) for name, each in self._keywords.items()})
        return found.to(self._dtype)  # type: ignore[no-any-return]
