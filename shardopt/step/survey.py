"""The survey: what this rank would do if the step were taken now. Changes nothing that the step depends on.

Everything that can fail on one rank alone (a param that was moved, a sparse gradient, a compiler that is missing, a
table that does not fit the device) fails here, before the ranks agree, so that it can be raised on all of them.
"""

import hashlib
import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..domain.domain import Domain
from ..domain.masters import follow_written_params
from ..domain.param import Group, ParamRecord
from ..domain.shard import Shard
from ..errors import BindingError, ShardoptError
from ..kernels.formats import ROOT2, format_of
from ..kernels.launch import backend_of
from ..kernels.reductions import LIMBS
from ..kernels.spec import StepSpec
from ..kernels.tables import BLOCK, Factors, Gradients, Noise
from ..rules import Variant
from ..tensors.gradient import GradientPart
from ..tensors.gradient_slice import GradientSlice


class Scaling(NamedTuple):
    """What a GradScaler's fused protocol hands over."""

    scale: float = 1.0
    overflow: bool = False


class Place(NamedTuple):
    """Where a bound param stands in the groups."""

    entry: ParamRecord
    group: int
    number: int  # of the param, counted through the groups; of a DTensor, in the upper 32 bits, that of the slice


@dataclass(frozen=True)
class Ready:
    """A param that will be updated."""

    entry: ParamRecord
    group: int
    grad: torch.Tensor  # dense, in the param's storage order: the whole gradient, or this rank's slice of a reduced one
    number: int  # as of the place
    start: int = 0  # which element of the param is its first
    gradient_slice: GradientSlice | None = None  # that it is the slice of
    at_rest: bool = False  # in host memory, beside a device


class Scalars(NamedTuple):
    """The scalars of every param that will be updated."""

    now: dict[ParamRecord, tuple[float, ...]]  # in the order of its variant's names
    carried: dict[ParamRecord, dict[str, float]]  # to its next step


@dataclass(frozen=True)
class Launch:
    """One kernel launch over one shard: the params of one variant, whose gradients have one dtype and are in one place.

    Gradients are where backward left them, the other tables where the kernel runs.
    """

    shard: Shard
    spec: StepSpec
    gradients: Gradients
    scalars: torch.Tensor  # 2D [num_rows, len(spec.variant.scalars)] fp32
    ready: Mapping[int, Ready]  # row -> param
    divisor: int  # of every gradient: how many were added up
    noise: Noise | None  # where something is not rounded to nearest
    at_rest: bool  # whether the gradients are in host memory, beside a device


class GradientStats(NamedTuple):
    """What the gradients were found to hold, where the decision needs it."""

    nonfinite: int = 0  # Inf and NaN in this rank's shards
    limbs: tuple[int, ...] = (0,) * LIMBS  # sum of squares of this rank's shards
    witness: int = 0  # bits of a float64: a sample that must be alike on all ranks, see _witness
    norm: float | None = None  # 2-norm of all gradients, where every rank knows it


@dataclass(frozen=True)
class StepPlan:
    """What this rank would do."""

    ready: list[Ready] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    scalars: Scalars = field(default_factory=lambda: Scalars({}, {}))
    states: dict[Shard, dict[str, None]] = field(default_factory=dict)  # names each shard needs, the same on all ranks
    written: list[ParamRecord] = field(default_factory=list)  # params that others wrote since the last step
    looked: GradientStats = field(default_factory=GradientStats)


def survey(domain: Domain, groups: Sequence[Group], numbers: Sequence[dict[str, Any]], scaling: Scaling) -> StepPlan:
    """Raises what is wrong on this rank."""
    written = [entry for entry in domain.entries.values() if entry.param._version != entry.version]
    follow_written_params(domain)
    ready = _find_ready(domain, groups)
    scalars = scalars_of(domain, numbers, ready)
    launches = _plan_launches(domain, numbers, ready, scalars)
    looked = _look_at_gradients(domain, launches, ready, scaling)
    return StepPlan(ready, launches, scalars, states_of_shards(domain, groups, numbers), written, looked)


def placed(domain: Domain, groups: Sequence[Group]) -> Iterator[Place]:
    """Every bound param of the groups.

    Raises:
        BindingError: one is not where it was put, or listed twice.
    """
    seen: set[ParamRecord] = set()
    counted = itertools.count()
    for group_number, group in enumerate(groups):
        for param in group["params"]:
            number = next(counted)
            entry = domain.entries.get(param)
            if entry is None:
                continue  # frozen
            if entry in seen:
                raise BindingError(
                    f"{entry.name} is listed twice in the param groups: it would be updated twice. Remove one."
                )
            seen.add(entry)
            entry.check()
            # Tensor-parallel ranks hold different elements under one number; ranks that hold copies must stay alike.
            yield Place(entry, group_number, number + (domain.slice_numbers.get(param, 0) << 32))


def _find_ready(domain: Domain, groups: Sequence[Group]) -> list[Ready]:
    return [
        _ready(domain, entry, group, number, entry.param.grad)
        for entry, group, number in placed(domain, groups)
        if entry.param.grad is not None
    ]


def _ready(domain: Domain, entry: ParamRecord, group: int, number: int, grad: torch.Tensor) -> Ready:
    if isinstance(grad, GradientPart) and grad.gradient_slice is entry.gradient_slice:
        gradient_slice = grad.whole_slice()
        return Ready(
            entry,
            group,
            gradient_slice.total,
            number,
            gradient_slice.start,
            gradient_slice,
            entry.shard.reduced.is_on_host,
        )
    # Zeros are their own mean, if all ranks have them: one that has other values raises this on all of them. So torch's
    # get_state_dict() and set_state_dict() make states: they assign zeros and take a step.
    if entry.gradient_slice is not None and domain.mesh.world.size > 1 and not _is_zero(grad):
        raise ShardoptError(
            f"the gradient of {entry.name} is this rank's own, not the mean over ranks: each rank would update its "
            "slice with another batch's. It was accumulated under no_sync() with no synchronised backward after it "
            "(leave no_sync() for the last backward before step(), or call zero_grad()), or assigned by hand, or came "
            "from a submodule before the first forward of the module that was handed over (call optimizer.bind() "
            "before the first backward)."
        )
    return Ready(entry, group, _usable(entry, grad), number)


def _is_zero(grad: torch.Tensor) -> bool:
    return grad.layout is torch.strided and type(grad) is torch.Tensor and not bool(grad.any())


def _usable(entry: ParamRecord, grad: torch.Tensor) -> torch.Tensor:
    if grad.layout is not torch.strided:
        raise ShardoptError(
            f"the gradient of {entry.name} is sparse ({grad.layout}): the fused update reads dense gradients and would "
            "read its indices as numbers. Build the embedding with sparse=False, or give this param to "
            "torch.optim.SparseAdam."
        )
    format_of(grad.dtype, f"the gradient of {entry.name}")
    if grad.shape != entry.param.shape or grad.device != entry.param.device:
        raise ShardoptError(
            f"the gradient of {entry.name} has shape {tuple(grad.shape)} on {grad.device}, the param "
            f"{tuple(entry.param.shape)} on {entry.param.device}: it was assigned by hand. Assign one that fits."
        )
    return entry.shard.ordered(entry.index, grad.detach())


def states_of_shards(
    domain: Domain, groups: Sequence[Group], numbers: Sequence[dict[str, Any]]
) -> dict[Shard, dict[str, None]]:
    """By the groups alone, not by what this rank holds of them: every rank's shards then hold the same states."""
    states: dict[Shard, dict[str, None]] = {shard: {} for shard in domain.shards}
    for group, plain in zip(groups, numbers, strict=True):
        names = dict.fromkeys(domain.rule.variant(plain).states)
        for param in group["params"]:
            if param in domain.entries:
                states[domain.entries[param].shard].update(names)
    return states


def scalars_of(domain: Domain, numbers: Sequence[dict[str, Any]], ready: Sequence[Ready]) -> Scalars:
    """Params of one group, step and carried values share one evaluation."""
    rule = domain.rule
    known: dict[tuple[Any, ...], tuple[tuple[float, ...], dict[str, float]]] = {}
    scalars = Scalars({}, {})
    for each in ready:
        entry = each.entry
        key = (each.group, entry.step, *entry.carried.values())
        if key not in known:
            group = numbers[each.group]
            known[key] = rule.evaluate(rule.variant(group), group, entry.step + 1, entry.carried)
        scalars.now[entry], scalars.carried[entry] = known[key]
    return scalars


def _plan_launches(
    domain: Domain, numbers: Sequence[dict[str, Any]], ready: Sequence[Ready], scalars: Scalars
) -> list[Launch]:
    by_shard: dict[Shard, dict[int, Ready]] = defaultdict(dict)
    for each in ready:
        by_shard[each.entry.shard][each.entry.index] = each
    variants = [domain.rule.variant(group) for group in numbers]
    seed = domain.options.tuning.seed
    return [
        launch for shard in domain.shards for launch in launches_of(shard, variants, by_shard[shard], scalars, seed)
    ]


def launches_of(
    shard: Shard, variants: Sequence[Variant], ready: Mapping[int, Ready], scalars: Scalars, seed: int
) -> Iterator[Launch]:
    """What updates these params of one shard, by their index in the bucket."""
    rows: dict[tuple[Variant, torch.dtype, bool], dict[int, Ready]] = defaultdict(dict)
    for row, piece in enumerate(shard.pieces):
        each = ready.get(piece.param)
        if each is not None:
            rows[variants[each.group], each.grad.dtype, each.at_rest][row] = each
    for (variant, dtype, at_rest), members in rows.items():
        spec = shard.spec(variant, format_of(dtype, "a gradient"))
        gradients = shard.tables.gradients({row: (each.grad, each.start) for row, each in members.items()}, at_rest)
        where = shard.home.device
        backend_of(where).prepare(spec, where, gradients.aligned)
        table = np.zeros((shard.tables.num_rows, len(variant.scalars)), dtype=np.float32)
        for row, each in members.items():
            table[row] = scalars.now[each.entry]
        numbers_there = torch.from_numpy(table).to(where)
        noise = _noise(seed, shard, members) if spec.needs_noise else None
        yield Launch(shard, spec, gradients, numbers_there, members, _divisor(members.values()), noise, at_rest)


def _noise(seed: int, shard: Shard, members: Mapping[int, Ready]) -> Noise:
    """A key of its own for each param (of a DTensor, each slice) and step, whichever rank and shard it is in."""
    counters = {}
    for row, each in members.items():
        step = each.entry.step + 1
        told = struct.pack("<qqq", seed, each.number, step)
        key, other_key = struct.unpack("<ii", hashlib.blake2b(told, digest_size=8).digest())
        counters[row] = (key, other_key, step * ROOT2 % 2**32)
    return shard.tables.noise(counters, shard.home.device)


def _divisor(members: Iterable[Ready]) -> int:
    """What one launch divides by: a power of two, which a kernel does exactly by multiplying.

    Others are divided here, as are all where some were (a user scaled them): one more pass over this rank's slices.
    """
    slices = [each.gradient_slice for each in members if each.gradient_slice is not None]
    divisors = {each.divisor for each in slices}
    if len(divisors) == 1 and (divisor := divisors.pop()).bit_count() == 1:
        return divisor
    for each in slices:
        each.divide()
    return 1


def _look_at_gradients(
    domain: Domain, launches: Sequence[Launch], ready: Sequence[Ready], scaling: Scaling
) -> GradientStats:
    options = domain.options
    if ready and all(each.gradient_slice is not None and each.gradient_slice.norms is not None for each in ready):
        return _known(domain, ready)
    witness = 0 if domain.reducer is not None else _witness(domain, ready)
    if options.max_grad_norm is None and (options.tuning.nonfinite == "propagate" or scaling.overflow):
        return GradientStats(witness=witness)
    nonfinite, limbs = 0, [0] * LIMBS
    unscale = 1.0 / scaling.scale
    for launch in launches:
        backend = backend_of(launch.gradients.rows.device)
        if options.max_grad_norm is None:
            nonfinite += backend.count_nonfinite(launch.spec.grad, launch.gradients)
        else:
            sums = backend.block_sums(launch.spec.grad, launch.gradients, Factors(launch.divisor, unscale))
            total = backend.totals(sums, launch.gradients).of_shard(_uncounted(domain, launch))
            nonfinite += total.nonfinite
            limbs = [mine + other for mine, other in zip(limbs, total.limbs, strict=True)]
    return GradientStats(nonfinite, tuple(limbs), witness)


def _uncounted(domain: Domain, launch: Launch) -> list[int]:
    return [row for row, each in launch.ready.items() if each.entry.param in domain.counted_elsewhere]


def _known(domain: Domain, ready: Sequence[Ready]) -> GradientStats:
    """From what the last backward told every rank; one of them reports the count, so that it is not added up."""
    norms = [
        each.gradient_slice.norms
        for each in ready
        if each.gradient_slice is not None and each.gradient_slice.norms is not None
    ]
    reports = domain.mesh.world.rank == domain.mesh.one_copy[0]
    # fsum rounds once, so that the order of params cannot show.
    norm = math.sqrt(math.fsum(each.two * each.two for each in norms))
    return GradientStats(nonfinite=sum(each.nonfinite for each in norms) if reports else 0, norm=norm)


def _witness(domain: Domain, ready: Sequence[Ready]) -> int:
    """Sum of magnitudes of one block of one gradient, another param every step, as the bits of a float64.

    Without the module shardopt does not reduce gradients. If nobody does (no DDP, or ``no_sync()`` around the last
    backward) every rank would update its slice with its own gradients; averaged ones are alike on all ranks.
    """
    if domain.mesh.world.size == 1 or not ready:
        return 0
    sample = ready[domain.rounds % len(ready)].grad
    if sample.numel() == 0:
        return 0
    value = float(sample.as_strided((min(sample.numel(), BLOCK),), (1,), sample.storage_offset()).double().abs().sum())
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)
