"""A module whose layers were changed between two steps: which param each state belongs to from then on.

Params are told by name. One that stays the same object keeps all that belongs to it; a new one in its place keeps the
states, if it has the same shape, and takes its master from its own values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..domain.param_names import without_wrappers
from ..errors import BindingError

if TYPE_CHECKING:
    from ..domain.param_state import ParamState

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """A param as it was when it was bound."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Rebinding:
    """The params of all groups from now on.

    Attributes:
        groups: by number of the group, its params.
        kept: the param whose state each one keeps.
    """

    groups: list[list[nn.Parameter]]
    kept: dict[nn.Parameter, nn.Parameter]

    def states(self, present: Mapping[nn.Parameter, ParamState]) -> dict[nn.Parameter, ParamState]:
        """Returns copies of the present states that are kept, by their params from now on."""
        found = {new: present[old].copy() for new, old in self.kept.items() if old in present}
        for new, state in found.items():
            if self.kept[new] is not new:
                state.tensors.pop("master", None)
        return found


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the name of each param of a module: the first one, if it is tied."""
    return {param: without_wrappers(name) for name, param in module.named_parameters()}


def plan_rebinding(
    bound: Mapping[nn.Parameter, Bound],
    module: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    untrained: Mapping[str, nn.Parameter],
) -> Rebinding:
    """Plans who takes whose place. Changes nothing.

    Args:
        bound: the params that are bound.
        groups: the param groups, with params that may have left the module.
        untrained: by name, the params of the module that train, and are in no group of any optimizer.

    Raises:
        BindingError: it cannot be told to which group a new param belongs.
    """
    names = names_of(module)
    by_name = {name: param for param, name in names.items()}
    listed = {param for group in groups for param in group["params"]}
    kept: dict[nn.Parameter, nn.Parameter] = {}
    placed: list[list[nn.Parameter]] = []
    for group in groups:
        placed.append([])
        for old in group["params"]:
            was = bound.get(old)
            new = old if old in names or was is None else by_name.get(was.name)
            if new is None or (new is not old and new in listed) or new not in names:
                continue  # its layer is gone
            placed[-1].append(new)
            if was is not None and was.shape == tuple(new.shape):
                kept[new] = old
    found = {param for params in placed for param in params}
    more = {name: param for name, param in untrained.items() if param not in found}
    if more and len(groups) > 1:
        raise BindingError(
            f"call add_param_group() with {next(iter(more))} first, or freeze it: it is a new param, and rebind() "
            f"knows none by that name, so it could be of any of {len(groups)} param groups. Nothing has changed."
        )
    placed[0] += more.values()
    return Rebinding(placed, kept)
