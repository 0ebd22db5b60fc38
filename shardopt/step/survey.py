"""The survey: what this rank would do if the step were taken now. It changes no param, master, state or gradient sum.

What it finds holds for the next steps too, until something changes: see :mod:`.frozen_step`.

Everything that can fail on one rank alone (a param that was moved, a sparse gradient, a compiler that is missing, a
table that does not fit the device) fails here. The ranks have not agreed yet, so the error can be raised on all of
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ShardoptError
from ..kernels.formats import GRADIENT_DTYPES, format_of
from ..kernels.launch import backend_of, totals_of
from ..kernels.reductions import COLUMNS, LIMBS, sum_of_rows
from ..kernels.tables import BLOCK, Factors, read_together
from ..rules.choice import KEY, RuleChoice
from ..tensors.gradient import GradientPart
from ..tensors.gradient_edits import edit
from ..tensors.gradient_slice import norms_of
from ..tensors.pipelining import hint
from .frozen_step import FrozenStep
from .launches import JoinedLaunch, StepPlan, joined
from .params import ParamUpdate
from .program import program_of

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.listed import ListedParams
    from ..domain.param import Group, ParamRecord


Plans = dict["Domain", FrozenStep]  # of the last steps: each step is the last one again, as long as that holds


def replay(plans: Plans, domain: Domain, listed: ListedParams, numbers: Sequence[dict[str, Any]]) -> StepPlan | None:
    """Returns the plan of the last step with the present gradients and scalars; None if it does not hold any more.

    Args:
        numbers: the hyper-parameters of each group, as plain numbers.

    Raises:
        ShardoptError: this rank cannot take the step.
    """
    frozen = plans.get(domain)
    if frozen is None:
        return None
    listed.check()
    if listed.sources or not frozen.holds(listed, numbers):
        del plans[domain]  # freed before the next one is made
        return None
    return frozen.plan(numbers)


def survey(plans: Plans, domain: Domain, listed: ListedParams, numbers: Sequence[dict[str, Any]]) -> StepPlan:
    """Plans a step anew; arguments and errors are those of :func:`replay`."""
    _check_rules(domain, listed, numbers)
    updates = list(_with_gradients(domain, listed))
    plan = freeze(plans, domain, listed, numbers, updates).plan(numbers, updates)
    plan.written = list(dict.fromkeys([*written_params(domain), *listed.sources]))
    plan.sources = listed.sources
    return plan


def plan_ahead(
    plans: Plans, domain: Domain, groups: Sequence[Group], numbers: Sequence[dict[str, Any]], all_anew: bool = False
) -> FrozenStep:
    """Plans a step whose gradients are still to come: that of the params of the last step, or of all.

    Args:
        all_anew: a param has a gradient that had none in the last step.
    """
    listed, frozen = domain.listed(groups), plans.get(domain)
    listed.check()
    if all_anew or frozen is None or not frozen.holds(listed, numbers):
        _check_rules(domain, listed, numbers)
        frozen = freeze(plans, domain, listed, numbers, list(placed_params(listed)), awaits=True)
    frozen.begin(numbers)
    return frozen


def plan_of_present(
    plans: Plans,
    domain: Domain,
    groups: Sequence[Group],
    numbers: Sequence[dict[str, Any]],
    present: Sequence[ParamRecord],
) -> StepPlan:
    """Returns the plan of a step whose gradients have come, of these params, without launches."""
    awaited = plans[domain].awaited
    updates = [awaited[entry] for entry in present if entry in awaited]
    if len(updates) < len(awaited):
        freeze(plans, domain, domain.listed(groups), numbers, updates, awaits=True)
    return plans[domain].plan(numbers, updates)


def freeze(
    plans: Plans,
    domain: Domain,
    listed: ListedParams,
    numbers: Sequence[dict[str, Any]],
    updates: Sequence[ParamUpdate],
    awaits: bool = False,
) -> FrozenStep:
    """Makes the plan of a domain's next steps; arguments are those of :class:`FrozenStep`."""
    frozen = plans[domain] = FrozenStep(domain, listed, numbers, updates, awaits)
    frozen.program = program_of(domain, numbers, frozen.kept)
    return frozen


def _check_rules(domain: Domain, listed: ListedParams, numbers: Sequence[dict[str, Any]]) -> None:
    """Raises ShardoptError if a param group names another rule than when its params were bound."""
    if not isinstance(domain.rule, RuleChoice):
        return
    names = [domain.rule.of(group).name for group in numbers]
    for entry, group in zip(listed.entries, listed.groups, strict=True):
        if entry.rule != names[group]:
            raise ShardoptError(
                f"construct the optimizer anew to change the rule of {entry.name}: it is bound with the states of "
                f"{entry.rule!r}, and its param group now says {KEY}={numbers[group].get(KEY)!r}, which would update "
                "it with states that it does not have."
            )


def written_params(domain: Domain) -> list[ParamRecord]:
    """Returns the params that something other than an update wrote since the last step."""
    return [entry for entry in domain.entries.values() if entry.param._version != entry.version]


def placed_params(listed: ListedParams) -> Iterator[ParamUpdate]:
    """Yields every bound param of the groups, without its gradient.

    Raises:
        BindingError: a param is not where binding put it, or is listed twice.
    """
    listed.check()
    return map(ParamUpdate, listed.entries, listed.groups, listed.numbers)


def _with_gradients(domain: Domain, listed: ListedParams) -> Iterator[ParamUpdate]:
    """Yields every param that has a gradient, and the gradient."""
    updates = placed_params(listed)
    for update, param, size, strides, device, _ in zip(updates, listed.params, *listed.attributes, strict=True):
        grad = param.grad
        if grad is None:
            continue
        # Nearly all gradients that are not parts are plain and dense. All others take the slow path with more checks.
        if (
            update.entry.gradient_slice is None
            and type(grad) is torch.Tensor
            and grad.layout is torch.strided
            and grad.dtype in GRADIENT_DTYPES
            and grad.size() == size
            and grad.stride() == strides
            and grad.device == device
        ):
            yield ParamUpdate(update.entry, update.group, update.number, grad)
        else:
            yield _with_gradient(domain, update, grad)


def _with_gradient(domain: Domain, update: ParamUpdate, grad: torch.Tensor) -> ParamUpdate:
    entry = update.entry
    if _replaces_mean(entry, grad):
        part: Any = entry.gradient_slice.part  # type: ignore[union-attr]
        own = part.gradient_slice
        own.table.edits.forget([own.number])  # of values that are gone: a step that ranks refused may have noted one
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            edit(torch.ops.aten.copy_.default, (part, grad), {})
            # Another part: what the script kept of the one before would show other values from now on.
            grad = GradientPart(own, entry.param)
            entry.show_gradient(grad)
    if isinstance(grad, GradientPart) and grad.gradient_slice is entry.gradient_slice:
        own = grad.whole_slice()
        is_on_host = entry.shard.gradient_sum.is_on_host
        return ParamUpdate(entry, update.group, update.number, own.total, own.start, own, own.divisor, is_on_host)
    # Zeros are their own mean, if all ranks have them: one that has other values raises this on all of them. So torch's
    # get_state_dict() and set_state_dict() make states: they assign zeros and take a step.
    with_a_batch = (domain.leader or domain).mesh.world  # an expert's group may be one rank
    if entry.gradient_slice is not None and with_a_batch.size > 1 and not _is_zero(grad):
        raise _unreduced(entry, grad)
    return update._replace(grad=_usable(entry, grad))


def _replaces_mean(entry: ParamRecord, grad: torch.Tensor) -> bool:
    """True if the script assigned another gradient in place of the mean: the step compares it over ranks."""
    own = entry.gradient_slice
    if own is None or not own.has_mean or own.part is None or entry.outer is not entry.param:
        return False
    is_part_of_it = isinstance(grad, GradientPart) and grad.gradient_slice is own
    if is_part_of_it or own.pending is not None or grad.layout is not torch.strided:
        return False
    is_own = type(grad) is torch.Tensor and grad.data_ptr() == own.unreduced
    return not is_own and grad.size() == own.part.size() and grad.device == own.part.device


def _unreduced(entry: ParamRecord, grad: torch.Tensor) -> ShardoptError:
    """Returns the error for a gradient that shardopt has not averaged, though it took the module over."""
    own = entry.gradient_slice
    if own is None or grad.layout is not torch.strided or grad.data_ptr() != own.unreduced:
        return ShardoptError(
            "pass the params without the module (stage 0 or 1) if this script averages gradients itself, else call "
            f"loss.backward(): the gradient of {entry.name} was assigned by hand (torch.autograd.grad()), and is not "
            f"averaged.{hint()}"
        )
    if own.was_early:
        return ShardoptError(
            f"construct the optimizer before the backward, or call optimizer.bind(): the gradient of {entry.name} is "
            "this rank's own, not the mean over ranks, as it was accumulated before the module was bound."
        )
    return ShardoptError(
        "leave no_sync() for the last backward, call optimizer.reduce_gradients(), or pass params without the module "
        f"if this script averages gradients itself: the gradient of {entry.name} is this rank's own, not the "
        "mean over ranks."
    )


def _is_zero(grad: torch.Tensor) -> bool:
    return grad.layout is torch.strided and type(grad) is torch.Tensor and not bool(grad.any())


def _usable(entry: ParamRecord, grad: torch.Tensor) -> torch.Tensor:
    if grad.layout is not torch.strided:
        raise ShardoptError(
            "build the embedding with sparse=False, or give its param to torch.optim.SparseAdam: the gradient of "
            f"{entry.name} is sparse ({grad.layout}), and the fused update would read its indices as numbers."
        )
    format_of(grad.dtype, f"the gradient of {entry.name}")
    if grad.shape != entry.param.shape or grad.device != entry.param.device:
        raise ShardoptError(
            f"assign a gradient of shape {tuple(entry.param.shape)} on {entry.param.device} to {entry.name}: the one "
            f"that was assigned by hand has shape {tuple(grad.shape)} on {grad.device}."
        )
    return entry.shard.ordered(entry.index, grad.detach())


def measure(plan: StepPlan, scale: float, overflow: bool, is_part: bool) -> None:
    """Notes in the plan what the gradients hold, as far as the decision needs it.

    Args:
        scale: the loss scale.
        overflow: true if a GradScaler has found an Inf or NaN: none is counted.
        is_part: true if other ranks have other gradients of the model: the norm is summed over all, exactly.
    """
    domain, updates = plan.domain, plan.updates
    options = domain.options
    # The norm that backward reported does not do for the whole model: it is rounded, and only this domain's.
    needs_limbs = is_part and options.max_grad_norm is not None
    norms = norms_of(plan.slices) if plan.slices and not needs_limbs else None
    if norms is not None:
        # Every rank knows them from the last backward. One rank reports the count: the agreement adds up the reports.
        reports = domain.mesh.world.rank == domain.mesh.one_copy[0]
        # fsum rounds once, so that the order of params cannot show.
        two, _, counts = norms
        plan.norm = math.sqrt(math.fsum((two * two).tolist()))
        plan.nonfinite = int(np.add.reduce(counts)) if reports else 0
        return
    sampled = [] if domain.reducer is not None else _sample(domain, updates)
    together = list(joined(domain.shards, plan.launches))
    if options.max_grad_norm is not None:
        looked = [
            totals_of(each.one.spec.grad, each.gradients, Factors(each.one.divisor, 1.0 / scale)).view(-1)
            for each in together
        ]
    elif options.tuning.nonfinite == "propagate" or overflow:
        looked = []
    else:
        looked = _counts(together)
    found = read_together([*sampled, *looked])
    if sampled:
        plan.witness, found = int(found[0]), found[1:]
    if options.max_grad_norm is None:
        plan.nonfinite = sum(map(int, found))
        return
    limbs = [0] * LIMBS
    for each, totals in zip(together, found, strict=True):
        own, bad = sum_of_rows(totals.view(-1, COLUMNS), list(_counted_elsewhere(domain, each)))
        limbs, plan.nonfinite = [mine + other for mine, other in zip(limbs, own, strict=True)], plan.nonfinite + bad
    plan.limbs = tuple(limbs)


def _counted_elsewhere(domain: Domain, joined: JoinedLaunch) -> Iterator[int]:
    """Yields the rows of params whose norm another rank counts."""
    first = 0
    if not domain.counted_elsewhere:
        return
    for shard, launch in zip(joined.shards, joined.launches, strict=True):
        updates = {} if launch is None else launch.updates
        yield from (first + row for row, each in updates.items() if each.entry.param in domain.counted_elsewhere)
        first += shard.tables.num_rows


def _counts(launches: Sequence[JoinedLaunch]) -> list[torch.Tensor]:
    """Returns how many elements of all gradients are Inf or NaN, 1D [1] for each device that holds some."""
    counts: dict[torch.device, torch.Tensor] = {}
    for each in launches:
        device = each.gradients.row_of_block.device
        if device not in counts:
            counts[device] = torch.zeros(1, dtype=torch.int64, device=device)
        backend_of(device).count_nonfinite(each.one.spec.grad, each.gradients, counts[device])
    return list(counts.values())


def sampled(domain: Domain, updates: Sequence[ParamUpdate]) -> int:
    """Returns the index of the update whose gradient ranks compare in this step: another one every step."""
    return domain.steps_agreed % len(updates)


def _sample(domain: Domain, updates: Sequence[ParamUpdate]) -> list[torch.Tensor]:
    """Returns the sum of magnitudes of one block of one gradient, another param every step: the bits of a float64.

    Without the module shardopt does not reduce gradients. If nobody does (no DDP, or ``no_sync()`` around the last
    backward) every rank would update its slice with its own gradients; averaged ones are alike on all ranks.
    """
    if domain.mesh.world.size == 1 or not updates:
        return []
    sample = updates[sampled(domain, updates)].grad
    if sample.numel() == 0:
        return []
    block = sample.as_strided((min(sample.numel(), BLOCK),), (1,), sample.storage_offset())
    return [block.double().abs().sum(dim=0, keepdim=True).view(torch.int64)]
