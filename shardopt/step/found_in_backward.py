"""What a backward with ``release_gradients=True`` found in the gradients of the whole model, at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..domain.agreement import StepDigest
from ..domain.domains import agree_on_whole
from ..kernels.reductions import norms_of_limbs, sum_of_squares

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..module.gradient_report import Report
    from ..partition.comm.group import Ranks

_WHAT = "a backward that updates params"


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
