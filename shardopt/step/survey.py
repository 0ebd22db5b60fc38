"""The survey: what this rank would do if the step were taken now. It changes no param, master, state or gradient sum.

Everything that can fail on one rank alone (a param that was moved, a sparse gradient, a compiler that is missing, a
table that does not fit the device) fails here. The ranks have not agreed yet, so the error can be raised on all of
them.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..domain.domain import Domain
from ..domain.listed import ListedParams
from ..domain.param import Group, ParamRecord
from ..domain.shard import Shard
from ..errors import ShardoptError
from ..kernels.formats import GRADIENT_DTYPES, format_of
from ..kernels.launch import backend_of
from ..kernels.reductions import LIMBS
from ..kernels.tables import BLOCK, Factors
from ..tensors.gradient import GradientPart
from .launches import (
    GradientStats,
    Launch,
    ParamUpdate,
    StepPlan,
    plan_launches,
    scalars_of,
)


def survey(
    domain: Domain,
    groups: Sequence[Group],
    numbers: Sequence[dict[str, Any]],
    scale: float = 1.0,
    overflow: bool = False,
) -> StepPlan:
    """Plans the step of one domain.

    Args:
        numbers: the hyper-parameters of each group, as plain numbers.
        scale: the loss scale.
        overflow: true if a GradScaler has found an Inf or NaN, so that nobody need look for one.

    Raises:
        ShardoptError: this rank cannot take the step.
    """
    listed = domain.listed(groups)
    updates = list(_with_gradients(domain, listed))
    scalars = scalars_of(domain, numbers, updates)
    launches = plan_launches(domain, numbers, updates, scalars)
    stats = _stats_of(domain, launches, updates, scale, overflow)
    states, written = states_of_shards(domain, listed, numbers), written_params(domain)
    return StepPlan(domain, numbers, updates, launches, scalars, states, written, stats)


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
    for update, param, size, strides, device, _ in zip(updates, listed.params, *listed.looks, strict=True):
        grad = param.grad
        if grad is None:
            continue
        # What nearly all gradients are of which nobody makes a part; all others are looked at with care.
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
    if isinstance(grad, GradientPart) and grad.gradient_slice is entry.gradient_slice:
        own = grad.whole_slice()
        is_on_host = entry.shard.reduced.is_on_host
        return ParamUpdate(entry, update.group, update.number, own.total, own.start, own, own.divisor, is_on_host)
    # Zeros are their own mean, if all ranks have them: one that has other values raises this on all of them. So torch's
    # get_state_dict() and set_state_dict() make states: they assign zeros and take a step.
    if entry.gradient_slice is not None and domain.mesh.world.size > 1 and not _is_zero(grad):
        raise ShardoptError(
            "leave no_sync() for the last backward before step() (or call zero_grad()), and call optimizer.bind() "
            f"before a backward that no forward of the whole module precedes: the gradient of {entry.name} is this "
            "rank's own, not the mean over ranks, so each rank would update its slice with another batch's. It was "
            "accumulated under no_sync(), came from a submodule, or was assigned by hand."
        )
    return update._replace(grad=_usable(entry, grad))


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


def states_of_shards(
    domain: Domain, listed: ListedParams, numbers: Sequence[dict[str, Any]]
) -> dict[Shard, dict[str, None]]:
    """Returns the names of the states that each shard needs.

    They follow from the groups alone, not from what this rank holds: the shards of all ranks then hold the same states.
    """
    states: dict[Shard, dict[str, None]] = {shard: {} for shard in domain.shards}
    names = [dict.fromkeys(domain.rule.variant(plain).states) for plain in numbers]
    for group, shard in listed.shards:
        states[shard].update(names[group])
    return states


def _stats_of(
    domain: Domain, launches: Sequence[Launch], updates: Sequence[ParamUpdate], scale: float, overflow: bool
) -> GradientStats:
    options = domain.options
    slices = [each.gradient_slice for each in updates]
    norms = [each.norms for each in slices if each is not None and each.norms is not None]
    if updates and len(norms) == len(updates):
        # The last backward told every rank. One rank reports the count: the agreement adds up what ranks report.
        reports = domain.mesh.world.rank == domain.mesh.one_copy[0]
        # fsum rounds once, so that the order of params cannot show.
        norm = math.sqrt(math.fsum(each.two * each.two for each in norms))
        return GradientStats(nonfinite=sum(each.nonfinite for each in norms) if reports else 0, norm=norm)
    witness = 0 if domain.reducer is not None else _witness(domain, updates)
    if options.max_grad_norm is None and (options.tuning.nonfinite == "propagate" or overflow):
        return GradientStats(witness=witness)
    nonfinite, limbs = 0, [0] * LIMBS
    unscale = 1.0 / scale
    for launch in launches:
        backend = backend_of(launch.gradients.rows.device)
        if options.max_grad_norm is None:
            nonfinite += backend.count_nonfinite(launch.spec.grad, launch.gradients)
        else:
            sums = backend.block_sums(launch.spec.grad, launch.gradients, Factors(launch.divisor, unscale))
            uncounted = [row for row, each in launch.updates.items() if each.entry.param in domain.counted_elsewhere]
            own, bad = backend.totals(sums, launch.gradients).of_shard(uncounted)
            nonfinite += bad
            limbs = [mine + other for mine, other in zip(limbs, own, strict=True)]
    return GradientStats(nonfinite, tuple(limbs), witness)


def _witness(domain: Domain, updates: Sequence[ParamUpdate]) -> int:
    """Returns the sum of magnitudes of one block of one gradient, another param every step, as bits of a float64.

    Without the module shardopt does not reduce gradients. If nobody does (no DDP, or ``no_sync()`` around the last
    backward) every rank would update its slice with its own gradients; averaged ones are alike on all ranks.
    """
    if domain.mesh.world.size == 1 or not updates:
        return 0
    sample = updates[domain.rounds % len(updates)].grad
    if sample.numel() == 0:
        return 0
    value = float(sample.as_strided((min(sample.numel(), BLOCK),), (1,), sample.storage_offset()).double().abs().sum())
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)
