"""One step, in seven phases. This file joins the phases; the other files of this folder do the work of one each.

1. masters: masters and averages follow the params that something other than an update wrote (weights were loaded, say);
2. survey: every param is in place, gradients are usable, kernels are compiled;
3. agree: one small message: same call on all ranks, overflow, norm;
4. decide: skip on all ranks, or the factors that every gradient is multiplied by;
5. update: sums of gradients are divided where a kernel cannot, and shards are updated chunk by chunk through the store;
   in memory that is one launch for each shard. What does not lie in memory is agreed on once more: it is kept on all
   ranks, or rolled back on all;
6. gather: the updated shards travel to the other ranks, each as soon as it is updated;
7. commit: step counts, and versions, so that autograd sees that the params were written.

Phases 2 to 4 change nothing, and phase 1 nothing that a second attempt would not do as well: what is wrong on any rank
until then is raised on all of them.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..domain.agreement import Consensus, StepDigest, agree, checksum
from ..domain.domain import Domain
from ..domain.domains import DomainGroups, agree_on_whole
from ..domain.hyperparameters import check_numbers, plain_numbers
from ..domain.masters import follow_written_params
from ..domain.param import Candidate, Group
from ..errors import ShardoptError
from ..kernels.reductions import sum_of_squares
from ..kernels.tables import Factors
from ..partition.comm.group import Ranks
from .launches import Launch, StepPlan
from .survey import Scaling, survey
from .update import update_and_gather

# Keeps a norm of zero from dividing, as in torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6

# Takes a domain, param groups, these as plain numbers, params to bind, and whether a closure was given.
Bind = Callable[[Domain, Sequence[Group], Sequence[dict[str, Any]], Sequence[Candidate], bool], object]


@dataclass(frozen=True)
class Call:
    """One call of ``step()``.

    Attributes:
        defaults: names the hyper-parameters that every group has.
        closure: true if a closure was given; must be equal on all ranks.
        problem: an error that this rank met before, in its closure, to be raised on all ranks.
    """

    defaults: Mapping[str, Any]
    scaling: Scaling
    closure: bool
    problem: Exception | None


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    updated: bool
    grad_norm: float | None  # global 2-norm before clipping, where max_grad_norm asked for it


NOTHING_DONE = Outcome(updated=False, grad_norm=None)


@dataclass
class DomainStep:
    """One domain's way through a step."""

    domain: Domain
    groups: Sequence[Group]
    plan: StepPlan = field(default_factory=StepPlan)
    consensus: Consensus | None = None


def run_step(by_domain: Sequence[DomainGroups], whole: Sequence[Ranks], call: Call, bind: Bind) -> Outcome:
    """Takes one step with the gradients that the params hold.

    Args:
        whole: the ranks over which all domains decide together; empty if the only domain's ranks are all there are.
        bind: collective; binds params of a domain.
    """
    steps = [DomainStep(domain, groups) for domain, groups in by_domain]
    for each in steps:
        check_unbroken(each.domain)
    # 1. masters, 2. survey, 3. agree
    consensus = _survey_and_agree(steps, whole, call, bind)
    # 4. decide
    main = steps[0].domain
    norm = _norm(steps, whole, consensus, call.scaling)
    launches = [launch for each in steps for launch in each.plan.launches]
    is_idle = all(_changes_nothing(each) for each in steps)
    if consensus.overflow or is_idle or _is_skipped(main, consensus, launches, call.scaling):
        for each in steps:
            _mark_used(each.plan)
            each.domain.end_step()
        return Outcome(updated=False, grad_norm=norm)
    # 5. update, 6. gather
    undone = _update(steps, Factors(unscale=1.0 / call.scaling.scale, clip=_clip(main, norm)))
    if undone is not None:
        main.end_step()
        raise undone
    # 7. commit
    for each in steps:
        commit(each.domain, each.plan)
    return Outcome(updated=True, grad_norm=norm)


def check_unbroken(domain: Domain) -> None:
    """Raises ShardoptError if an earlier step failed half-way."""
    if domain.broken is not None:
        raise ShardoptError(
            "construct model and optimizer anew and load a checkpoint: an earlier step failed half-way "
            f"({domain.broken}), so params and states of the ranks may belong to different steps."
        )


# -- 1. masters, 2. survey, 3. agree -----------------------------------------------------------------------------------


def _survey_and_agree(steps: Sequence[DomainStep], whole: Sequence[Ranks], call: Call, bind: Bind) -> Consensus:
    """Collective: the ranks of each domain agree by themselves, then those of the whole model."""
    problem = call.problem
    for each in steps:
        try:
            each.consensus = _survey_and_agree_in(each, call, bind)
        except Exception as error:
            if not whole:
                raise
            problem = problem or error  # the rest of the model waits for this rank, and must hear of it
    main = steps[0]
    if not whole:
        assert main.consensus is not None
        return main.consensus
    options = main.domain.options
    key = {
        "closure": call.closure,
        "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scaling.scale,
        "max_grad_norm": options.max_grad_norm,
        "nonfinite": options.tuning.nonfinite,
    }
    overflow = any(each.consensus is not None and each.consensus.overflow for each in steps)
    nonfinite = sum(each.plan.stats.nonfinite for each in steps)
    limbs = tuple(map(sum, zip(*(_limbs_of_one_copy(each) for each in steps), strict=True)))
    digest = StepDigest(key, lambda: key, problem, overflow, nonfinite, limbs=limbs)
    with main.domain.clock.phase("agree"):
        return agree_on_whole(digest, whole, main.domain.device)


def _limbs_of_one_copy(step: DomainStep) -> tuple[int, ...]:
    mesh, limbs = step.domain.mesh, step.plan.stats.limbs
    return limbs if mesh.world.rank in mesh.one_copy else (0,) * len(limbs)


def _survey_and_agree_in(step: DomainStep, call: Call, bind: Bind) -> Consensus:
    domain, problem = step.domain, call.problem
    numbers: list[dict[str, Any]] = []
    candidates: list[Candidate] = []
    if problem is None:
        try:
            numbers = [plain_numbers(group) for group in step.groups]
            check_numbers(numbers, call.defaults)
            candidates = domain.unbound(step.groups)
        except Exception as error:
            problem = error
    if candidates:
        bind(domain, step.groups, numbers, candidates, call.closure)
    if problem is None:
        try:
            with domain.clock.phase("survey"):
                follow_written_params(domain)
                step.plan = survey(domain, step.groups, numbers, call.scaling)
        except Exception as error:
            problem = error
    digest = digest_of(domain, call, numbers, step.plan, problem)
    with domain.clock.phase("agree"):
        consensus = agree(digest, domain.mesh.world, domain.device, domain.mesh.one_copy)
        if consensus.written and domain.mesh.world.size > 1:
            _compare_written(domain, step.plan)
    domain.count_round()
    return consensus


def digest_of(
    domain: Domain, call: Call, numbers: list[dict[str, Any]], plan: StepPlan, problem: Exception | None = None
) -> StepDigest:
    """Returns this rank's view of a step, which must be equal on all ranks."""
    # True for a gradient without a slice: where the module was handed over, this rank assigned zeros for its slice.
    present = {each.entry: each.gradient_slice is None for each in plan.updates}
    shows_slices = domain.reducer is not None and not domain.options.release_gradients
    words = {None: "absent", False: "present", True: "zeros, assigned by hand" if shows_slices else "present"}
    entries, stats = list(domain.entries.values()), plan.stats

    def describe() -> dict[str, Any]:
        return {
            "params not yet bound": [],
            "calls of step()": domain.rounds,
            "call": {"closure": call.closure},
            "groups": numbers,
            "requires_grad": {entry.name: entry.param.requires_grad for entry in entries},
            "gradients": {entry.name: words[present.get(entry)] for entry in entries},
            "steps taken": {entry.name: entry.step for entry in entries},
            "carried scalars": {entry.name: entry.carried for entry in entries},
            "norm of the gradients known from backward": stats.norm,
            "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scaling.scale,
        }

    facts = [(entry.step, present.get(entry), entry.param.requires_grad, *entry.carried.values()) for entry in entries]
    key = [domain.rounds, call.closure, numbers, facts, call.scaling.scale, stats.norm]
    overflow, written = call.scaling.overflow, len(plan.written)
    return StepDigest(key, describe, problem, overflow, stats.nonfinite, stats.witness, written, stats.limbs)


def _compare_written(domain: Domain, plan: StepPlan) -> None:
    """Collective: weights that were loaded, clamped or averaged on any rank must be the same on all.

    Each rank reads its own copy of them. Sharded params have one copy, which all ranks have written together.
    """
    entries = list(domain.entries.values())
    written = {entry for entry in plan.written if entry.shard.gathered is None}
    mine = [index for index, entry in enumerate(entries) if entry in written]
    everyones = domain.mesh.world.exchange_json(mine, domain.device, "comparing weights that were written")
    union = sorted({index for theirs in everyones for index in theirs})
    sums = {f"weights (sum of bits) of {entries[index].name}": checksum(entries[index].param) for index in union}
    agree(StepDigest(sums, lambda: sums), domain.mesh.world, domain.device)


# -- 4. decide ---------------------------------------------------------------------------------------------------------


def _norm(steps: Sequence[DomainStep], whole: Sequence[Ranks], consensus: Consensus, scaling: Scaling) -> float | None:
    domain, stats = steps[0].domain, steps[0].plan.stats
    if domain.options.max_grad_norm is None:
        return None
    if consensus.nonfinite:
        return math.nan if _holds_nan(steps, whole) else math.inf
    return math.sqrt(sum_of_squares(consensus.limbs)) if stats.norm is None else stats.norm / scaling.scale


def _holds_nan(steps: Sequence[DomainStep], whole: Sequence[Ranks]) -> bool:
    """Collective: tells Inf from NaN in a step whose gradients are not all finite. True if any rank holds a NaN."""
    main = steps[0].domain
    gradients = [each.grad for step in steps for launch in step.plan.launches for each in launch.updates.values()]
    digest = StepDigest("NaN", dict, nonfinite=sum(bool(grad.isnan().any()) for grad in gradients))
    with main.clock.phase("agree"):
        if whole:
            return agree_on_whole(digest, whole, main.device).nonfinite > 0
        return agree(digest, main.mesh.world, main.device).nonfinite > 0


def _changes_nothing(step: DomainStep) -> bool:
    """True if the step makes no state and all its gradients and learning rates are zeros; the same on all ranks.

    torch's ``get_state_dict()`` takes such a step if it finds no state. What was read before it stays valid.
    """
    domain, plan = step.domain, step.plan
    if not plan.updates or domain.rule.counts_steps or any(plan.states.values()):
        return False
    is_assigned = all(each.gradient_slice is None and each.entry.gradient_slice is not None for each in plan.updates)
    return is_assigned and domain.mesh.world.size > 1 and not any(group.get("lr", 1) for group in step.groups)


def _is_skipped(domain: Domain, consensus: Consensus, launches: Sequence[Launch], scaling: Scaling) -> bool:
    """True, after a warning, if an Inf or NaN keeps all ranks from the step. ``run_step`` has the other reasons.

    Raises:
        ShardoptError: the policy is "raise".
    """
    if not consensus.nonfinite or domain.options.tuning.nonfinite == "propagate":
        return False
    skip(domain.options.tuning.nonfinite, consensus.nonfinite, _where_nonfinite(launches, 1.0 / scaling.scale))
    return True


def skip(policy: str, nonfinite: int, where: str) -> None:
    """Warns that all ranks skip this step because its gradients hold ``nonfinite`` elements that are Inf or NaN.

    Raises:
        ShardoptError: the policy is "raise".
    """
    found = f"{nonfinite} elements of the gradients are Inf or NaN{where}"
    effect = "the update would have spread them into params and states"
    if policy == "raise":
        raise ShardoptError(
            f'look for the loss that overflowed, or give Tuning(nonfinite="skip") to skip such steps: {found}, and '
            f"{effect}, so no rank took the step and nothing changed."
        )
    warnings.warn(f"{found}: {effect}, so all ranks skipped this step and nothing changed.", stacklevel=5)


def _where_nonfinite(launches: Sequence[Launch], unscale: float) -> str:
    for launch in launches:
        for each in launch.updates.values():
            if not bool(torch.isfinite(each.grad * unscale).all()):
                return f" (on this rank first in {each.entry.name})"
    return ""


def _clip(domain: Domain, norm: float | None) -> float:
    """Returns the factor of the global-norm clipping."""
    if norm is None or domain.options.max_grad_norm is None:
        return 1.0
    clip = domain.options.max_grad_norm / (norm + _CLIP_EPS)
    return clip if math.isnan(clip) else min(1.0, clip)  # as torch: a norm of NaN makes all gradients NaN


# -- 5. update, 6. gather, 7. commit -----------------------------------------------------------------------------------


def _update(steps: Sequence[DomainStep], factors: Factors) -> Exception | None:
    """See :func:`update_and_gather`. After an error all domains are broken."""
    try:
        for each in steps:
            undone = update_and_gather(each.domain, each.plan, factors)
            if undone is not None:  # states are on a disk, which is refused for more than one domain
                return undone
    except BaseException as error:
        for each in steps:
            each.domain.break_off(f"{type(error).__name__}: {error}")
        raise
    return None


def commit(domain: Domain, plan: StepPlan) -> None:
    """Notes in the records of the params that they were updated."""
    _mark_used(plan)
    for each in plan.updates:
        each.entry.count_step(plan.scalars.carried[each.entry])
    torch.autograd.graph.increment_version([each.entry.param for each in plan.updates])
    for entry in (*plan.written, *(each.entry for each in plan.updates)):
        entry.follow_param()
    domain.end_step()


def _mark_used(plan: StepPlan) -> None:
    """Marks gradients that no checkpoint has to hold any more. After an error they are for the next attempt."""
    for each in plan.updates:
        if each.gradient_slice is not None:
            each.gradient_slice.is_used = True
