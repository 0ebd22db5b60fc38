"""Which params of a module are a domain's, where experts have domains of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..tensors.inner_tensors import named_inside


@dataclass(frozen=True)
class Members:
    """The params of one domain: these alone, or all but these.

    The main domain has all but those of other domains: the module may hold params that are in no param group.
    """

    params: frozenset[torch.Tensor] = frozenset()
    are_others: bool = True
    number: int = 0  # of the domain; the main one's is 0

    def __contains__(self, param: torch.Tensor) -> bool:
        return (param in self.params) != self.are_others


def tensors_of(module: torch.nn.Module, members: Members) -> list[torch.Tensor]:
    """Returns a domain's params of a module, and the buffers of modules whose params are all the domain's.

    A module without params belongs to the domain of the one around it. Buffers of a module that holds params of the
    main domain belong to the main domain.
    """
    return [*(param for param in module.parameters() if param in members), *buffers_of(module, members)]


def buffers_of(module: torch.nn.Module, members: Members) -> list[torch.Tensor]:
    """Returns a domain's buffers of a module; see :func:`tensors_of`."""
    found: dict[torch.Tensor, None] = {}
    _add_buffers(module, members, members.are_others, found)
    return list(found)


def _add_buffers(module: torch.nn.Module, members: Members, is_own: bool, found: dict[torch.Tensor, None]) -> None:
    params = [param in members for param in module.parameters()]
    if params:
        is_own = any(params) if members.are_others else all(params)
    if is_own:
        found.update(dict.fromkeys(module.buffers(recurse=False)))
    for child in module.children():
        _add_buffers(child, members, is_own, found)


def plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that hold the values: of a DTensor or a quantized weight those inside of it, else itself.

    No collective takes the wrapper.
    """
    return (inner for _, inner in named_inside(tensor))
