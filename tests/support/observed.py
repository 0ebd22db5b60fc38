"""What can be seen of an optimizer beside its model, on each rank by itself: values, dicts, counts, memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardopt import Part

if TYPE_CHECKING:
    from tests.support.acts import Performance

# Kept in float64, where torch has fp32.
CARRIED = ("mu_product", "eta", "mu")


def same(mine: Tensor, theirs: Tensor, what: str, atol: float = 0.0) -> None:
    """What this rank holds of ``mine`` beside the same elements of ``theirs``, which is whole."""
    assert mine.shape == theirs.shape, f"{what} has the shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
    assert mine.dtype == theirs.dtype, f"{what} is of {mine.dtype}, not {theirs.dtype}"
    if isinstance(mine, Part):
        ordered = torch.empty_strided(mine.size(), mine.stride(), dtype=mine.dtype).copy_(theirs)
        theirs = ordered.as_strided((mine.numel(),), (1,))[mine.start : mine.start + mine.local.numel()]
        mine = mine.local
    differ = ~((mine - theirs).abs() <= atol) & (mine != theirs) & ~(mine.isnan() & theirs.isnan())
    assert not bool(differ.any()), (
        f"{what}: {int(differ.sum())} of {differ.numel()} elements differ; the first is {float(mine[differ][0])!r}, "
        f"not {float(theirs[differ][0])!r}"
    )


class Comparison:
    """Of one moment."""

    def __init__(self, performance: "Performance"):
        self.of, self.model, self.params = performance, performance.model, performance.module.params

    def run(self) -> None:
        for index, param in enumerate(self.params):
            self._param(index)
            assert (param.grad is not None) == self.model.gradients[index].is_here, f"gradient {index}: {param.grad}"
        assert self.of.optimizer.updates == self.of.updates
        mine, theirs = self.of.optimizer.state_dict(), self.model.state_dict()
        self._groups(mine["param_groups"], theirs["param_groups"])
        assert list(mine["state"]) == sorted(theirs["state"])
        for number, state in mine["state"].items():
            self._state(self.model.owned[number], state, theirs["state"][number])
        self._memory(mine["state"])

    def whole_params(self) -> None:
        for index, param in enumerate(self.params):
            assert not isinstance(param.detach(), Part)
            self._param(index)

    def _param(self, index: int) -> None:
        whole = self.model.weights[index]
        same(self.params[index].detach(), whole, f"param {index}", self._bound("param", whole))

    def gradients(self) -> None:
        """Their elements, and their norms."""
        for index, gradient in enumerate(self.model.gradients):
            grad, expected = self.params[index].grad, gradient.whole
            if grad is None or expected is None:
                continue
            norm = expected.norm() if expected.isfinite().all() else torch.tensor(torch.nan)
            if isinstance(grad, Part):  # a plain one with an Inf has the norm inf
                found = torch.linalg.vector_norm(grad).float()
                torch.testing.assert_close(found, norm, rtol=1e-6, atol=0, equal_nan=True)
                grad = Part(grad.local, grad.start, grad)
            same(grad, expected.to(grad.dtype), f"gradient {index}")

    def _bound(self, name: str, theirs: Tensor) -> float:
        """How far rounding may take two of them apart: a few ulp of the largest in each step."""
        if name in self.of.kind.exact or not theirs.numel():
            return 0.0
        return 8 * 2.0**-24 * (1 + self.model.steps) * max(1.0, float(theirs.abs().max()))

    def _groups(self, mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
        if not self.of.kind.theirs.__module__.startswith("torch."):  # torch gives groups flags that ours has not
            theirs = [{name: other[name] for name in each} for each, other in zip(mine, theirs, strict=True)]
        assert mine == theirs

    def _state(self, index: int, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        what, needs_master = f"of param {index}", self.model.is_low(index) and index in self.of.bound
        assert set(mine) - {"master"} == set(theirs) and ("master" in mine) >= needs_master, f"{sorted(mine)} {what}"
        if "master" in mine:
            same(mine["master"], self.model.masters[index].detach(), f"master {what}")
        for name, expected in theirs.items():
            if name in CARRIED:
                torch.testing.assert_close(mine[name].float(), torch.as_tensor(expected).float(), rtol=1e-6, atol=0)
            else:
                same(mine[name], expected, f"{name} {what}", self._bound(name, expected))

    def _memory(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        found = self.of.optimizer.memory()
        tier = self.of.tier or self.of.own_tier
        assert all(nbytes >= 0 for tiers in found.values() for nbytes in tiers.values()), found
        for kind in ("master", "state"):
            elsewhere = {where: nbytes for where, nbytes in found[kind].items() if where != tier and nbytes}
            assert not elsewhere, f"{kind} should be on the {tier}: {found}"
        held = {"master": 0, "state": 0}
        for number, state in states.items():
            for name, value in state.items():
                # What was loaded for params that are not bound waits in a table of its own.
                if self.model.owned[number] in self.of.bound and name not in ("step", *CARRIED):
                    local = value.local if isinstance(value, Part) else value
                    held["master" if name == "master" else "state"] += local.nbytes // self.of.world
        assert all(found[kind][tier] >= nbytes for kind, nbytes in held.items()), f"{found} for {held}"
