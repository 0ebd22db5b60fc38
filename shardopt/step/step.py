"""One step, in seven phases. This file joins the phases; the other files of this folder do the work of one each.

1. masters: masters and averages follow the params that something other than an update wrote (weights were loaded, say);
2. survey: every param is in place, gradients are usable, kernels are compiled;
3. agree: one small message: same call on all ranks, overflow, norm;
4. decide: skip on all ranks, or the factors that every gradient is multiplied by;
5. update: sums of gradients are divided where a kernel cannot, and shards are updated chunk by chunk through the store;
   in memory that is one launch for each shard, or on a GPU one for all that are kept alike. What does not lie in memory
   is agreed on once more: it is kept on all ranks, or rolled back on all;
6. gather: the updated shards travel to the other ranks, each as soon as it is updated;
7. commit: step counts, and versions, so that autograd sees that the params were written. Buckets whose params have all
   left their groups are freed.

Phases 2 to 4 change no param and no state, and phase 1 nothing that a second attempt would not do as well: what is
wrong on any rank until then is raised on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..domain.agreement import UNBOUND, StepDigest, agree, agree_on, agreed, checksum
from ..domain.domain import Domain
from ..domain.domains import agree_on_whole
from ..domain.hyperparameters import check_numbers, plain_numbers
from ..domain.masters import follow_written_params
from ..domain.param import Candidate, Group
from ..errors import DisagreementError, ShardoptError, warn
from ..kernels.reductions import sum_of_squares
from ..kernels.tables import Factors
from ..partition.comm.together import Relay
from .clipping import clip_factor
from .launches import StepPlan
from .survey import StepPlanner, sampled
from .update import update_and_gather

if TYPE_CHECKING:
    from ..domain.agreement import Consensus
    from ..domain.param import ParamRecord
    from ..partition.comm.group import Ranks
    from .param_update import ParamUpdate

Planners = dict[Domain, StepPlanner]

# Takes a domain, param groups, these as plain numbers, params to bind, and whether a closure was given.
Bind = Callable[[Domain, Sequence[Group], Sequence[dict[str, Any]], Sequence[Candidate], bool], object]


class Call(NamedTuple):
    """One call of ``step()``.

    Attributes:
        defaults: names the hyper-parameters that every group has.
        closure: true if a closure was given; must be equal on all ranks.
        problem: an earlier error of this rank, in its closure, to be raised on all ranks.
        scale: the loss scale of a GradScaler that leaves it to the optimizer to unscale gradients.
        overflow: true if that GradScaler has found an Inf or NaN.
    """

    defaults: Mapping[str, Any]
    closure: bool = False
    problem: Exception | None = None
    scale: float = 1.0
    overflow: bool = False


# The result of a step: whether it updated params, and the global 2-norm before clipping, where max_grad_norm asks for
# it.
Outcome = tuple[bool, float | None]
NOTHING_DONE: Outcome = (False, None)


def run_step(
    by_domain: Sequence[tuple[Domain, Sequence[Group]]],
    whole: Sequence[Ranks],
    call: Call,
    bind: Bind,
    planners: Planners,
) -> Outcome:
    """Takes one step with the gradients that the params hold.

    Args:
        by_domain: each domain with its param groups, the main one first.
        whole: the ranks over which all domains decide together; empty if the only domain's ranks are all there are.
        bind: collective; binds params of a domain.
        planners: those of earlier steps; a domain's first step adds its own.
    """
    for domain, _ in by_domain:
        if domain.broken is not None:
            check_unbroken(domain)
    # 1. masters, 2. survey, 3. agree
    plans, consensus = _survey_and_agree(by_domain, whole, call, bind, planners)
    # 4. decide
    norm = _norm(plans, whole, consensus, call.scale)
    if consensus.overflow or _change_nothing(plans) or _decide_skip(plans, consensus, call.scale):
        for plan in plans:
            _mark_used(plan)
            plan.domain.end_step()
        return False, norm
    # 5. update, 6. gather
    clip = clip_factor(plans[0].domain.options, norm, [group for plan in plans for group in plan.numbers])
    undone = _update(plans, Factors(unscale=1.0 / call.scale, clip=clip), whole)
    if undone is not None:
        for plan in plans:
            plan.domain.end_step()
        raise undone
    # 7. commit
    for plan in plans:
        commit(plan, planners[plan.domain])
    return True, norm


def check_unbroken(domain: Domain) -> None:
    """Raises ShardoptError if an earlier step failed half-way."""
    if domain.broken is not None:
        raise ShardoptError(
            "construct model and optimizer anew and load a checkpoint: an earlier step failed half-way "
            f"({domain.broken}), so params and states of the ranks may belong to different steps."
        )


# -- 1. masters, 2. survey, 3. agree -----------------------------------------------------------------------------------


def _survey_and_agree(
    by_domain: Sequence[tuple[Domain, Sequence[Group]]],
    whole: Sequence[Ranks],
    call: Call,
    bind: Bind,
    planners: Planners,
) -> tuple[list[StepPlan], Consensus]:
    """Collective: the ranks of each domain agree by themselves, then those of the whole model."""
    if not whole:
        domain, groups = by_domain[0]  # the main one; if there are more, this rank has a problem to tell
        plan, consensus = _survey_and_agree_in(domain, groups, call, bind, planners)
        return [plan], consensus
    relay, overflow, plans = Relay(call.problem), False, list[StepPlan]()
    for domain, groups in by_domain:
        found = relay.meet(partial(_survey_and_agree_in, domain, groups, call, bind, planners, True))
        # Where the main domain has all ranks, all of them raise here. If a rank failed in its closure, the others may
        # have raised in their backward, and then take part in no other exchange. Else the rest of the model waits.
        if found is None and len(whole) == 1 and whole[0] is domain.mesh.world:
            relay.check()
        if found is not None:
            overflow |= found[1].overflow
        plans.append(StepPlan(domain) if found is None else found[0])
    main = plans[0].domain
    key = {
        "closure": call.closure,
        "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scale,
        "max_grad_norm": main.options.max_grad_norm,
        "nonfinite": main.options.tuning.nonfinite,
    }
    nonfinite = sum(plan.stats.nonfinite for plan in plans)
    limbs = tuple(map(sum, zip(*(_limbs_of_one_copy(plan) for plan in plans), strict=True)))
    digest = StepDigest(key, lambda: key, relay.problem, overflow, nonfinite, limbs=limbs)
    with main.clock.phase("agree"):
        return plans, agree_on_whole(digest, whole)


def _limbs_of_one_copy(plan: StepPlan) -> tuple[int, ...]:
    mesh, limbs = plan.domain.mesh, plan.stats.limbs
    return limbs if mesh.world.rank in mesh.one_copy else (0,) * len(limbs)


def _survey_and_agree_in(
    domain: Domain,
    groups: Sequence[Group],
    call: Call,
    bind: Bind,
    planners: Planners,
    is_part: bool = False,
    _: Exception | None = None,
) -> tuple[StepPlan, Consensus]:
    """Collective over one domain; ``is_part``: it is not all of the model."""
    relay, numbers = Relay(call.problem), list[dict[str, Any]]()

    def read() -> list[Candidate]:
        numbers[:] = [plain_numbers(group) for group in groups]
        check_numbers(numbers, call.defaults)
        return domain.unbound(groups)

    def survey() -> StepPlan:
        with domain.clock.phase("survey"):
            if domain not in planners:
                planners[domain] = StepPlanner(domain)
            planner = planners[domain]
            replayed = planner.replay(groups, numbers, call.scale, call.overflow, is_part)
            if replayed is None:
                follow_written_params(domain)
                replayed = planner.survey(groups, numbers, call.scale, call.overflow, is_part)
            return replayed

    candidates = relay.attempt(read)
    if candidates:
        bind(domain, groups, numbers, candidates, call.closure)
    plan = relay.attempt(survey) or StepPlan(domain, numbers)
    digest = digest_of(plan, call, relay.problem)
    with domain.clock.phase("agree"):
        try:
            consensus = agree(digest, domain.mesh.world, domain.mesh.one_copy)
        except DisagreementError:
            if domain.sharded is not None:
                domain.gatherer.orders.refuse()
            raise
        if consensus.written:
            _compare_written(plan)
            _take_sources(plan)
        if consensus.proposes_order:
            _adopt_order(domain)
    domain.count_step()
    return plan, consensus


def digest_of(plan: StepPlan, call: Call, problem: Exception | None = None) -> StepDigest:
    """Returns this rank's view of a step, which must be equal on all ranks."""
    domain, numbers = plan.domain, list(plan.numbers)

    # True for a gradient without a slice: where the module was handed over, this rank assigned zeros for its slice.
    def presence() -> dict[ParamRecord, bool]:
        return {each.entry: each.gradient_slice is None for each in plan.updates}

    shows_slices = domain.reducer is not None and not domain.options.release_gradients
    words = {None: "absent", False: "present", True: "zeros, assigned by hand" if shows_slices else "present"}
    entries, stats = list(domain.entries.values()), plan.stats

    def describe() -> dict[str, Any]:
        present = presence()
        return {
            UNBOUND: [],
            "calls of step()": domain.steps_agreed,
            "call": {"closure": call.closure},
            "groups": numbers,
            "buckets whose params have left their groups": domain.left,
            "requires_grad": {entry.name: entry.param.requires_grad for entry in entries},
            "gradients": {entry.name: words[present.get(entry)] for entry in entries},
            "steps taken": {entry.name: entry.step for entry in entries},
            "carried scalars": {entry.name: entry.carried for entry in entries},
            "changes in place of gradients": {entries[number].name: texts for number, texts in edits.items()},
            "writes to optimizer.state (a load of the states on every rank repairs it)": {
                entry.name: of_states.get(domain.number_of(entry), []) for entry in entries
            },
            "norm of the gradients known from backward": stats.norm,
            "orders of units that contradict the schedule": departures,
            "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scale,
        }

    sharded = None if domain.sharded is None or not domain.sharded.leads else domain.sharded
    departures = [] if sharded is None else sharded.gatherer.departures
    proposes = sharded is not None and sharded.gatherer.orders.proposes
    edits = domain.edits.told() if domain.edits and domain.mesh.world.size > 1 else {}
    of_states = domain.state_edits.told() if domain.state_edits is not None else {}
    key: list[Any] | None = None
    if domain.mesh.world.size > 1:  # one rank has nothing to compare with
        key = [domain.steps_agreed, call.closure, numbers, domain.left, plan.facts, call.scale, stats.norm, departures]
        if edits:
            key.append(list(edits.items()))
        if of_states:
            key.append(["states", *of_states.items()])
    written = len(plan.written)
    return StepDigest(
        key,
        describe,
        problem,
        call.overflow,
        stats.nonfinite,
        stats.witness,
        written,
        proposes,
        stats.limbs,
        plan.updates[sampled(domain, plan.updates)].entry.name if stats.witness else "",
    )


def _adopt_order(domain: Domain) -> None:
    """Collective: makes a schedule for stage 3 from the orders in which ranks used the units in this step."""
    everyones = domain.mesh.world.exchange_json(domain.gatherer.orders.passes, "comparing orders of units")
    domain.gatherer.orders.adopt(everyones)


def _compare_written(plan: StepPlan) -> None:
    """Collective: weights that were loaded, clamped or averaged on any rank must be the same on all.

    Each rank reads its own copy of them. Sharded params have one copy, which all ranks have written together.
    """
    domain, entries = plan.domain, list(plan.domain.entries.values())
    if domain.mesh.world.size == 1:
        return
    written = {entry for entry in plan.written if entry.shard.gathered is None}
    mine = [index for index, entry in enumerate(entries) if entry in written]
    everyones = domain.mesh.world.exchange_json(mine, "comparing weights that were written")
    union = sorted({index for theirs in everyones for index in theirs})
    sums = {f"weights (sum of bits) of {entries[index].name}": checksum(entries[index].param) for index in union}
    try:
        agree_on(sums, domain.mesh.world)
    except DisagreementError:
        for entry in plan.sources:
            entry.shard.bucket.drop_source(entry.index)
        raise


def _take_sources(plan: StepPlan) -> None:
    """Collective where masters lie on a disk: takes the tensors that were assigned to ``param.data``."""
    domain = plan.domain
    with nullcontext() if domain.store.is_final else agreed("tensors assigned to param.data", domain.mesh.world):
        for entry in plan.sources:
            entry.shard.bucket.take_source(entry.index)
        if plan.sources:
            follow_written_params(domain)


# -- 4. decide ---------------------------------------------------------------------------------------------------------


def _norm(plans: Sequence[StepPlan], whole: Sequence[Ranks], consensus: Consensus, scale: float) -> float | None:
    domain, stats = plans[0].domain, plans[0].stats
    if domain.options.max_grad_norm is None:
        return None
    if consensus.nonfinite:
        return math.nan if _holds_nan(plans, whole) else math.inf
    return math.sqrt(sum_of_squares(consensus.limbs)) if stats.norm is None else stats.norm / scale


def _gradients(plans: Sequence[StepPlan]) -> Iterator[ParamUpdate]:
    return (each for plan in plans for launch in plan.launches for each in launch.updates.values())


def _holds_nan(plans: Sequence[StepPlan], whole: Sequence[Ranks]) -> bool:
    """Collective, in a step whose gradients are not all finite: True if any rank holds a NaN, False if all are Inf."""
    main = plans[0].domain
    digest = StepDigest("NaN", dict, nonfinite=sum(bool(each.grad.isnan().any()) for each in _gradients(plans)))
    with main.clock.phase("agree"):
        if whole:
            return agree_on_whole(digest, whole).nonfinite > 0
        return agree(digest, main.mesh.world).nonfinite > 0


def _change_nothing(plans: Sequence[StepPlan]) -> bool:
    """True if the step makes no state and all its gradients and learning rates are zeros; the same on all ranks.

    torch's ``get_state_dict()`` takes such a step if it finds no state. What was read before it stays valid.
    """
    for plan in plans:
        if plan.is_replayed or not plan.updates or any(plan.states.values()) or plan.domain.mesh.world.size == 1:
            return False  # nearly every step ends here: a plan is replayed once a step of it was taken
        for each in plan.updates:
            if each.gradient_slice is not None or each.entry.gradient_slice is None:
                return False
        for group in plan.numbers:
            if plan.domain.rule.of(group).counts_steps or group.get("lr", 1):
                return False
    return True


def _decide_skip(plans: Sequence[StepPlan], consensus: Consensus, scale: float) -> bool:
    """True, after a warning, if an Inf or NaN keeps all ranks from the step. ``run_step`` has the other reasons.

    Raises:
        ShardoptError: the policy is "raise".
    """
    policy = plans[0].domain.options.tuning.nonfinite
    if not consensus.nonfinite or policy == "propagate":
        return False
    bad = (each.entry.name for each in _gradients(plans) if not bool(torch.isfinite(each.grad * (1.0 / scale)).all()))
    first = next(bad, None)
    report_skip(policy, consensus.nonfinite, "" if first is None else f" (on this rank first in {first})")
    return True


def report_skip(policy: str, nonfinite: int, where: str) -> None:
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
    warn(f"{found}: {effect}, so all ranks skipped this step and nothing changed.")


# -- 5. update, 6. gather, 7. commit -----------------------------------------------------------------------------------


def _update(plans: Sequence[StepPlan], factors: Factors, whole: Sequence[Ranks]) -> Exception | None:
    """See :func:`update_and_gather`. After an error all domains are broken."""
    try:
        return update_and_gather(plans, factors, whole)
    except BaseException as error:
        for plan in plans:
            plan.domain.mark_broken(f"{type(error).__name__}: {error}")
        raise


def commit(plan: StepPlan, planner: StepPlanner) -> None:
    """Notes in the records of the params that they were updated.

    Collective with ``fraction="auto"``: takes back the states that devices have room for.
    """
    _mark_used(plan)
    for history, scalars in plan.advances:
        history.advance(scalars.carried)
    torch.autograd.graph.increment_version([each.entry.param for each in plan.updates])
    if not plan.is_replayed or plan.margins:  # else the records say already what an update makes of them
        for each in plan.updates:
            each.entry.note_update(plan.margins.get(each.entry, {}))
        for entry in (*plan.written, *(each.entry for each in plan.updates)):
            entry.follow_param()
    # Before the step ends, at which ranks that are ahead begin to ask for states by the new numbers of shards.
    if plan.domain.drop_left():
        planner.forget()  # its plan holds what was freed
    else:
        planner.was_taken()
    plan.domain.end_step()
    if plan.domain.awaits_room:
        # Where it is asked for: a fresh process imports no more than it uses.
        from ..domain.staying import fill_device

        fill_device(plan.domain)


def _mark_used(plan: StepPlan) -> None:
    """Marks gradients that no checkpoint has to hold any more. After an error they are for the next attempt."""
    for each in plan.updates:
        if each.gradient_slice is not None:
            each.gradient_slice.is_used = True
