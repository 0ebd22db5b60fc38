"""One step, in six phases; with ``survey.py`` the only place that joins a rule, a shard and the kernels.

1. survey: every param still in place, weights that were loaded followed, gradients usable, kernels compiled;
2. agree: one small message: same call on all ranks, overflow, norm;
3. decide: skip on all ranks, or the factors that every gradient is multiplied by;
4. update: chunk by chunk through the store; in memory one launch for each shard. What does not lie in memory is agreed
   on once more: kept on all ranks, or as before on all;
5. gather: the updated shards travel to the other ranks;
6. commit: step counts, and versions, so that autograd sees that the params were written.

Nothing is changed before phase 4: whatever is wrong on any rank is raised on all of them before.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..domain.agreement import Consensus, StepDigest, agree
from ..domain.bind import checksum
from ..domain.domain import Domain
from ..domain.domains import DomainGroups, agree_on_whole
from ..domain.hyperparameters import check_numbers, plain_numbers
from ..domain.param import Candidate, Group
from ..domain.shard import Shard, scales_name
from ..errors import CommunicationError, ShardoptError
from ..kernels.launch import backend_of
from ..kernels.reductions import sum_of_squares
from ..kernels.tables import Factors, Gradients, Streams
from ..offload.store import Chunk, Fetched
from ..partition.comm.group import Ranks
from ..partition.comm.transport import Gather
from .survey import (
    Launch,
    Scaling,
    StepPlan,
    survey,
)
from .update import ChunkUpdate, ShardUpdate, works_of

# Keeps a norm of zero from dividing, as in torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6
_HALF_WAY = "Some shards are updated, others are not: do not go on training from here; restart from a checkpoint."

# Takes a domain, param groups, these as plain numbers, params to bind, and whether a closure was given.
Bind = Callable[[Domain, Sequence[Group], Sequence[dict[str, Any]], Sequence[Candidate], bool], object]


@dataclass(frozen=True)
class Call:
    """One call of ``step()``.

    Attributes:
        defaults: names the hyper-parameters that every group has.
        closure: whether one was given; must be equal on all ranks.
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
    seen: StepPlan = field(default_factory=StepPlan)
    agreed: Consensus | None = None


def run_step(by_domain: Sequence[DomainGroups], whole: Sequence[Ranks], call: Call, bind: Bind) -> Outcome:
    """Takes one step with the gradients that the params hold.

    Args:
        bind: collective; binds params of a domain.
        whole: over which ranks the domains decide together; empty where there is one domain, which is all there is.
    """
    lanes = [DomainStep(domain, groups) for domain, groups in by_domain]
    for lane in lanes:
        check_unbroken(lane.domain)
    agreed = _agree(lanes, whole, call, bind)
    # 3. decide
    main = lanes[0]
    norm = _norm(lanes, whole, agreed, call.scaling)
    launches = [launch for lane in lanes for launch in lane.seen.launches]
    is_idle = all(_changes_nothing(lane) for lane in lanes)
    if agreed.overflow or is_idle or _is_skipped(main.domain, agreed, launches, call.scaling):
        for lane in lanes:
            _mark_used(lane.seen)
            lane.domain.end_step()
        return Outcome(updated=False, grad_norm=norm)
    clip = 1.0
    if norm is not None and main.domain.options.max_grad_norm is not None:
        clip = main.domain.options.max_grad_norm / (norm + _CLIP_EPS)
        clip = clip if math.isnan(clip) else min(1.0, clip)  # as torch: a norm of NaN makes all gradients NaN
    # 4. update, 5. gather
    undone = _update_lanes(lanes, 1.0 / call.scaling.scale, clip)
    if undone is not None:
        main.domain.end_step()
        raise undone
    # 6. commit
    for lane in lanes:
        _commit(lane)
    return Outcome(updated=True, grad_norm=norm)


def _changes_nothing(lane: DomainStep) -> bool:
    """Whether it makes no state and all gradients and learning rates are zeros; the same on all ranks.

    torch's ``get_state_dict()`` takes such a step wherever it finds no state: what was looked at before stays valid.
    """
    seen = lane.seen
    if not seen.ready or lane.domain.rule.counts_steps or any(seen.states.values()):
        return False
    is_assigned = all(each.gradient_slice is None and each.entry.gradient_slice is not None for each in seen.ready)
    return is_assigned and lane.domain.mesh.world.size > 1 and not any(group.get("lr", 1) for group in lane.groups)


def check_unbroken(domain: Domain) -> None:
    """Raises ShardoptError if an earlier step failed half-way."""
    if domain.broken is not None:
        raise ShardoptError(
            f"an earlier step failed half-way ({domain.broken}): params and states of the ranks may belong to "
            "different steps. Construct model and optimizer anew and load a checkpoint."
        )


def _commit(lane: DomainStep) -> None:
    seen = lane.seen
    _mark_used(seen)
    for each in seen.ready:
        each.entry.count_step(seen.scalars.carried[each.entry])
    torch.autograd.graph.increment_version([each.entry.param for each in seen.ready])
    for entry in (*seen.written, *(each.entry for each in seen.ready)):
        entry.follow_param()
    lane.domain.end_step()


def _mark_used(seen: StepPlan) -> None:
    """Gradients that no checkpoint need hold any more. After an error they are for the next attempt."""
    for each in seen.ready:
        if each.gradient_slice is not None:
            each.gradient_slice.is_used = True


# -- a step that was taken in backward ---------------------------------------------------------------------------------


def update_early(domain: Domain, shard: Shard, states: Iterable[str], launches: list[Launch]) -> None:
    """Phase 4 of one shard, in memory, ahead of the rest of its step."""
    tasks = ShardUpdate(shard, states, launches).tasks()
    if tasks:
        domain.epoch.begin_step()
    domain.store.prefetch([task.chunk for task in tasks])
    _run(domain, tasks, (1.0, 1.0))
    domain.store.flush()


def close_step(domain: Domain, seen: StepPlan, view: StepDigest, sums: Mapping[str, int]) -> None:
    """Collective: all other phases of a step whose updates were made early, but for ``seen.launches``.

    Args:
        view: what the updates were made with.
        sums: of the bits of weights that others had written, from before the updates.
    """
    world = domain.mesh.world
    with domain.clock.phase("agree"):
        agreed = agree(view, world, domain.device)
        if agreed.written and world.size > 1:
            agree(replace(view, key=sums, describe=lambda: dict(sums)), world, domain.device)
    domain.count_round()
    _update(domain, seen, 1.0, 1.0)
    _commit(DomainStep(domain, (), seen))


# -- 1. survey, 2. agree -----------------------------------------------------------------------------------------------


def _agree(lanes: Sequence[DomainStep], whole: Sequence[Ranks], call: Call, bind: Bind) -> Consensus:
    """Collective: the ranks of each domain by themselves, then those of the whole model."""
    problem = call.problem
    for lane in lanes:
        try:
            lane.agreed = _agree_in(lane, call, bind)
        except Exception as error:
            if not whole:
                raise
            problem = problem or error  # the rest of the model must hear of it
    main = lanes[0]
    if not whole:
        assert main.agreed is not None
        return main.agreed
    options = main.domain.options
    key = {
        "closure": call.closure,
        "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scaling.scale,
        "max_grad_norm": options.max_grad_norm,
        "nonfinite": options.tuning.nonfinite,
    }
    overflow = any(lane.agreed is not None and lane.agreed.overflow for lane in lanes)
    nonfinite = sum(lane.seen.looked.nonfinite for lane in lanes)
    own = [_limbs_of_one_copy(lane) for lane in lanes]
    limbs = tuple(map(sum, zip(*own, strict=True)))
    view = StepDigest(key, lambda: key, problem, overflow, nonfinite, limbs=limbs)
    with main.domain.clock.phase("agree"):
        return agree_on_whole(view, whole, main.domain.device)


def _limbs_of_one_copy(lane: DomainStep) -> tuple[int, ...]:
    mesh, limbs = lane.domain.mesh, lane.seen.looked.limbs
    return limbs if mesh.world.rank in mesh.one_copy else (0,) * len(limbs)


def _agree_in(lane: DomainStep, call: Call, bind: Bind) -> Consensus:
    domain, problem = lane.domain, call.problem
    numbers: list[dict[str, Any]] = []
    candidates: list[Candidate] = []
    if problem is None:
        try:
            numbers = [plain_numbers(group) for group in lane.groups]
            check_numbers(numbers, call.defaults)
            candidates = domain.unbound(lane.groups)
        except Exception as error:
            problem = error
    if candidates:
        bind(domain, lane.groups, numbers, candidates, call.closure)
    # 1. survey
    if problem is None:
        try:
            with domain.clock.phase("survey"):
                lane.seen = survey(domain, lane.groups, numbers, call.scaling)
        except Exception as error:
            problem = error
    # 2. agree
    view = view_of(domain, call, numbers, lane.seen, problem)
    world = domain.mesh.world
    with domain.clock.phase("agree"):
        agreed = agree(view, world, domain.device, domain.mesh.one_copy)
        if agreed.written and world.size > 1:
            _compare_written(domain, lane.seen)
    domain.count_round()
    return agreed


def view_of(
    domain: Domain, call: Call, numbers: list[dict[str, Any]], seen: StepPlan, problem: Exception | None = None
) -> StepDigest:
    """This rank's view of a step."""
    # Whether a gradient is no slot's: where the module was handed over it was assigned, by this rank for its slice.
    present = {each.entry: each.gradient_slice is None for each in seen.ready}
    is_shown = domain.reducer is not None and not domain.options.release_gradients
    words = {None: "absent", False: "present", True: "zeros, assigned by hand" if is_shown else "present"}
    entries = list(domain.entries.values())

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
            "norm of the gradients known from backward": seen.looked.norm,
            "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scaling.scale,
        }

    looked = seen.looked
    facts = [(entry.step, present.get(entry), entry.param.requires_grad, *entry.carried.values()) for entry in entries]
    key = [domain.rounds, call.closure, numbers, facts, call.scaling.scale, looked.norm]
    overflow, written = call.scaling.overflow, len(seen.written)
    return StepDigest(key, describe, problem, overflow, looked.nonfinite, looked.witness, written, looked.limbs)


def _compare_written(domain: Domain, seen: StepPlan) -> None:
    """Weights that were loaded, clamped or averaged on any rank must be the same on all: each reads its own copy.

    Of params that lie in slices there is one copy, which all ranks have written together.
    """
    entries = list(domain.entries.values())
    written = {entry for entry in seen.written if entry.shard.gathered is None}
    mine = [index for index, entry in enumerate(entries) if entry in written]
    everyones = domain.mesh.world.exchange_json(mine, domain.device, "comparing weights that were written")
    union = sorted({index for theirs in everyones for index in theirs})
    sums = {f"weights (sum of bits) of {entries[index].name}": checksum(entries[index].param) for index in union}
    agree(StepDigest(sums, lambda: sums), domain.mesh.world, domain.device)


# -- 3. decide ---------------------------------------------------------------------------------------------------------


def _norm(lanes: Sequence[DomainStep], whole: Sequence[Ranks], agreed: Consensus, scaling: Scaling) -> float | None:
    domain, looked = lanes[0].domain, lanes[0].seen.looked
    if domain.options.max_grad_norm is None:
        return None
    if agreed.nonfinite:
        return math.nan if _holds_nan(lanes, whole) else math.inf
    return math.sqrt(sum_of_squares(agreed.limbs)) if looked.norm is None else looked.norm / scaling.scale


def _holds_nan(lanes: Sequence[DomainStep], whole: Sequence[Ranks]) -> bool:
    """Collective, in a step whose gradients are not all finite: whether one is NaN, on any rank."""
    main = lanes[0].domain
    gradients = [each.grad for lane in lanes for launch in lane.seen.launches for each in launch.ready.values()]
    view = StepDigest("NaN", dict, nonfinite=sum(bool(grad.isnan().any()) for grad in gradients))
    with main.clock.phase("agree"):
        if whole:
            return agree_on_whole(view, whole, main.device).nonfinite > 0
        return agree(view, main.mesh.world, main.device).nonfinite > 0


def _is_skipped(domain: Domain, agreed: Consensus, launches: Sequence[Launch], scaling: Scaling) -> bool:
    if not agreed.nonfinite or domain.options.tuning.nonfinite == "propagate":
        return False
    skip(domain.options.tuning.nonfinite, agreed.nonfinite, _where_nonfinite(launches, 1.0 / scaling.scale))
    return True


def skip(policy: str, nonfinite: int, where: str) -> None:
    """Warns that nobody takes a step whose gradients hold so many Inf and NaN.

    Raises:
        ShardoptError: that is the policy.
    """
    message = (
        f"{nonfinite} elements of the gradients are Inf or NaN{where}: the update would have spread them into "
        "params and states"
    )
    if policy == "raise":
        raise ShardoptError(
            f"{message}, so no rank took the step and nothing changed. Look for the loss that overflowed; "
            'Tuning(nonfinite="skip") skips such steps.'
        )
    warnings.warn(f"{message}, so all ranks skipped this step and nothing changed.", stacklevel=5)


def _where_nonfinite(launches: Sequence[Launch], unscale: float) -> str:
    for launch in launches:
        for each in launch.ready.values():
            if not bool(torch.isfinite(each.grad * unscale).all()):
                return f" (on this rank first in {each.entry.name})"
    return ""


# -- 4. update, 5. gather ----------------------------------------------------------------------------------------------


def _update_lanes(lanes: Sequence[DomainStep], unscale: float, clip: float) -> Exception | None:
    """See :func:`_update`; after an error none of the domains goes on."""
    try:
        for lane in lanes:
            undone = _update(lane.domain, lane.seen, unscale, clip)
            if undone is not None:  # on a disk, where there is one lane
                return undone
    except BaseException as error:
        for lane in lanes:
            lane.domain.break_off(f"{type(error).__name__}: {error}")
        raise
    return None


def _update(domain: Domain, seen: StepPlan, unscale: float, clip: float) -> Exception | None:
    """Launches every update of this rank and gathers the buckets that any rank updated.

    Returns:
        Why nothing was updated after all, on any rank. An error is raised where that is no longer certain.
    """
    if domain.links is None:  # nothing is bound: every param is frozen
        return None
    if domain.sharded is not None:
        domain.gatherer.drop_all()  # they travel when they are needed; what is here will be out of date
    works, factors = works_of(domain, seen), (unscale, clip)
    domain.epoch.begin_step()
    if not domain.store.is_final:
        undone = _update_or_put_back(domain, works, factors)
        if undone is not None:
            return undone
    _update_and_gather(domain, works, {each.entry.shard for each in seen.ready}, factors)
    return None


def _update_or_put_back(domain: Domain, works: Sequence[ShardUpdate], factors: tuple[float, float]) -> Exception | None:
    """What every rank's store says that it can keep is updated; else all is put back, and this is why."""
    store = domain.store
    problem: Exception | None = None
    try:
        try:
            store.begin()
            tasks = [task for work in works for task in work.tasks()]
            store.prefetch([task.chunk for task in tasks])
            _run(domain, tasks, factors)
            with domain.clock.phase("write back"):
                store.flush()
        except Exception as error:
            problem = error
        try:
            with domain.clock.phase("agree"):
                agree(StepDigest("stored", dict, problem), domain.mesh.world, domain.device)
        except CommunicationError:
            raise
        except Exception as error:
            store.roll_back()
            return error
    except BaseException:
        store.roll_back()
        raise
    store.commit()
    return None


def _update_and_gather(
    domain: Domain, works: Sequence[ShardUpdate], updated: set[Shard], factors: tuple[float, float]
) -> None:
    """What lies in memory is updated (on a disk it was), and every shard travels as soon as it is."""
    gather = domain.transport.gather("gathering updated params")
    problem: Exception | None = None
    tasks: dict[Shard, list[ChunkUpdate]] = {}
    try:
        if domain.store.is_final:
            tasks = {work.shard: list(work.tasks()) for work in works}
            domain.store.prefetch([task.chunk for each in tasks.values() for task in each])
    except Exception as error:  # the other ranks wait for this one's shards: they are told when these have met
        problem = error
    for work in works:
        try:
            if problem is None:
                _run(domain, tasks.get(work.shard, ()), factors)
        except Exception as error:
            problem = error
        if work.shard in updated and work.shard.gathered is None:
            gather.start(work.shard.window)
    try:
        if any(tasks.values()):
            domain.store.flush()
    except Exception as error:
        problem = problem or error
    _finish(domain, gather, problem)


def _finish(domain: Domain, gather: Gather, problem: Exception | None) -> None:
    try:
        with domain.clock.phase("gather"):
            gather.finish(failed=problem is not None)
    except CommunicationError as error:
        if problem is None:
            raise CommunicationError(f"{error} {_HALF_WAY}") from error
    domain.transport.traffic.params += gather.received
    if problem is not None:
        problem.add_note(_HALF_WAY)
        raise problem


def _run(domain: Domain, tasks: Iterable[ChunkUpdate], factors: tuple[float, float]) -> None:
    """Brings each chunk in, updates it, takes it back."""
    store, clock = domain.store, domain.clock
    for task in tasks:
        with clock.phase("fetch"):
            fetched = store.fetch(task.chunk)
        with clock.phase("update"):
            for launch, gradients in zip(task.launches, task.tables(fetched), strict=True):
                _launch(launch, task.chunk, fetched, gradients, Factors(launch.divisor, *factors))
        with clock.phase("write back"):
            store.write_back(task.chunk)


def _launch(launch: Launch, chunk: Chunk, fetched: Fetched, gradients: Gradients, factors: Factors) -> None:
    streams = dict(zip(chunk.names, fetched.streams, strict=True))
    names = launch.spec.variant.states
    states = tuple(streams[name] for name in names)
    scales = tuple(streams.get(scales_name(name)) for name in names)
    folded = factors.folded()
    assert folded is not None  # the survey settled all others
    masters = streams.get("master") if launch.spec.has_master else None
    noise = None if launch.noise is None else launch.noise.part(chunk.start)
    param = streams["param"] if fetched.param is None else fetched.param
    backend = backend_of(param.device)
    kept = Streams(param, masters, states, scales)
    backend.step(launch.spec, kept, gradients, launch.scalars, folded, noise)
