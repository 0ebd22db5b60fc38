"""The table that drives the tests: a row for each optimizer, the params and the gradients that they all meet.

A new optimizer is one row of ``CASES``.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from shardopt.config import StateFormat
from shardopt.optim import classes as optim
from shardopt.optim.optimizer import ShardedOptimizer
from shardopt.rules.adadelta import adadelta
from shardopt.rules.adagrad import adagrad
from shardopt.rules.adam import adam
from shardopt.rules.adamax import adamax
from shardopt.rules.asgd import asgd
from shardopt.rules.lion import lion
from shardopt.rules.nadam import nadam
from shardopt.rules.radam import radam
from shardopt.rules.rmsprop import rmsprop
from shardopt.rules.rprop import rprop
from shardopt.rules.rule import Rule
from shardopt.rules.sgd import sgd

BLOCK = 256

Keywords = dict[str, Any]


class Lion(torch.optim.Optimizer):
    """Lion in plain torch (arXiv 2302.06675, algorithm 2), which torch does not have."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                exp_avg = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (exp_avg * beta1 + grad * (1 - beta1)).sign()
                param.mul_(1 - lr * group["weight_decay"]).sub_(update * lr)
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


@dataclass(frozen=True, eq=False)
class Case:
    """One optimizer."""

    ours: type[ShardedOptimizer]
    reference: type[torch.optim.Optimizer]  # torch's, or one above in plain torch where torch has none
    rule: Rule
    states: tuple[str, ...]  # the tensors in a param's state with every flag on, in torch's order
    keywords: tuple[Keywords, ...]  # what torch's own tests run on the CPU, then ours; the last one turns most on
    step_shows: bool | str = True  # whether an update asks for the number of its step; a keyword: where that is given

    @property
    def name(self) -> str:
        return self.ours.__name__.removeprefix("Sharded")

    @property
    def is_torchs(self) -> bool:
        return self.reference.__module__.startswith("torch.")

    def shows_step(self, keywords: Keywords) -> bool:
        return self.step_shows if isinstance(self.step_shows, bool) else self.step_shows in keywords

    def __repr__(self) -> str:  # the name of the test
        return self.name


ADAM_KEYWORDS: tuple[Keywords, ...] = (
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "amsgrad": True},
    # Ours: the first moment counted from the gradient, as adversarial networks ask for.
    {"betas": (0.0, 0.99)},
    {"betas": (0.5, 0.9), "weight_decay": 0.1, "amsgrad": True, "maximize": True},
)

CASES = (
    Case(
        optim.ShardedAdamW,
        torch.optim.AdamW,
        adam,
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        ADAM_KEYWORDS,
    ),
    Case(
        optim.ShardedAdam,
        torch.optim.Adam,
        adam,
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        (*ADAM_KEYWORDS, {"weight_decay": 0.1, "decoupled_weight_decay": True, "amsgrad": True}),
    ),
    Case(
        optim.ShardedSGD,
        torch.optim.SGD,
        sgd,
        ("momentum_buffer",),
        (
            {},
            {"lr": 1e-2},
            {"lr": torch.tensor(0.001)},
            {"weight_decay": 0.5},
            {"momentum": 0.9},
            {"weight_decay": 0.1, "maximize": True},
            {"momentum": 0.9, "dampening": 0.5},
            {"momentum": 0.9, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
            {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
        ),
        step_shows="dampening",
    ),
    Case(
        optim.ShardedAdagrad,
        torch.optim.Adagrad,
        adagrad,
        ("sum",),
        (
            {},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "maximize": True},
            {"lr": 0.1},
            {"lr": torch.tensor(0.001)},
            {"initial_accumulator_value": 0.1, "weight_decay": 0.1},
            {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1},
            {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.1, "weight_decay": 0.1, "maximize": True},
        ),
        step_shows="initial_accumulator_value",
    ),
    Case(
        optim.ShardedRMSprop,
        torch.optim.RMSprop,
        rmsprop,
        ("square_avg", "momentum_buffer", "grad_avg"),
        (
            {},
            {"lr": 1e-3},
            {"weight_decay": 0.1},
            {"maximize": True},
            {"weight_decay": 0.1, "centered": True},
            {"weight_decay": 0.1, "maximize": True},
            {"momentum": 0.9},
            {"weight_decay": 0.1, "centered": True, "momentum": 0.1},
            {"weight_decay": 0.1, "centered": True, "momentum": 0.1, "maximize": True},
        ),
        step_shows=False,
    ),
    Case(
        optim.ShardedNAdam,
        torch.optim.NAdam,
        nadam,
        ("exp_avg", "exp_avg_sq"),
        (
            {},
            {"lr": 1e-3},
            {"momentum_decay": 6e-3},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "momentum_decay": 6e-3},
            {"weight_decay": 0.1, "maximize": True},
            {"weight_decay": 0.1, "momentum_decay": 6e-3, "decoupled_weight_decay": True},
        ),
    ),
    Case(
        optim.ShardedRAdam,
        torch.optim.RAdam,
        radam,
        ("exp_avg", "exp_avg_sq"),
        (
            {},
            {"lr": 2e-3},
            {"eps": 1e-6},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "maximize": True},
            {"weight_decay": 0.1, "decoupled_weight_decay": True},
        ),
    ),
    Case(
        optim.ShardedAdamax,
        torch.optim.Adamax,
        adamax,
        ("exp_avg", "exp_inf"),
        ({}, {"lr": 0.1}, {"weight_decay": 0.1}, {"maximize": True}, {"weight_decay": 0.1, "maximize": True}),
    ),
    Case(
        optim.ShardedAdadelta,
        torch.optim.Adadelta,
        adadelta,
        ("square_avg", "acc_delta"),
        (
            {},
            {"lr": 0.01},
            {"weight_decay": 0.1},
            {"maximize": True},
            {"rho": 0.95, "weight_decay": 0.9},
            {"weight_decay": 0.1, "maximize": True},
        ),
        step_shows=False,
    ),
    Case(
        optim.ShardedASGD,
        torch.optim.ASGD,
        asgd,
        ("ax",),
        (
            {},
            {"lambd": 0.1},
            {"lr": 0.02},
            {"t0": 100},
            {"maximize": True},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "maximize": True},
            {"lambd": 0.1, "t0": 5, "weight_decay": 0.1},  # ours: averages within the steps of a test
        ),
    ),
    Case(
        optim.ShardedRprop,
        torch.optim.Rprop,
        rprop,
        ("prev", "step_size"),
        ({}, {"lr": 2e-4}, {"etas": (0.5, 1.5)}, {"step_sizes": (2e-6, 100)}, {"maximize": True}),
    ),
    Case(
        optim.ShardedLion,
        Lion,
        lion,
        ("exp_avg",),
        ({}, {"lr": 1e-3}, {"weight_decay": 0.1}, {"betas": (0.0, 0.9)}, {"weight_decay": 0.1, "maximize": True}),
        step_shows=False,
    ),
)


MASTERS, STATE_FORMATS = ("split", "none", "split24", "fp32"), tuple(reversed(get_args(StateFormat)))
KEPT = tuple(itertools.product(MASTERS, STATE_FORMATS))
# What each case is kept in where not all is tried: for all tests the same, as each other format is a kernel to compile.
KEPT_IN = dict(zip(CASES, itertools.cycle(KEPT), strict=False))

# -- params ------------------------------------------------------------------------------------------------------------


class Zoo(torch.nn.Module):
    """A param of every kind that has broken an optimizer: sizes around a block, no elements, odd strides, tied, frozen.

    ``parameters()`` gives the tied one once; the frozen one never has a gradient.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def param(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.scalar = Parameter(param())
        self.empty = Parameter(param(0))
        self.empty_matrix = Parameter(param(3, 0))
        self.one = Parameter(param(1))
        self.prime = Parameter(param(251))
        self.block_less_one = Parameter(param(BLOCK - 1))
        self.block = Parameter(param(BLOCK))
        self.block_and_one = Parameter(param(BLOCK + 1))
        self.matrix = Parameter(param(13, 40))
        self.transposed = Parameter(param(19, 11).t())
        self.channels_last = Parameter(param(2, 3, 5, 4).contiguous(memory_format=torch.channels_last))
        self.tied = self.matrix
        self.frozen = Parameter(param(7), requires_grad=False)


# -- gradients ---------------------------------------------------------------------------------------------------------

SMALL, LARGE = (0.0, -0.0, 2.0**-149, -(2.0**-126), 1e-30), (2e19, -1e30, 3.4e38, math.inf, -math.inf, math.nan)
SPECIAL = torch.tensor((*SMALL, 1.0, -1.0, *LARGE), dtype=torch.float64)


def integers(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """In [-8, 8]: sums over ranks are exact in any order and in any dtype."""
    return torch.randint(-8, 9, shape, generator=generator).double()


def log_uniform(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Every magnitude from 1e-40, subnormal in fp32, to 1e38; both signs."""
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * 78 - 40
    return 10.0**exponents * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def special(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Zeros of both signs, subnormals, values whose squares overflow, infinities, NaN."""
    return SPECIAL[torch.randint(0, len(SPECIAL), shape, generator=generator)]


def heavy_tailed(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Near 1e-3, a few a thousand times that: a normal times a log-normal, as gradients of real models look."""
    normal = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    return 1e-3 * normal[0] * torch.exp(1.5 * normal[1])


GRADIENTS: dict[str, Callable[[torch.Size, torch.Generator], Tensor]] = {
    "integers": integers,
    "log_uniform": log_uniform,
    "special": special,
    "heavy_tailed": heavy_tailed,
}


def fill_gradients(params: Iterable[Tensor], kind: str, step: int, rank: int = 0) -> None:
    """Give each param that asks for one the gradient of this step and rank, the same in every run."""
    for index, param in enumerate(params):
        if param.requires_grad:
            param.grad = _gradient(kind, param.shape, step * 1_000_003 + rank * 1_009 + index).to(param, copy=True)


@functools.lru_cache(maxsize=1000)
def _gradient(kind: str, shape: torch.Size, seed: int) -> Tensor:
    return GRADIENTS[kind](shape, torch.Generator().manual_seed(seed))
