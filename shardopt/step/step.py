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

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..domain.agreement import UNBOUND, StepDigest, agree, agree_on, agreed, checksum
from ..domain.domain import Domain
from ..domain.domains import agree_on_whole
from ..domain.hyperparameters import check_numbers, plain_numbers
from ..domain.masters import follow_written_params
from ..domain.param import Candidate, Group
from ..errors import DisagreementError, ShardoptError
from ..kernels.tables import Factors
from ..partition.comm.together import Relay
from .decide import change_nothing, clip_factor, decide_skip, norm_of
from .launches import StepPlan
from .survey import Plans, measure, replay, sampled, survey
from .update import update_and_gather

if TYPE_CHECKING:
    from ..domain.agreement import Consensus
    from ..domain.param import ParamRecord
    from ..partition.comm.group import Ranks

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
_PARAM = attrgetter("entry.param")
NOTHING_DONE: Outcome = (False, None)


def run_step(
    by_domain: Sequence[tuple[Domain, Sequence[Group]]],
    whole: Sequence[Ranks],
    call: Call,
    bind: Bind,
    kept: Plans,
) -> Outcome:
    """Takes one step with the gradients that the params hold.

    Args:
        by_domain: each domain with its param groups, the main one first.
        whole: the ranks over which all domains decide together; empty if the only domain's ranks are all there are.
        bind: collective; binds params of a domain.
        kept: the plans of earlier steps; a domain's first step adds its own.
    """
    for domain, _ in by_domain:
        if domain.broken is not None:
            check_unbroken(domain)
    # 1. masters, 2. survey, 3. agree
    plans, consensus = _survey_and_agree(by_domain, whole, call, bind, kept)
    # 4. decide
    norm = norm_of(plans, whole, consensus, call.scale)
    if consensus.overflow or change_nothing(plans) or decide_skip(plans, consensus, call.scale):
        for plan in plans:
            _mark_used(plan)
            plan.domain.end_step()
        return False, norm
    # 5. update, 6. gather
    clip = clip_factor(plans[0].domain.options, norm, (group for plan in plans for group in plan.numbers))
    try:
        undone = update_and_gather(plans, Factors(unscale=1.0 / call.scale, clip=clip), whole)
    except BaseException as error:
        for plan in plans:
            plan.domain.mark_broken(f"{type(error).__name__}: {error}")
        raise
    if undone is not None:
        for plan in plans:
            plan.domain.end_step()
        raise undone
    # 7. commit
    for plan in plans:
        commit(plan, kept)
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
    kept: Plans,
) -> tuple[list[StepPlan], Consensus]:
    """Collective: the ranks of each domain agree by themselves, then those of the whole model."""
    if not whole:
        domain, groups = by_domain[0]  # the main one; if there are more, this rank has a problem to tell
        plan, consensus = _survey_and_agree_in(domain, groups, call, bind, kept)
        return [plan], consensus
    relay, overflow, plans = Relay(call.problem), False, list[StepPlan]()
    for domain, groups in by_domain:
        found = relay.meet(partial(_survey_and_agree_in, domain, groups, call, bind, kept, True))
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
    nonfinite = sum(plan.nonfinite for plan in plans)
    limbs = tuple(map(sum, zip(*(_limbs_of_one_copy(plan) for plan in plans), strict=True)))
    digest = StepDigest(key, lambda: key, relay.problem, overflow, nonfinite, limbs=limbs)
    with main.clock.phase("agree"):
        return plans, agree_on_whole(digest, whole)


def _limbs_of_one_copy(plan: StepPlan) -> tuple[int, ...]:
    mesh = plan.domain.mesh
    return plan.limbs if mesh.world.rank in mesh.one_copy else (0,) * len(plan.limbs)


def _survey_and_agree_in(
    domain: Domain,
    groups: Sequence[Group],
    call: Call,
    bind: Bind,
    kept: Plans,
    is_part: bool = False,
    _: Exception | None = None,
) -> tuple[StepPlan, Consensus]:
    """Collective over one domain; ``is_part``: it is not all of the model."""
    relay, numbers, candidates = Relay(call.problem), list[dict[str, Any]](), list[Candidate]()

    def look() -> StepPlan | None:
        with domain.clock.phase("survey"):
            numbers[:] = [plain_numbers(group) for group in groups]
            check_numbers(numbers, call.defaults)
            listed = domain.listed(groups)
            candidates[:] = domain.unbound(groups, listed)
            if candidates:
                return None
            plan = replay(kept, domain, listed, numbers)
            if plan is None:
                follow_written_params(domain)
                plan = survey(kept, domain, domain.listed(groups), numbers)
            measure(plan, call.scale, call.overflow, is_part)
            return plan

    plan = relay.attempt(look)
    if candidates:
        bind(domain, groups, numbers, candidates, call.closure)
        plan = relay.attempt(look)
    plan = plan or StepPlan(domain, numbers)
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
    world = domain.mesh.world

    def describe() -> dict[str, Any]:
        present, entries = presence(), list(domain.entries.values())
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
            "norm of the gradients known from backward": plan.norm,
            "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scale,
        }

    sharded = None if domain.sharded is None or not domain.sharded.leads else domain.sharded
    proposes = sharded is not None and sharded.gatherer.orders.proposes
    edits = domain.edits.told() if world.size > 1 and domain.edits else {}
    of_states = domain.state_edits.told() if domain.state_edits is not None else {}
    key = [domain.steps_agreed, call.closure, numbers, domain.left, plan.facts, call.scale, plan.norm]
    if edits:
        key.append(list(edits.items()))
    if of_states:
        key.append(["states", *of_states.items()])
    return StepDigest(
        key,
        describe,
        problem,
        call.overflow,
        plan.nonfinite,
        plan.witness,
        len(plan.written),
        proposes,
        plan.limbs,
        plan.updates[sampled(domain, plan.updates)].entry.name if plan.witness else "",
    )


def _adopt_order(domain: Domain) -> None:
    """Collective: makes a schedule for stage 3 from the orders in which ranks used the units in this step."""
    everyones = domain.mesh.world.exchange_json(domain.gatherer.orders.told, "comparing orders of units")
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


# -- 5. update, 6. gather, 7. commit -----------------------------------------------------------------------------------


def commit(plan: StepPlan, kept: Plans) -> None:
    """Notes in the records of the params that they were updated.

    Collective with ``fraction="auto"``: takes back the states that devices have room for.
    """
    _mark_used(plan)
    for history, (_, carried) in plan.advances:
        history.advance(carried)
    torch.autograd.graph.increment_version(list(map(_PARAM, plan.updates)))
    if not plan.is_replayed or plan.margins:  # else the records say already what an update makes of them
        for each in plan.updates:
            each.entry.note_update(plan.margins.get(each.entry, {}))
        for entry in (*plan.written, *(each.entry for each in plan.updates)):
            entry.follow_param()
    # Before the step ends, at which ranks that are ahead begin to ask for states by the new numbers of shards.
    if plan.domain.left:
        plan.domain.drop_left()
        del kept[plan.domain]  # it holds what was freed
    else:
        kept[plan.domain].was_taken()
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
