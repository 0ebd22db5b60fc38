"""Finds the param group of a param without a walk through all groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .param import Group


class GroupIndex:
    """An index of the params of one optimizer. It is made anew when it does not fit the groups any more."""

    def __init__(self) -> None:
        self._known: dict[torch.nn.Parameter, tuple[int, int]] = {}  # group, index in it

    def group_of(self, groups: Sequence[Group], param: torch.nn.Parameter) -> Group | None:
        """Returns the group of a param; None if it is in none."""
        found = self._look(groups, param)
        if found is None:
            self._known = {
                each: (number, index)
                for number, group in enumerate(groups)
                for index, each in enumerate(group["params"])
            }
            found = self._look(groups, param)
        return found

    def _look(self, groups: Sequence[Group], param: torch.nn.Parameter) -> Group | None:
        number, index = self._known.get(param, (0, -1))
        if index < 0 or number >= len(groups) or index >= len(groups[number]["params"]):
            return None
        return groups[number] if groups[number]["params"][index] is param else None
