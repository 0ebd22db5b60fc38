"""The model of an optimizer: the torch class on whole tensors, and beside it the few things that torch does not have.

Gradients are whole numbers of a few bits, and hyper-parameters powers of two where that is possible: what is added up
or multiplied is then exact, or rounded alike in any order of operations, so that bits can be compared.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardopt import ShardedOptimizer
from shardopt.optim import classes as optim
from tests.support.cases import Lion

HALF, HALVES = 0.5, (0.5, 0.5)
RATES: tuple[Any, ...] = (2.0**-3, 2.0**-5, 2.0**-7, 0.0)
TENSOR_RATES = (*RATES, torch.tensor(2.0**-4))
DECAYS = (0.0, 2.0**-4)


@dataclass(frozen=True)
class Kind:
    """One optimizer, as it is constructed.

    Attributes:
        exact: what is compared bit by bit, states by name and "param".
        changes: what may be written to its param groups.
    """

    ours: type[ShardedOptimizer]
    theirs: type[torch.optim.Optimizer]
    keywords: Mapping[str, Any]
    exact: tuple[str, ...] = ()
    changes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


KINDS = {
    "SGD": Kind(
        optim.ShardedSGD,
        torch.optim.SGD,
        {"lr": 2.0**-4, "momentum": HALF, "dampening": HALF},
        exact=("param", "momentum_buffer"),
        changes={"lr": TENSOR_RATES, "weight_decay": DECAYS, "momentum": (HALF, 1.0), "dampening": (0.0, HALF)},
    ),
    "plain SGD": Kind(
        optim.ShardedSGD,
        torch.optim.SGD,
        {"lr": 2.0**-4},
        exact=("param",),
        changes={"lr": RATES, "weight_decay": DECAYS},
    ),
    "Lion": Kind(
        optim.ShardedLion,
        Lion,
        {"lr": 2.0**-4, "betas": HALVES, "weight_decay": 2.0**-3},
        exact=("param", "exp_avg"),
        changes={"lr": RATES, "weight_decay": DECAYS, "betas": (HALVES, (0.25, HALF))},
    ),
    "AdamW": Kind(
        optim.ShardedAdamW,
        torch.optim.AdamW,
        {"lr": 2.0**-4, "betas": HALVES, "weight_decay": 2.0**-3, "amsgrad": True},
        exact=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        changes={"lr": TENSOR_RATES, "weight_decay": DECAYS, "eps": (1e-8, 1e-3)},
    ),
    "Adagrad": Kind(
        optim.ShardedAdagrad,
        torch.optim.Adagrad,
        {"lr": 2.0**-3, "lr_decay": HALF, "initial_accumulator_value": 0.25},
        exact=("sum",),
        changes={"lr": RATES},
    ),
    "NAdam": Kind(
        optim.ShardedNAdam,
        torch.optim.NAdam,
        {"lr": 2.0**-4, "betas": HALVES, "decoupled_weight_decay": True},
        exact=("exp_avg", "exp_avg_sq"),
        changes={"lr": RATES, "weight_decay": DECAYS},
    ),
    "ASGD": Kind(
        optim.ShardedASGD,
        torch.optim.ASGD,
        {"lr": 2.0**-4, "t0": 2, "lambd": 2.0**-3},
        changes={"lr": RATES, "weight_decay": DECAYS},
    ),
    "RMSprop": Kind(
        optim.ShardedRMSprop,
        torch.optim.RMSprop,
        {"lr": 2.0**-5, "alpha": HALF, "momentum": HALF},
        exact=("square_avg",),
        changes={"lr": RATES},
    ),
}


@dataclass
class Gradient:
    """Of one param: the mean over ranks that was reduced, and that of what was accumulated since and was not."""

    reduced: Tensor | None = None
    pending: Tensor | None = None
    is_used: bool = False  # by a step, since it was reduced
    is_pending_here: bool = False  # this rank accumulated some of it
    pending_on: set[int] = field(default_factory=set)  # the ranks that did

    @property
    def whole(self) -> Tensor | None:
        found = [each for each in (self.reduced, self.pending) if each is not None]
        return torch.stack(found).sum(0) if found else None

    @property
    def is_here(self) -> bool:
        return self.reduced is not None or self.is_pending_here

    def add(self, mean: Tensor, ranks: set[int], here: int) -> None:
        self.pending = mean if self.pending is None else self.pending + mean
        self.pending_on = self.pending_on | ranks
        self.is_pending_here = here in self.pending_on

    def reduce(self) -> None:
        self.reduced, self.pending = self.whole, None
        self.is_used, self.is_pending_here, self.pending_on = False, False, set()

    def zero(self, set_to_none: bool) -> None:
        if set_to_none or self.reduced is not None:
            self.pending_on = set()
        if set_to_none:
            self.reduced, self.pending, self.is_pending_here = None, None, False
        elif self.reduced is not None:
            self.reduced, self.pending, self.is_pending_here = torch.zeros_like(self.reduced), None, False
        elif self.pending is not None:
            self.pending = torch.zeros_like(self.pending)

    def scale(self, factor: float) -> None:
        self.reduced, self.pending = (None if each is None else each * factor for each in (self.reduced, self.pending))

    def unused(self) -> "Gradient":
        """What of it a checkpoint holds."""
        reduced = None if self.is_used else self.reduced
        return Gradient(reduced, self.pending, False, self.is_pending_here, self.pending_on)


def away_from_zero(master: Tensor) -> Tensor:
    """To the nearest bf16 numbers, ties away from zero."""
    near = master.bfloat16()
    other = (2 * master.double() - near.double()).bfloat16()  # the other neighbour, where the master is a tie
    is_tie = other.double() + near.double() == 2 * master.double()
    return torch.where(is_tie & (other.abs() > near.abs()), other, near)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint, or a state dict, holds."""

    weights: list[Tensor]
    masters: list[Tensor]
    states: dict[str, Any]
    gradients: list[Gradient]


class Model:
    """Params, by their index: as the module shows them (``weights``), and the fp32 ones that torch updates."""

    def __init__(self, kind: Kind, weights: Sequence[Tensor], groups: Sequence[Sequence[int]]):
        self.kind = kind
        self.weights = [weight.detach().clone() for weight in weights]
        self.masters = [Parameter(weight.float()) for weight in self.weights]
        self.gradients = [Gradient() for _ in weights]
        self.groups = [list(group) for group in groups]
        self.optimizer = self._make()
        self.steps = 0  # in all: rounding errors add up over them
        self.loaded = set(range(len(self.weights)))  # params whose masters were made or loaded since their last step

    def _make(self) -> torch.optim.Optimizer:
        groups = [{"params": [self.masters[index] for index in group]} for group in self.groups]
        return self.kind.theirs(groups, **self.kind.keywords)

    @property
    def owned(self) -> list[int]:
        """Params of the groups, by their number in state dicts."""
        return [index for group in self.groups for index in group]

    def is_low(self, index: int) -> bool:
        return self.weights[index].dtype is not torch.float32

    # -- steps and weights -----------------------------------------------------------------------------------------

    def step(self) -> None:
        for index in self.owned:
            self.masters[index].grad = self.gradients[index].whole
        self.optimizer.step()
        self.steps += 1
        for index in self.owned:
            if self.masters[index].grad is not None:
                self.weights[index].copy_(self.masters[index].detach())
                self.masters[index].grad = None

    def begin_states(self) -> None:
        """Adagrad does so in its constructor alone, and fails at a param that was added, or loaded without a state."""
        if self.kind.theirs is torch.optim.Adagrad:
            initial = self.kind.keywords["initial_accumulator_value"]
            for index in self.owned:
                state = self.optimizer.state[self.masters[index]]
                if not state:
                    state.update(step=torch.tensor(0.0), sum=torch.full_like(self.masters[index], initial))

    def use_gradients(self) -> None:
        for index in self.owned:
            self.gradients[index].is_used = True

    def is_overflowing(self) -> bool:
        grads = [self.gradients[index].whole for index in self.owned]
        return not all(bool(grad.isfinite().all()) for grad in grads if grad is not None)

    def follow(self, indices: Iterable[int]) -> None:
        """Masters follow weights that were written: elements that are the master rounded keep it.

        A master that is a tie and was loaded may have been a split one: either neighbour is that, rounded.
        """
        for index in indices:
            weight, master = self.weights[index], self.masters[index].data
            is_rounded = master.to(weight.dtype) == weight
            if self.is_low(index) and index in self.loaded:
                is_rounded |= away_from_zero(master) == weight
            master.copy_(torch.where(is_rounded, master, weight.float()))

    def write(self, index: int, values: Tensor) -> None:
        self.weights[index].copy_(values)
        if not self.is_low(index):
            self.masters[index].data.copy_(values)

    def add_group(self, index: int, **numbers: Any) -> None:
        self.groups.append([index])
        self.optimizer.add_param_group({"params": [self.masters[index]], **numbers})
        self.begin_states()

    # -- states ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's, without the empty ones that looking up has made."""
        found = self.optimizer.state_dict()
        return {**found, "state": {number: state for number, state in found["state"].items() if state}}

    def save(self) -> Saved:
        weights, masters = ([each.detach().clone() for each in some] for some in (self.weights, self.masters))
        return Saved(weights, masters, copy.deepcopy(self.state_dict()), [each.unused() for each in self.gradients])

    def load(self, saved: Saved, restores_gradients: bool) -> None:
        """A checkpoint."""
        self.loaded = set(range(len(self.weights)))
        for index, (weight, master) in enumerate(zip(saved.weights, saved.masters, strict=True)):
            self.weights[index].copy_(weight)
            self.masters[index].data.copy_(master)
        self.load_states(saved.states, {})
        if restores_gradients:
            self.gradients = [each.unused() for each in saved.gradients]

    def load_states(self, states: Mapping[str, Any], masters: Mapping[int, Tensor]) -> None:
        """A state dict, and the masters that it holds."""
        self.optimizer.load_state_dict(copy.deepcopy(dict(states)))
        self.begin_states()
        self.loaded |= {self.owned[number] for number in states["state"]}
        for index, master in masters.items():
            self.masters[index].data.copy_(master)

    def put_state(self, index: int, state: Mapping[str, Any] | None, master: Tensor | None) -> None:
        """Of one param; without one it goes back to before its first step."""
        self.loaded.add(index)
        if state:
            self.optimizer.state[self.masters[index]] = copy.deepcopy(dict(state))
        else:
            self.optimizer.state.pop(self.masters[index], None)
            self.begin_states()
        if master is not None:
            self.masters[index].data.copy_(master)

    def adopt(self, states: Mapping[str, Any]) -> None:
        """A new torch optimizer goes on from a file of ours."""
        plain = {
            number: {name: value for name, value in state.items() if name != "master"}
            for number, state in states["state"].items()
        }
        self.optimizer = self._make()
        self.optimizer.load_state_dict({**states, "state": plain})

    def renew(self) -> None:
        """Ours was made anew from its state dict: a master without a state is now the weight."""
        states = self.state_dict()
        numbers = {index: number for number, index in enumerate(self.owned)}
        for index, master in enumerate(self.masters):
            if numbers.get(index) not in states["state"]:
                master.data.copy_(self.weights[index])
