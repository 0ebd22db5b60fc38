"""Parity with torch.optim: every class, every keyword set of torch's own tests, on 1, 2 and 3 ranks, stages 0 and 1.

Three checks, each run under the cheats too, where it has to fail:

* one step from the same state (injected through ``load_state_dict``) is as close to torch as fp32 rounding explains;
* a free run ends no further from a float64 oracle than torch's, params and states;
* bits do not depend on the number of ranks, the stage or the bucket size, nor on whether a param is fp32 or the
  master of a bf16 one.

The third check lets the first two take each keyword set at one number of ranks.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from shardopt import Tuning
from tests.support.bounds import LARGEST, U, bounded_step
from tests.support.cases import CASES, Case, Zoo, fill_gradients
from tests.support.cheats import CHEATS, SECOND_MOMENTS, cheating, shows
from tests.support.comparing import raw_numbers, states_of
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


SETTINGS = (
    *(Setting(stage, size) for stage in (0, 1) for size in (SMALL, LARGE)),
    Setting(1, SMALL, neighbours=False),
)
SHARDED = Setting(1, LARGE)


def fill(params: Sequence[Tensor], kind: str, step: int) -> None:
    """The gradients of a step, the same on every rank, as DDP leaves them."""
    for param, grad in zip(params, gradients(kind, step), strict=True):
        param.grad = None if grad is None else grad.to(param, copy=True)


@functools.cache
def gradients(kind: str, step: int) -> list[Tensor | None]:
    params = list(Zoo(torch.float64).parameters())
    fill_gradients(params, kind, step)
    if step in SKIPPED[1]:
        params[SKIPPED[0]].grad = None
    return [param.grad for param in params]


# -- the reference, in the test process --------------------------------------------------------------------------------


@dataclass
class Moment:
    """Torch's training at one step: before it, its gradients, after it."""

    step: int  # of the run, from 1
    grads: list[Tensor | None]
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
        fill(params, kind, step)
        if step in (1, 2, 4, 14):
            grads = [param.grad for param in params]
            states = states_of(optimizer, params)
            moments.append(Moment(step, grads, before, copy.deepcopy(optimizer.state_dict()), states))
        optimizer.step()
        scheduler.step()
        if moments[-1].step == step:
            moments[-1].new_params = [param.detach().clone() for param in params]
            moments[-1].new_states = states_of(optimizer, params)
    return tuple(moments)


def begun(moments: Iterable[Moment]) -> list[Moment]:
    """What a rank needs of them."""
    return [replace(each, states=[], new_params=[], new_states=[]) for each in moments]


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
        for param, grad in zip(params, moment.grads, strict=True):
            param.grad = grad
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
            assert raw_numbers(one) == raw_numbers(two), f"param {which} is not the same on rank 0 and rank {rank}"


def check_single_steps(case: Case, index: int, by_rank: Sequence[Sequence[Ended]]) -> None:
    """|ours - torch| <= what rounding explains for both, for every element of params and states."""
    compared = elements = 0
    for number, moment in enumerate(torch_moments(case.name, index)):
        check_equal_on_ranks([ended[number] for ended in by_rank])
        ours = by_rank[0][number]
        for which, grad in enumerate(moment.grads):
            where = f"{case.name} {case.keywords[index]} step {moment.step} param {which}"
            mine = {"param": ours.params[which], **ours.states[which]}
            theirs = {"param": moment.new_params[which], **moment.new_states[which]}
            assert set(mine) == set(theirs), f"{where}: the states are not torch's"
            if grad is None:
                before = {"param": moment.params[which], **moment.states[which]}
                for name, value in before.items():
                    assert raw_numbers(mine[name].float()) == raw_numbers(value.float()), (
                        f"{where}: {name} is not what it was"
                    )
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
            check_published_bounds(case, index, moment, which, mine, theirs, grad)
    assert compared > 0.75 * elements, f"not enough elements could be compared: {compared} of {elements}"


@functools.cache
def tolerances_of(case_name: str, index: int, number: int, which: int) -> dict[str, Any]:
    """Of a param and its states after a moment's step, element by element."""
    case, moment = CASE_OF[case_name], torch_moments(case_name, index)[number]
    grad = moment.grads[which]
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
        assert raw_numbers(one) == raw_numbers(other), f"param {which} is not what one rank computes"
    check_masters(ours)
    for which, (mine, theirs) in enumerate(zip(ours.states, honest.states, strict=True)):
        assert list(mine) == list(theirs), f"states of param {which} are not those of one rank"
        for name in mine:
            assert raw_numbers(mine[name]) == raw_numbers(theirs[name]), f"{name} {which} is not what one rank computes"


def check_masters(ended: Ended) -> None:
    count = len(ended.params) // 2
    for which in range(count):
        full_state, low_state = ended.states[which], dict(ended.states[count + which])
        if which == FROZEN:
            # torch.optim.Adagrad alone has a state before a first step.
            assert all(not each or (float(each["step"]) == 0 and "sum" in each) for each in (full_state, low_state))
            continue
        master = low_state.pop("master")
        assert raw_numbers(master) == raw_numbers(ended.params[which]), (
            f"master {which} is not what training in fp32 gives"
        )
        assert raw_numbers(ended.params[count + which]) == raw_numbers(master.bfloat16()), (
            f"param {which} is not its master rounded"
        )
        for name, value in low_state.items():
            assert raw_numbers(value) == raw_numbers(full_state[name]), (
                f"{name} {which} of a bf16 param is not that of an fp32 one"
            )


FROZEN = next(which for which, param in enumerate(Zoo().parameters()) if not param.requires_grad)

# -- the tests ---------------------------------------------------------------------------------------------------------

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=repr)
# Two moments, a step that shows the scale of gradients, a number that is carried from step to step: a check that
# notices every cheat here does so elsewhere.
TYPICAL = ("AdamW", "SGD", "NAdam")
CHEATED_STEPS = 20  # of a free run: enough to notice every cheat


def last_of_each_variant(case: Case) -> list[int]:
    """One keyword set for each kernel that the case has; the others differ from it in numbers alone."""
    found = {case.rule.variant(plain(case, index)): index for index in range(len(case.keywords))}
    return list(found.values())


def plain(case: Case, index: int) -> dict[str, Any]:
    """The param group of a keyword set, as numbers."""
    group = case.ours([torch.nn.Parameter(torch.zeros(1))], **case.keywords[index]).param_groups[0]
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}


def single_steps_at(case: Case, world: int, indices: Sequence[int], ranks: Pool) -> None:
    setting = Setting(stage=0 if world == 1 else 1, bucket_bytes=(LARGE, SMALL, LARGE)[world - 1])
    calls = [(case.name, index, setting, begun(torch_moments(case.name, index)), None) for index in indices]
    by_rank = ranks.run(one_job, single_steps, calls, world=world)
    for number, index in enumerate(indices):
        check_single_steps(case, index, [ended[number] for ended in by_rank])


@EACH_CASE
def test_single_steps(case: Case, ranks: Pool) -> None:
    """From torch's own states: every keyword set of torch's tests, by turns on 1, 2 and 3 ranks."""
    for world in WORLDS:
        single_steps_at(case, world, range(len(case.keywords))[world - 1 :: 3], ranks)


@pytest.mark.slow
@EACH_CASE
@pytest.mark.parametrize("world", WORLDS)
def test_single_steps_of_all_on_all_ranks(case: Case, world: int, ranks: Pool) -> None:
    single_steps_at(case, world, range(len(case.keywords)), ranks)


def free_runs_of(case: Case, indices: Sequence[int], steps: int, ranks: Pool, world: int = 2) -> None:
    by_rank = ranks.run(one_job, free_run, [(case.name, index, SHARDED, steps, None) for index in indices], world=world)
    for number, index in enumerate(indices):
        check_free_run(case, index, steps, [ended[number] for ended in by_rank])


@EACH_CASE
def test_free_runs(case: Case, ranks: Pool) -> None:
    """Every kernel, by turns on one rank and on two, in as many steps as show every cheat."""
    indices = last_of_each_variant(case)
    for world in (1, 2):
        free_runs_of(case, indices[-world::-2], CHEATED_STEPS, ranks, world)


@pytest.mark.slow
@EACH_CASE
def test_free_runs_of_all(case: Case, ranks: Pool) -> None:
    free_runs_of(case, range(len(case.keywords)), 100, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), [("AdamW", 0), ("AdamW", 4), ("SGD", 4), ("SGD", 7)])
def test_long_free_run(name: str, index: int, ranks: Pool) -> None:
    free_runs_of(CASE_OF[name], [index], 1000, ranks)


def same_bits_at(case: Case, calls: dict[int, list[tuple[int, Setting]]], ranks: Pool) -> None:
    """Calls by number of ranks; each keyword set among them is run on one rank for comparison."""
    indices = sorted({index for each in calls.values() for index, _ in each})
    alone = ranks.run(one_job, mixed_run, [(case.name, index, SHARDED, None) for index in indices], world=1)
    honest = dict(zip(indices, alone[0], strict=True))
    for world, each in calls.items():
        by_rank = ranks.run(one_job, mixed_run, [(case.name, *call, None) for call in each], world=world)
        for number, (index, _) in enumerate(each):
            check_same_bits(honest[index], [ended[number] for ended in by_rank])


@EACH_CASE
def test_same_bits_everywhere(case: Case, ranks: Pool) -> None:
    """The first and the richest keyword set; over all cases every setting meets every number of ranks."""
    place, richest = CASES.index(case), len(case.keywords) - 1
    calls: dict[int, list[tuple[int, Setting]]] = {world: [] for world in WORLDS}
    for number, index in enumerate((0, richest, richest)):
        for world in (2, 3) if number else (2 + place % 2,):
            turn = place + world + 2 * number
            calls[world].append((index, SETTINGS[turn % len(SETTINGS)]))
    calls[1].append((richest, SETTINGS[place % len(SETTINGS)]))
    same_bits_at(case, calls, ranks)


@pytest.mark.slow
@EACH_CASE
def test_same_bits_of_all_everywhere(case: Case, ranks: Pool) -> None:
    """Every keyword set on 1, 2 and 3 ranks; the richest in every setting as well."""
    indices = range(len(case.keywords))
    calls = {
        world: [
            *((index, Setting(1, SMALL if world == 2 else LARGE)) for index in indices),
            *((indices[-1], setting) for setting in SETTINGS),
        ]
        for world in WORLDS
    }
    same_bits_at(case, calls, ranks)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in TYPICAL else pytest.mark.slow, id=case.name) for case in CASES],
)
def test_every_check_fails_under_every_cheat(case: Case, ranks: Pool) -> None:
    shown = {
        cheat: max(index for index, keywords in enumerate(case.keywords) if shows(cheat, case, keywords))
        for cheat in CHEATS
        if any(shows(cheat, case, keywords) for keywords in case.keywords)
    }
    assert len(shown) >= 6
    moments = {index: begun(torch_moments(case.name, index)) for index in shown.values()}
    steps = CHEATED_STEPS
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
    indices = sorted(set(shown.values()))
    alone = ranks.run(one_job, mixed_run, [(case.name, index, SHARDED, None) for index in indices], world=1)
    honest = dict(zip(indices, alone[0], strict=True))
    for number, (cheat, index) in enumerate(shown.items()):
        checks: tuple[Callable[[], None], ...] = (
            lambda: check_single_steps(case, index, [ended[number] for ended in single]),  # noqa: B023
            lambda: check_free_run(case, index, steps, [ended[number] for ended in free]),  # noqa: B023
            lambda: check_same_bits(honest[index], [ended[number] for ended in mixed]),  # noqa: B023
        )
        for which, check in enumerate(checks):
            try:
                check()
            except AssertionError as error:
                assert "is off by" in str(error) or "is not" in str(error) or "are not" in str(error), error
            else:
                pytest.fail(f"check {which} of {case} does not notice {cheat!r}")


# -- torch's own tables ------------------------------------------------------------------------------------------------


def test_table_holds_what_torch_tests() -> None:
    """Every keyword set with which torch's own tests run these classes on the CPU."""
    from torch.testing._internal.common_optimizers import optim_db  # a second of imports, which ranks do without

    inputs = {info.name: info.optim_inputs_func("cpu") for info in optim_db}
    for case in CASES:
        ours = [str(sorted(keywords.items())) for keywords in case.keywords]
        theirs = inputs[case.name] if case.is_torchs else []
        assert {str(sorted(each.kwargs.items())) for each in theirs} <= set(ours)
        assert len(set(ours)) == len(ours)


@pytest.mark.parametrize("case", [case for case in CASES if case.is_torchs], ids=repr)
def test_error_inputs(case: Case) -> None:
    """Every wrong input of torch's tests raises what the torch class raises."""
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

    info = next(info for info in optim_db if info.optim_cls is case.reference)
    wrong = info.optim_error_inputs_func("cpu", torch.float32)
    for each in wrong:
        given = each.optimizer_error_input
        params = [torch.nn.Parameter(torch.ones(1))] if given.params is None else given.params
        assert each.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        with pytest.raises(each.error_type, match=each.error_regex):
            case.ours(params, **given.kwargs)
    assert len(wrong) >= 3
