"""Parity with torch.optim: every class, every keyword set of torch's own tests, on 1, 2 and 3 ranks, stages 0 and 1.

Three checks, each run under the seven cheats too, where it has to fail:

* one step from the same state (injected through ``load_state_dict``) is as close to torch as fp32 rounding explains;
* a free run ends no further from a float64 oracle than torch's, params and states;
* bits do not depend on the number of ranks, the stage or the bucket size, nor on whether a param is fp32 or the
  master of a bf16 one.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bounds import LARGEST, SMALLEST, U, bounded_step
from cases import CASES, Case, Keywords, Zoo, fill_gradients
from cheats import CHEATS, cheating, shows
from oracle import Oracle
from ranks import Pool
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from shardopt import Tuning
from shardopt.optimizer import ShardedOptimizer

CASE_OF = {case.name: case for case in CASES}
KINDS = ("heavy_tailed", "integers", "log_uniform")  # log-uniform gradients overflow in fp32: for single steps and bits
SKIPPED = (5, {3, 4})  # this param has no gradient at these steps: no decay, no count
WORLDS = (1, 2, 3)
SMALL_BUCKETS = 2048  # bytes: several buckets, some of one param
STATE = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    stage: int
    bucket_bytes: int

    def options(self) -> dict[str, Any]:
        return {"stage": self.stage, "tuning": Tuning(bucket_bytes=self.bucket_bytes)}


SETTINGS = tuple(Setting(stage, size) for stage in (0, 1) for size in (SMALL_BUCKETS, 32 << 20))


def fill(params: Sequence[Tensor], kind: str, step: int) -> None:
    """The gradients of a step, the same on every rank, as DDP leaves them."""
    fill_gradients(params, kind, step)
    if step in SKIPPED[1]:
        params[SKIPPED[0]].grad = None


def states_of(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[STATE]:
    """Every param's state by name, whole, wherever this rank has or gets it (rank 0)."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() != 0:
            return [{} for _ in params]
    state = optimizer.state
    return [
        {
            name: value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
            for name, value in state.get(param, {}).items()
            if value is not None
        }
        for param in params
    ]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- the reference, in the test process --------------------------------------------------------------------------------


@dataclass
class Moment:
    """Torch's training at one step: before it, its gradients, after it."""

    step: int  # of the run, from 1
    kind: str
    params: list[Tensor]
    state_dict: dict[str, Any]
    states: list[STATE]
    new_params: list[Tensor] = field(default_factory=list)
    new_states: list[STATE] = field(default_factory=list)


@functools.cache
def torch_moments(case_name: str, index: int) -> tuple[Moment, ...]:
    """Moments of a run with the torch class: the first steps and some later ones."""
    case = CASE_OF[case_name]
    params = list(Zoo().parameters())
    optimizer = case.reference(params, **copy.deepcopy(case.keywords[index]))
    scheduler = CosineAnnealingLR(optimizer, T_max=20)
    moments = []
    for step in range(1, 15):
        before = [param.detach().clone() for param in params]
        kind = KINDS[step % 2] if step < 10 else KINDS[step % 3]
        moment = Moment(step, kind, before, copy.deepcopy(optimizer.state_dict()), states_of(optimizer, params))
        fill(params, kind, step)
        optimizer.step()
        scheduler.step()
        moment.new_params = [param.detach().clone() for param in params]
        moment.new_states = states_of(optimizer, params)
        if step in (1, 2, 4, 5, 8, 14):
            moments.append(moment)
    return tuple(moments)


@dataclass
class Run:
    """Where a free run ended."""

    params: list[Any]
    states: list[dict[str, Any]]


@functools.cache
def reference_runs(case_name: str, index: int, steps: int) -> tuple[Run, Run]:
    """A free run of the torch class, and of the float64 oracle on the same gradients."""
    case = CASE_OF[case_name]
    params = list(Zoo().parameters())
    optimizer = case.reference(params, **copy.deepcopy(case.keywords[index]))
    group = optimizer.param_groups[0]
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    oracle = Oracle(case.rule, {**group}, [param.detach().numpy() for param in params])
    for step in range(1, steps + 1):
        fill(params, KINDS[step % 2], step)
        oracle.group["lr"] = group["lr"]
        oracle.step([None if param.grad is None else param.grad.numpy() for param in params])
        optimizer.step()
        scheduler.step()
    ended = Run([param.detach().numpy() for param in params], states_of(optimizer, params))
    return ended, Run(oracle.params, oracle.states)


# -- the runs of ours, on ranks ----------------------------------------------------------------------------------------


@dataclass
class Ended:
    """What a rank holds at the end; states on rank 0 only."""

    params: list[Tensor]
    states: list[STATE]


def single_steps(
    case_name: str, index: int, setting: Setting, moments: Sequence[Moment], cheat: str | None
) -> list[Ended]:
    """Each moment's step, taken from its state."""
    case = CASE_OF[case_name]
    params = list(Zoo(seed=1).parameters())
    optimizer = case.ours(params, **copy.deepcopy(case.keywords[index]), **setting.options())
    ended = []
    for moment in moments:
        with torch.no_grad():
            for param, value in zip(params, moment.params, strict=True):
                param.copy_(value)
        optimizer.load_state_dict(moment.state_dict)
        fill(params, moment.kind, moment.step)
        with cheating(cheat):
            optimizer.step()
        ended.append(Ended([param.detach().clone() for param in params], states_of(optimizer, params)))
    return ended


def free_run(case_name: str, index: int, setting: Setting, steps: int, cheat: str | None) -> Ended:
    case = CASE_OF[case_name]
    params = list(Zoo().parameters())
    optimizer = case.ours(params, **copy.deepcopy(case.keywords[index]), **setting.options())
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    for step in range(1, steps + 1):
        fill(params, KINDS[step % 2], step)
        with cheating(cheat):
            optimizer.step()
        scheduler.step()
    return Ended([param.detach().clone() for param in params], states_of(optimizer, params))


def all_bits(case_name: str, index: int, setting: Setting, cheat: str | None) -> tuple[list[bytes], list[bytes]]:
    """Bits of the params (on every rank) and of the states (on rank 0) after a few steps on a mixed list.

    The list holds the zoo in fp32 and in bf16, with the same values and the same gradients: the bf16 params' masters
    must be the fp32 params.
    """
    case = CASE_OF[case_name]
    low = Zoo(torch.bfloat16)
    full = copy.deepcopy(low).float()
    full_params, low_params = list(full.parameters()), list(low.parameters())
    optimizer = case.ours([*full_params, *low_params], **copy.deepcopy(case.keywords[index]), **setting.options())
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    for step in range(1, 9):
        fill(low_params, KINDS[step % 3], step)
        for full_param, low_param in zip(full_params, low_params, strict=True):
            full_param.grad = None if low_param.grad is None else low_param.grad.float()
        with cheating(cheat):
            optimizer.step()
        scheduler.step()
    states = states_of(optimizer, [*full_params, *low_params])
    if dist.get_rank() == 0:
        check_masters(full_params, low_params, states)
    kept = [bits(value) for state in states for value in state.values()]
    return [bits(param) for param in (*full_params, *low_params)], kept


def check_masters(full_params: Sequence[Tensor], low_params: Sequence[Tensor], states: Sequence[STATE]) -> None:
    for index, (full_param, low_param) in enumerate(zip(full_params, low_params, strict=True)):
        full_state, low_state = states[index], dict(states[len(full_params) + index])
        if not full_param.requires_grad:
            assert not full_state and not low_state
            continue
        master = low_state.pop("master")
        assert bits(master) == bits(full_param), f"param {index}: the master is not what fp32 training gives"
        assert bits(low_param) == bits(master.bfloat16()), f"param {index} is not its master rounded"
        assert {name: bits(value) for name, value in low_state.items()} == {
            name: bits(value) for name, value in full_state.items()
        }


def over_keywords(
    function: Callable[..., Any], case_name: str, indices: Sequence[int], settings: Sequence[Setting], rest: Sequence[Any]
) -> list[Any]:
    """One job: the function for each keyword set (with its own of ``rest``, or the shared rest) and setting."""
    return [function(case_name, index, setting, *rest[index]) for index in indices for setting in settings]


# -- the checks --------------------------------------------------------------------------------------------------------


def check_single_steps(case: Case, index: int, by_rank: Sequence[Sequence[Ended]]) -> float:
    """|ours - torch| <= what rounding explains for both, for every element; returns the largest ratio seen."""
    worst, compared, elements = 0.0, 0, 0
    for number, moment in enumerate(torch_moments(case.name, index)):
        check_equal_on_ranks([ended[number] for ended in by_rank])
        ours = by_rank[0][number]
        params = list(Zoo().parameters())
        fill(params, moment.kind, moment.step)
        group = {**moment.state_dict["param_groups"][0]}
        group = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for which, param in enumerate(params):
            where = f"{case.name} {case.keywords[index]} step {moment.step} param {which}"
            before, new = moment.states[which], moment.new_states[which]
            mine = dict(ours.states[which])
            assert set(mine) == set(new), f"{where}: other states"
            if param.grad is None:
                assert bits(ours.params[which]) == bits(moment.params[which]), f"{where}: changed without a gradient"
                assert {name: bits(value.float()) for name, value in mine.items()} == {
                    name: bits(value.float()) for name, value in new.items()
                }, f"{where}: a state changed without a gradient"
                continue
            step = int(before["step"]) + 1 if "step" in before else (2 if before else 1)
            carried = {name: float(before[name]) for name in case.rule.carried if name in before}
            tensors = {name: before[name].double().numpy() for name in case.states if name in before}
            expected = bounded_step(
                case.rule, group, moment.params[which].double().numpy(), param.grad.double().numpy(), tensors, step, carried
            )
            for name in ("step", *case.rule.carried):
                if name in new:
                    assert float(mine[name]) == pytest.approx(float(new[name]), rel=4e-7), f"{where}: {name}"
            pairs = {"param": (ours.params[which], moment.new_params[which])}
            pairs |= {name: (mine[name], new[name]) for name in mine if name in case.states}
            for name, (one, other) in pairs.items():
                tolerance = expected[name].error
                bounded = np.isfinite(tolerance)
                difference = np.abs(one.double().numpy() - other.double().numpy())[bounded]
                ratio = np.max(difference / tolerance[bounded], initial=0.0)
                assert ratio <= 2, f"{where}: {name} is off by {ratio:.1f} times what rounding explains"
                worst, compared, elements = max(worst, ratio), compared + bounded.sum(), elements + bounded.size
    assert compared > 0.75 * elements, f"only {compared} of {elements} elements could be compared"
    return worst


def check_equal_on_ranks(ended: Sequence[Ended]) -> None:
    for rank, other in enumerate(ended):
        for which, (one, two) in enumerate(zip(ended[0].params, other.params, strict=True)):
            assert bits(one) == bits(two), f"param {which} differs between rank 0 and rank {rank}"


def distance(run: Run | Ended, oracle: Run, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(root mean square, largest) distance of params and of each state to the oracle, relative where it has scale."""
    found = {}
    for name in ("param", *names):
        errors = []
        for which, end in enumerate(oracle.params):
            mine = run.params[which] if name == "param" else run.states[which].get(name)
            exact = end if name == "param" else oracle.states[which].get(name)
            if mine is None or exact is None or not exact.size:
                continue
            error = np.abs(np.asarray(mine, np.float64) - exact)
            # Second moments relative, element by element; signed ones and params by the scale of their tensor.
            errors.append((error / (np.abs(exact) if (exact >= 0).all() and name != "param" else 1 + 0 * exact)).ravel())
        if errors:
            joined = np.concatenate(errors)
            found[name] = float(np.sqrt(np.mean(joined**2))), float(np.max(joined))
    return found
