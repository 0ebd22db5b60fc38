"""Parity with torch.optim: every class, every keyword set of torch's own tests, on 1, 2 and 3 ranks, stages 0 and 1.

Three checks, each run under the seven cheats too, where it has to fail:

* one step from the same state (injected through ``load_state_dict``) is as close to torch as fp32 rounding explains;
* a free run ends no further from a float64 oracle than torch's, params and states;
* bits do not depend on the number of ranks, the stage or the bucket size, nor on whether a param is fp32 or the
  master of a bf16 one.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from shardopt import Tuning
from shardopt.optimizer import ShardedOptimizer
from tests.support.bounds import LARGEST, U, bounded_step
from tests.support.cases import CASES, Case, Zoo, fill_gradients
from tests.support.cheats import CHEATS, SECOND_MOMENTS, cheating, shows
from tests.support.oracle import Oracle
from tests.support.ranks import Pool

CASE_OF = {case.name: case for case in CASES}
KINDS = ("heavy_tailed", "integers", "log_uniform")  # log-uniform gradients overflow in fp32: for single steps and bits
SKIPPED = (5, {3, 4})  # this param has no gradient at these steps: no decay, no count
WORLDS = (1, 2, 3)
SMALL, LARGE = 2048, 32 << 20  # bytes of a bucket: several, some of one param; one for all
STATE = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    stage: int
    bucket_bytes: int
    neighbours: bool = True

    def options(self) -> dict[str, Any]:
        return {"stage": self.stage, "tuning": Tuning(bucket_bytes=self.bucket_bytes, neighbours=self.neighbours)}


SETTINGS = tuple(Setting(stage, size) for stage in (0, 1) for size in (SMALL, LARGE))
SHARDED = Setting(1, LARGE)


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
    """All of them, but one NaN is as good as another."""
    tensor = torch.where(tensor.isnan(), torch.nan, tensor)
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
        if step in (1, 2, 4, 14):
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


def mixed_run(case_name: str, index: int, setting: Setting, cheat: str | None) -> Ended:
    """A few steps on the zoo in fp32 followed by the zoo in bf16, with the same values and the same gradients."""
    case = CASE_OF[case_name]
    low = Zoo(torch.bfloat16)
    full_params, low_params = list(copy.deepcopy(low).float().parameters()), list(low.parameters())
    params = [*full_params, *low_params]
    optimizer = case.ours(params, **copy.deepcopy(case.keywords[index]), **setting.options())
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    for step in range(1, 9):
        fill(low_params, KINDS[step % 3], step)
        for full_param, low_param in zip(full_params, low_params, strict=True):
            full_param.grad = None if low_param.grad is None else low_param.grad.float()
        with cheating(cheat):
            optimizer.step()
        scheduler.step()
    return Ended([param.detach().clone() for param in params], states_of(optimizer, params))


def one_job(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Many runs on the same ranks."""
    return [function(*arguments) for arguments in calls]


# -- the checks --------------------------------------------------------------------------------------------------------


def check_equal_on_ranks(ended: Sequence[Ended]) -> None:
    for rank, other in enumerate(ended):
        for which, (one, two) in enumerate(zip(ended[0].params, other.params, strict=True)):
            assert bits(one) == bits(two), f"param {which} is not the same on rank 0 and rank {rank}"


def check_single_steps(case: Case, index: int, by_rank: Sequence[Sequence[Ended]]) -> None:
    """|ours - torch| <= what rounding explains for both, for every element of params and states."""
    compared = elements = 0
    for number, moment in enumerate(torch_moments(case.name, index)):
        check_equal_on_ranks([ended[number] for ended in by_rank])
        ours = by_rank[0][number]
        params = list(Zoo().parameters())
        fill(params, moment.kind, moment.step)
        for which, param in enumerate(params):
            where = f"{case.name} {case.keywords[index]} step {moment.step} param {which}"
            mine = {"param": ours.params[which], **ours.states[which]}
            theirs = {"param": moment.new_params[which], **moment.new_states[which]}
            assert set(mine) == set(theirs), f"{where}: the states are not torch's"
            if param.grad is None:
                before = {"param": moment.params[which], **moment.states[which]}
                for name, value in before.items():
                    assert bits(mine[name].float()) == bits(value.float()), f"{where}: {name} is not what it was"
                continue
            for name in {"step", *case.rule.carried} & set(mine):
                assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=4 * U), (
                    f"{where}: {name} is off by more"
                )
            tolerances = tolerances_of(case.name, index, number, which)
            for name, tolerance in tolerances.items():
                bounded = np.isfinite(tolerance)
                one, other = (tensors[name].double().numpy()[bounded] for tensors in (mine, theirs))
                # Both round, hence 2.
                far = ~(np.abs(one - other) <= 2 * tolerance[bounded])
                assert not far.any(), (
                    f"{where}: {name} is off by {np.abs(one - other)[far].max():.1e}, {far.sum()} times"
                )
                compared, elements = compared + bounded.sum(), elements + bounded.size
            check_published_bounds(case, index, moment, which, mine, theirs, param.grad)
    assert compared > 0.75 * elements, f"not enough elements could be compared: {compared} of {elements}"


@functools.cache
def tolerances_of(case_name: str, index: int, number: int, which: int) -> dict[str, Any]:
    """Of a param and its states after a moment's step, element by element."""
    case, moment = CASE_OF[case_name], torch_moments(case_name, index)[number]
    params = list(Zoo().parameters())
    fill(params, moment.kind, moment.step)
    grad = params[which].grad
    assert grad is not None
    before = moment.states[which]
    group = moment.state_dict["param_groups"][0]
    return {
        name: bounded.error
        for name, bounded in bounded_step(
            case.rule,
            {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()},
            moment.params[which].double().numpy(),
            grad.double().numpy(),
            {name: before[name].double().numpy() for name in case.states if name in before},
            int(before["step"]) + 1 if "step" in before else (2 if before else 1),
            {name: float(before[name]) for name in case.rule.carried if name in before},
        ).items()
    }


def check_published_bounds(
    case: Case, index: int, moment: Moment, which: int, mine: STATE, theirs: STATE, grad: Tensor
) -> None:
    """The figures that the documents give: moments within 1 ulp of the largest operand, params within 4."""
    if case.name != "AdamW" and not (case.name == "SGD" and "weight_decay" not in case.keywords[index]):
        return
    before = moment.states[which]
    for name in {"param", "exp_avg", "exp_avg_sq", "momentum_buffer"} & set(mine):
        one, other = mine[name].numpy(), theirs[name].numpy()
        old = moment.params[which] if name == "param" else before.get(name, theirs[name])
        operands = [other, old.numpy()]
        if name == "param":
            with np.errstate(invalid="ignore"):
                operands.append(other - operands[1])
        elif name != "exp_avg_sq":
            operands.append(grad.numpy())
        scale = np.maximum.reduce([np.abs(operand) for operand in operands])
        usable = np.isfinite(scale) & (scale < LARGEST / 16)
        far = np.abs(one[usable] - other[usable]) > (4 if name == "param" else 1) * np.spacing(scale[usable])
        assert not far.any(), f"{case.name} step {moment.step} param {which}: {name} is off by more than published"


def check_free_run(case: Case, index: int, steps: int, by_rank: Sequence[Ended]) -> None:
    """No further from the oracle than torch is, by 1.05, in params and in each state; never re-synchronised."""
    check_equal_on_ranks(by_rank)
    torch_run, exact = reference_runs(case.name, index, steps)
    for name in ("param", *case.states):
        ours, theirs = (distances(run, exact, name) for run in (by_rank[0], torch_run))
        assert ours.size == theirs.size, f"{name} is not where torch has it"
        if not ours.size:
            continue
        # States round once more than torch's where torch fuses multiply and add: half an ulp of their scale.
        floor = 0 if name == "param" else U
        where = f"{case.name} {case.keywords[index]} after {steps} steps: {name} is off by"
        mean, their_mean = np.sqrt(np.mean(ours**2)), np.sqrt(np.mean(theirs**2))
        assert mean <= 1.05 * their_mean + floor, f"{where} {mean:.2e} from the oracle, torch by {their_mean:.2e}"
        if name == "param":
            assert ours.max() <= 1.05 * theirs.max() + 4 * U, (
                f"{where} up to {ours.max():.2e}, torch {theirs.max():.2e}"
            )


def distances(run: Run | Ended, exact: Run, name: str) -> Any:
    """Of each element to the oracle: of params as it is, of states as a share of their tensor's largest element.

    Second moments as a share of the element itself: a tolerance above 0 would hide the small ones.
    """
    found = [np.zeros(0)]
    for which, param in enumerate(exact.params):
        mine = run.params[which] if name == "param" else run.states[which].get(name)
        end = param if name == "param" else exact.states[which].get(name)
        if mine is not None and end is not None and end.size and which != FROZEN:
            scale = np.abs(end) if name in SECOND_MOMENTS else np.abs(end).max()
            share = np.abs(np.asarray(mine, np.float64) - end) / np.where((scale > 0) & (name != "param"), scale, 1)
            found.append(share.ravel())
    return np.concatenate(found)


def check_same_bits(honest: Ended, by_rank: Sequence[Ended]) -> None:
    """Equal to a run on one rank, and the masters of bf16 params to the fp32 ones."""
    check_equal_on_ranks(by_rank)
    ours = by_rank[0]
    for which, (one, other) in enumerate(zip(ours.params, honest.params, strict=True)):
        assert bits(one) == bits(other), f"param {which} is not what one rank computes"
    check_masters(ours)
    for which, (mine, theirs) in enumerate(zip(ours.states, honest.states, strict=True)):
        assert list(mine) == list(theirs), f"states of param {which} are not those of one rank"
        for name in mine:
            assert bits(mine[name]) == bits(theirs[name]), f"{name} {which} is not what one rank computes"


def check_masters(ended: Ended) -> None:
    count = len(ended.params) // 2
    for which in range(count):
        full_state, low_state = ended.states[which], dict(ended.states[count + which])
        if which == FROZEN:
            assert not full_state and not low_state
            continue
        master = low_state.pop("master")
        assert bits(master) == bits(ended.params[which]), f"master {which} is not what training in fp32 gives"
        assert bits(ended.params[count + which]) == bits(master.bfloat16()), f"param {which} is not its master rounded"
        for name, value in low_state.items():
            assert bits(value) == bits(full_state[name]), f"{name} {which} of a bf16 param is not that of an fp32 one"


FROZEN = next(which for which, param in enumerate(Zoo().parameters()) if not param.requires_grad)

# -- the tests ---------------------------------------------------------------------------------------------------------

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=repr)


@EACH_CASE
@pytest.mark.parametrize("world", WORLDS)
def test_single_steps(case: Case, world: int, ranks: Pool) -> None:
    """From torch's own states: every keyword set of torch's tests."""
    setting = Setting(stage=0 if world == 1 else 1, bucket_bytes=(LARGE, SMALL, LARGE)[world - 1])
    indices = range(len(case.keywords))
    calls = [(case.name, index, setting, torch_moments(case.name, index), None) for index in indices]
    by_rank = ranks.run(one_job, single_steps, calls, world=world)
    for index in indices:
        check_single_steps(case, index, [ended[index] for ended in by_rank])


@EACH_CASE
def test_free_runs(case: Case, ranks: Pool) -> None:
    indices = range(len(case.keywords))
    by_rank = ranks.run(one_job, free_run, [(case.name, index, SHARDED, 100, None) for index in indices], world=2)
    for index in indices:
        check_free_run(case, index, 100, [ended[index] for ended in by_rank])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), [("AdamW", 0), ("AdamW", 4), ("SGD", 4), ("SGD", 7)])
def test_long_free_run(name: str, index: int, ranks: Pool) -> None:
    by_rank = ranks.run(one_job, free_run, [(name, index, SHARDED, 1000, None)], world=2)
    check_free_run(CASE_OF[name], index, 1000, [ended[0] for ended in by_rank])


@EACH_CASE
def test_same_bits_everywhere(case: Case, ranks: Pool) -> None:
    """Every keyword set on 1, 2 and 3 ranks; the richest at both stages in small and in large buckets as well."""
    indices = range(len(case.keywords))
    honest: list[Ended] = []
    for world in WORLDS:
        calls = [(case.name, index, Setting(1, SMALL if world == 2 else LARGE), None) for index in indices]
        calls += [
            (case.name, indices[-1], setting, None) for setting in (*SETTINGS, Setting(1, SMALL, neighbours=False))
        ]
        by_rank = ranks.run(one_job, mixed_run, calls, world=world)
        honest = honest or by_rank[0]
        for number, (_, index, *_) in enumerate(calls):
            check_same_bits(honest[index], [ended[number] for ended in by_rank])


@EACH_CASE
def test_every_check_fails_under_every_cheat(case: Case, ranks: Pool) -> None:
    shown = {
        cheat: max(index for index, keywords in enumerate(case.keywords) if shows(cheat, case, keywords))
        for cheat in CHEATS
        if any(shows(cheat, case, keywords) for keywords in case.keywords)
    }
    assert len(shown) >= 6
    moments = {index: torch_moments(case.name, index) for index in shown.values()}
    steps = 20
    single = ranks.run(
        one_job,
        single_steps,
        [(case.name, index, SHARDED, moments[index], cheat) for cheat, index in shown.items()],
        world=2,
    )
    free = ranks.run(
        one_job, free_run, [(case.name, index, SHARDED, steps, cheat) for cheat, index in shown.items()], world=2
    )
    mixed = ranks.run(
        one_job, mixed_run, [(case.name, index, SHARDED, cheat) for cheat, index in shown.items()], world=2
    )
    alone = ranks.run(one_job, mixed_run, [(case.name, index, SHARDED, None) for index in shown.values()], world=1)
    for number, (cheat, index) in enumerate(shown.items()):
        checks: tuple[Callable[[], None], ...] = (
            lambda: check_single_steps(case, index, [ended[number] for ended in single]),  # noqa: B023
            lambda: check_free_run(case, index, steps, [ended[number] for ended in free]),  # noqa: B023
            lambda: check_same_bits(alone[0][number], [ended[number] for ended in mixed]),  # noqa: B023
        )
        for which, check in enumerate(checks):
            try:
                check()
            except AssertionError as error:
                assert "is off by" in str(error) or "is not" in str(error) or "are not" in str(error), error
            else:
                pytest.fail(f"check {which} of {case} does not notice {cheat!r}")


# -- torch's own table of wrong inputs ---------------------------------------------------------------------------------


def error_inputs(case_name: str) -> int:
    """Every wrong input of torch's tests raises what the torch class raises; returns how many there were."""
    case = CASE_OF[case_name]
    info = next(info for info in optim_db if info.optim_cls is case.torch_class)
    wrong = info.optim_error_inputs_func("cpu", torch.float32)
    for each in wrong:
        given = each.optimizer_error_input
        params = [torch.nn.Parameter(torch.ones(1))] if given.params is None else given.params
        assert each.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        with pytest.raises(each.error_type, match=each.error_regex):
            case.ours(params, **given.kwargs)
    return len(wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_error_inputs(world: int, ranks: Pool) -> None:
    names = [case.name for case in CASES if case.torch_class is not None]
    for counts in ranks.run(one_job, error_inputs, [(name,) for name in names], world=world):
        assert all(count >= 3 for count in counts), dict(zip(names, counts, strict=True))
