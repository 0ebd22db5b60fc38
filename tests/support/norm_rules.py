"""Rules that look at whole params: those of the package beside plain torch, and rules of a user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt import ShardedAdamW, ShardedLAMB, ShardedLARS, ShardedOptimizer
from shardopt.rules import Value, max_abs, mean_square, norm, rule, sqrt
from shardopt.rules.lamb import lamb
from shardopt.rules.lars import lars
from shardopt.rules.rule import Rule
from shardopt.rules.stable_adamw import stable_adamw


class LAMB(torch.optim.Optimizer):
    """LAMB in plain torch, which torch does not have: arXiv 1904.00962, algorithm 2."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {name: each for name, each in locals().items() if name in _LAMB})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], -param.grad if group["maximize"] else param.grad
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
                direction = mean / (root + group["eps"]) + decay * param
                param.sub_(group["lr"] * _ratio(group, param, direction, 1.0, 0.0, 0.0) * direction)


class LARS(torch.optim.Optimizer):
    """LARS in plain torch: arXiv 1708.03888, algorithm 1."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        *,
        trust: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {name: each for name, each in locals().items() if name in _LARS})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay = group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                ratio = _ratio(group, param, grad, group["trust_coefficient"], decay, group["eps"])
                update = group["lr"] * ratio * (grad + decay * param)
                if group["momentum"]:
                    buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                    update = buffer.mul_(group["momentum"]).add_(update)
                param.sub_(update)


class StableAdamW(torch.optim.Optimizer):
    """AdamW with update clipping in plain torch: arXiv 2304.13013, algorithm 2."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        clip_update: float = 1.0,
    ) -> None:
        super().__init__(params, {name: each for name, each in locals().items() if name in _STABLE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for param in group["params"]:
                if param.grad is None or not param.numel():
                    continue
                state, grad = self.state[param], -param.grad if group["maximize"] else param.grad
                if not state:
                    state["step"] = 0
                    state |= {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                if group["amsgrad"]:
                    second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
                second = second / (1 - beta2 ** state["step"])
                clipped = float((grad**2 / second.clamp(min=eps**2)).mean().sqrt()) / group["clip_update"]
                lr = group["lr"] / max(1.0, clipped)
                param.mul_(1 - lr * group["weight_decay"])
                param.sub_(lr * state["exp_avg"] / (1 - beta1 ** state["step"]) / (second.sqrt() + eps))


_STABLE = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "clip_update")
_LAMB = ("lr", "betas", "eps", "weight_decay", "trust", "maximize")
_LARS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "trust", "maximize")


def _ratio(group: dict[str, Any], param: Tensor, other: Tensor, factor: float, decay: float, eps: float) -> float:
    weight, length = float(param.norm()), float(other.norm())
    if (param.ndim < 2 and not group["trust"]) or weight == 0 or length == 0:
        return 1.0
    return factor * weight / (length + decay * weight + eps)


@dataclass(frozen=True, eq=False)
class NormCase:
    """One optimizer of the package, as ``cases.py`` has those whose rules are elementwise."""

    ours: type[ShardedOptimizer]
    reference: type[torch.optim.Optimizer]
    rule: Rule
    states: tuple[str, ...]
    keywords: tuple[dict[str, Any], ...]

    def __repr__(self) -> str:
        return self.ours.__name__.removeprefix("Sharded")


NORM_CASES = (
    NormCase(
        ShardedLAMB,
        LAMB,
        lamb,
        ("exp_avg", "exp_avg_sq"),
        (
            {},
            {"weight_decay": 0.0, "lr": 0.02},
            {"trust": True, "maximize": True, "weight_decay": 0.1, "betas": (0.4, 0.9), "eps": 1e-3},
        ),
    ),
    NormCase(
        ShardedLARS,
        LARS,
        lars,
        ("momentum_buffer",),
        (
            {},
            {"momentum": 0.0, "weight_decay": 0.0},
            {"trust": True, "maximize": True, "weight_decay": 0.1, "trust_coefficient": 0.02, "lr": 1.0},
        ),
    ),
    NormCase(
        ShardedAdamW,
        StableAdamW,
        stable_adamw,
        ("exp_avg", "exp_avg_sq"),
        (
            {"clip_update": 1.0},
            {"clip_update": 0.3, "lr": 0.05, "amsgrad": True, "maximize": True, "weight_decay": 0.1},
        ),
    ),
)


def numbers(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {"lr": group["lr"], "beta": 0.9}


@rule(states=("momentum", "square"), nonnegative=("square",), scalars=numbers)
def three_cuts(param: Value, grad: Value, state: Value, s: Value) -> Value:
    """Each reduction follows from the one before it; the square needs what it was after the first cut."""
    grad = grad / (norm(grad) + 1e-6)
    before = state.square
    state.momentum = s.beta * state.momentum + grad
    largest = max_abs(state.momentum)
    state.square = 0.5 * before + 0.5 * state.momentum * state.momentum / (largest * largest + 1e-6)
    update = state.momentum / (sqrt(state.square) + 0.1)
    return param - s.lr * update / sqrt(mean_square(update) + 1e-6)


@rule(states=("first", "second"), scalars=numbers)
def chained_states(param: Value, grad: Value, state: Value, s: Value) -> Value:
    """The second state follows from the first one, as that is stored."""
    state.first = s.beta * state.first + grad
    state.second = s.beta * state.second + state.first
    return param - s.lr * (state.first + state.second) / (max_abs(state.first + state.second) + 1e-6)


@rule(states=("square", "before"), scalars=numbers)
def norm_of_a_change(param: Value, grad: Value, state: Value, s: Value) -> Value:
    """The norm needs what a state was before this step, and a root that it is divided by."""
    change = grad - state.before
    state.square = s.beta * state.square + grad * grad
    state.before = grad
    root = sqrt(state.square) + 0.1
    return param - s.lr * grad / (norm(change / root) + 1e-6)
