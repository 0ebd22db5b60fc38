"""What scripts do in place to tensors of which each rank holds a slice: every rank must do the same.

A rank changes its own slice at once, and says so here. The next exchange that ranks have anyway compares what was said,
before anything is made of the slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_CHUNK = 1 << 22  # elements whose weights are in memory at a time


class Edits:
    """The edits of the tensors of one domain since its ranks compared them last, by the number of the tensor.

    Fingerprints of whole tensors stay on their devices until then: the host does not wait for a device at each edit.
    """

    def __init__(self) -> None:
        self._noted: dict[int, list[tuple[str, Sequence[torch.Tensor]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._noted)

    def __contains__(self, number: int) -> bool:
        return number in self._noted

    def note(self, number: int, text: str, wholes: Sequence[torch.Tensor] = ()) -> None:
        """Notes an edit of a tensor.

        Args:
            text: names the edit and its numbers.
            wholes: the tensors that were part of it, which all ranks have whole.
        """
        self._noted.setdefault(number, []).append((text, [fingerprint(each) for each in wholes]))

    def forget(self, numbers: Iterable[int]) -> None:
        """Forgets the edits of these tensors, whose values are gone."""
        for number in numbers:
            self._noted.pop(number, None)

    def clear(self) -> None:
        """Forgets all edits: ranks have compared them."""
        self._noted = {}

    def told(self) -> dict[int, list[str]]:
        """Returns the edits of each tensor in their order, with the fingerprints: equal on ranks that did the same."""
        prints = [each for edits in self._noted.values() for _, prints in edits for each in prints]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for each in prints:
            by_device.setdefault(each.device, []).append(each)
        read = {device: iter(torch.stack(some).tolist()) for device, some in by_device.items()}
        found = {
            number: [" ".join([text, *(f"{next(read[each.device]):x}" for each in prints)]) for text, prints in edits]
            for number, edits in self._noted.items()
        }
        return {number: found[number] for number in sorted(found)}


def told(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Returns the text of a call: its numbers, of tensors their form, of parts what their values are."""

    def form(value: Any) -> str:
        words = getattr(value, "words", None)
        if words is not None:
            return str(words)
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(form, value))}]"
        if isinstance(value, torch.device):
            return value.type  # each rank has a number of its own
        return "generator" if isinstance(value, torch.Generator) else repr(value)

    given = [*map(form, arguments), *(f"{name}={form(value)}" for name, value in sorted(keywords.items()))]
    return f"{function}({', '.join(given)})"


def told_wholes(*arguments: Any) -> list[torch.Tensor]:
    """Returns the whole tensors among arguments of a call, and the fingerprints of those that parts were made of."""
    found: list[torch.Tensor] = []
    for each in tree_leaves(arguments):
        if hasattr(each, "words"):
            found += [] if each.fingerprint is None else [each.fingerprint]
        elif isinstance(each, torch.Tensor):
            found.append(each.detach())
    return found


def fingerprint(whole: torch.Tensor) -> torch.Tensor:
    """Returns a 0-d int64, on the tensor's device, which elements of other values or in other places change."""
    with torch.no_grad():
        flat = whole.detach().contiguous().view(-1)
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))
        found = torch.zeros((), dtype=torch.int64, device=whole.device)
        for first in range(0, bits.numel(), _CHUNK):
            some = bits[first : first + _CHUNK]
            weights = torch.arange(2 * first + 1, 2 * (first + some.numel()) + 1, 2, device=whole.device)
            found += (some.to(torch.int64) * weights).sum()
        return found
