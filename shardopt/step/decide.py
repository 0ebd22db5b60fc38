"""Phase 4 of a step: the global norm, the factor that clips by it, and whether all ranks skip the step.

A bucket that is updated in backward cannot know the norm of all gradients. The norm of the step before is known, and is
kept as a key of the param groups: state dicts and checkpoints hold it, and a training that resumes has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..domain.agreement import StepDigest, agree
from ..domain.domains import agree_on_whole
from ..errors import ShardoptError, warn
from ..kernels.reductions import norms_of_limbs, sum_of_squares

if TYPE_CHECKING:
    from ..config import Options
    from ..domain.agreement import Consensus
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..module.gradient_report import Report
    from ..partition.comm.group import Ranks
    from .launches import StepPlan
    from .params import ParamUpdate

KEY = "previous_grad_norm"
# Keeps a norm of zero from dividing, as in torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6
_WHAT = "a backward that updates params"


# -- the norm ----------------------------------------------------------------------------------------------------------


def norm_of(plans: Sequence[StepPlan], whole: Sequence[Ranks], consensus: Consensus, scale: float) -> float | None:
    main, domain = plans[0], plans[0].domain
    if domain.options.max_grad_norm is None:
        return None
    if consensus.nonfinite:
        return math.nan if _holds_nan(plans, whole) else math.inf
    return math.sqrt(sum_of_squares(consensus.limbs)) if main.norm is None else main.norm / scale


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


def clip_factor(options: Options, norm: float | None, numbers: Iterable[Mapping[str, Any]]) -> float:
    """Returns the factor that clips gradients to ``max_grad_norm``.

    Args:
        norm: of this step's gradients.
        numbers: the param groups, which hold the norm of the step before. Without one nothing is clipped.
    """
    if options.clip_by == "previous":
        norm = next((group[KEY] for group in numbers if group.get(KEY) is not None), None)
    if norm is None or options.max_grad_norm is None:
        return 1.0
    clip = options.max_grad_norm / (norm + _EPS)
    return clip if math.isnan(clip) else min(1.0, clip)  # as torch: a norm of NaN makes all gradients NaN


def remember_norm(options: Options, groups: Iterable[dict[str, Any]], norm: float | None) -> None:
    """Keeps the norm of a step that was taken, for the next one. One that is Inf or NaN is no measure of the next."""
    if options.clip_by == "previous" and norm is not None and math.isfinite(norm):
        for group in groups:
            group[KEY] = norm


# -- whether to skip ---------------------------------------------------------------------------------------------------


def change_nothing(plans: Sequence[StepPlan]) -> bool:
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


def decide_skip(plans: Sequence[StepPlan], consensus: Consensus, scale: float) -> bool:
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


# -- where gradients are released: at the end of backward --------------------------------------------------------------


class Found(NamedTuple):
    """The same on all ranks of the model."""

    nonfinite: int  # elements that are Inf or NaN
    norm: float  # 2-norm of the finite elements
    updated: bool  # this backward has changed params or states of any rank


def found_in(
    domain: Domain,
    entries: Sequence[ParamRecord],
    report: Report | None,
    whole: Sequence[Ranks],
    problem: Exception | None,
) -> Found | None:
    """Collective where the model has several domains.

    Args:
        entries: the params of the report's rows.
        report: of the ranks that share the states; None after an error.
        whole: see :func:`shardopt.step.step.run_step`.
        problem: this rank's error in its backward.

    Raises:
        Exception: the problem.
        DisagreementError: another rank of the model has an error in its backward.
    """
    if report is None:
        agree_on_whole(StepDigest(_WHAT, dict, problem), whole)
        return None
    if not whole:
        # fsum rounds once, so that the order of params cannot show.
        norm = math.sqrt(math.fsum((norms_of_limbs(report.limbs) ** 2).tolist()))
        return Found(int(report.nonfinite.sum()), norm, report.updated)
    mesh = domain.mesh
    is_first = mesh.world.rank == mesh.one_copy[0]  # all ranks of the domain have the same report
    counted = [is_first and entry.param not in domain.counted_elsewhere for entry in entries]
    limbs = tuple(report.limbs[counted].sum(axis=0, dtype=object).tolist())
    nonfinite, updated = int(report.nonfinite[counted].sum()), int(report.updated)
    agreed = agree_on_whole(StepDigest(_WHAT, dict, nonfinite=nonfinite, written=updated, limbs=limbs), whole)
    return Found(agreed.nonfinite, math.sqrt(sum_of_squares(agreed.limbs)), agreed.written)
