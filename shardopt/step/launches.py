"""The plan of a step: the tables of its launches, and which params each one updates, with which scalars and noise."""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..domain.domain import Domain
from ..domain.param import ParamRecord
from ..domain.shard import Shard
from ..kernels.formats import ROOT2, format_of
from ..kernels.launch import backend_of
from ..kernels.reductions import LIMBS
from ..kernels.spec import StepSpec
from ..kernels.tables import Gradients
from ..rules import Variant
from ..tensors.gradient_slice import GradientSlice

_NO_GRADIENT = torch.empty(0)


class ParamUpdate(NamedTuple):
    """One param in a step: where it stands in the param groups, and the gradient that updates it.

    Attributes:
        group: index of the param's group.
        number: index of the param, counted through all groups. The upper 32 bits number the slice of a DTensor.
        grad: dense, in the param's storage order: the whole gradient, or this rank's slice of a reduced one.
        start: index in the param of the first element of ``grad``.
        gradient_slice: the slice whose ``total`` is ``grad``; None for a gradient that is not reduced by shardopt.
        divisor: number by which ``grad`` still has to be divided; 1 for a mean.
        is_on_host: true if ``grad`` is in host memory and the param is on a device.
    """

    entry: ParamRecord
    group: int
    number: int
    grad: torch.Tensor = _NO_GRADIENT
    start: int = 0
    gradient_slice: GradientSlice | None = None
    divisor: int = 1
    is_on_host: bool = False


# Of every param that a step updates: its scalars in the order of the names in the variant, and what its next step gets.
Scalars = dict[ParamRecord, tuple[tuple[float, ...], dict[str, float]]]


@dataclass(frozen=True)
class Launch:
    """One kernel launch over one shard.

    Its params share one variant of the rule. Their gradients share dtype, divisor and device: they stay where backward
    left them. All other tables are where the kernel runs.
    """

    shard: Shard
    spec: StepSpec
    gradients: Gradients
    scalars: torch.Tensor  # 2D [num_rows, len(spec.variant.scalars)] fp32
    updates: Mapping[int, ParamUpdate]  # row -> param
    divisor: int  # of every gradient: how many were added up
    noise: torch.Tensor | None  # 2D [num_rows, 4] int32; None if everything is rounded to nearest
    is_on_host: bool  # true if the gradients are in host memory and the shard is on a device


class GradientStats(NamedTuple):
    """What the gradients hold, as far as the decision needs it."""

    nonfinite: int = 0  # Inf and NaN in this rank's shards
    limbs: tuple[int, ...] = (0,) * LIMBS  # sum of squares of this rank's shards
    witness: int = 0  # bits of a float64: a sample that must be alike on all ranks, see survey.py
    norm: float | None = None  # 2-norm of all gradients, where every rank knows it


@dataclass(frozen=True)
class StepPlan:
    """What this rank would do in one domain."""

    domain: Domain
    numbers: Sequence[dict[str, Any]] = ()  # hyper-parameters of each group, as plain numbers
    updates: list[ParamUpdate] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    scalars: Scalars = field(default_factory=dict)
    states: dict[Shard, dict[str, None]] = field(default_factory=dict)  # names each shard needs, the same on all ranks
    written: list[ParamRecord] = field(default_factory=list)  # params that others wrote since the last step
    stats: GradientStats = field(default_factory=GradientStats)


def scalars_of(domain: Domain, numbers: Sequence[dict[str, Any]], updates: Sequence[ParamUpdate]) -> Scalars:
    """Evaluates the rule's scalars, once for all params that share group, step and carried values."""
    rule = domain.rule
    known: dict[tuple[Any, ...], tuple[tuple[float, ...], dict[str, float]]] = {}
    scalars: Scalars = {}
    for each in updates:
        entry = each.entry
        key = (each.group, entry.step, *entry.carried.values())
        if key not in known:
            group = numbers[each.group]
            known[key] = rule.evaluate(rule.variant(group), group, entry.step + 1, entry.carried)
        scalars[entry] = known[key]
    return scalars


def plan_launches(
    domain: Domain, numbers: Sequence[dict[str, Any]], updates: Sequence[ParamUpdate], scalars: Scalars
) -> list[Launch]:
    """Makes the launches of all shards, in the order of the shards."""
    by_shard: dict[Shard, dict[int, ParamUpdate]] = defaultdict(dict)
    for each in updates:
        by_shard[each.entry.shard][each.entry.index] = each
    variants = [domain.rule.variant(group) for group in numbers]
    seed = domain.options.tuning.seed
    return [
        launch for shard in domain.shards for launch in launches_of(shard, variants, by_shard[shard], scalars, seed)
    ]


def launches_of(
    shard: Shard, variants: Sequence[Variant], updates: Mapping[int, ParamUpdate], scalars: Scalars, seed: int
) -> Iterator[Launch]:
    """Yields the launches that update params of one shard.

    Args:
        variants: of each param group.
        updates: index of the param in its bucket -> its update.
    """
    rows: dict[tuple[int, torch.dtype, int, bool], dict[int, ParamUpdate]] = defaultdict(dict)
    first_with = [variants.index(each) for each in variants]  # hashed by their number: there are many params
    for row, piece in enumerate(shard.pieces):
        each = updates.get(piece.param)
        if each is not None:
            rows[first_with[each.group], each.grad.dtype, each.divisor, each.is_on_host][row] = each
    for (kind, dtype, divisor, is_on_host), members in rows.items():
        variant = variants[kind]
        spec = shard.spec(variant, format_of(dtype, "a gradient"))
        is_whole = not is_on_host and len(members) == len(shard.pieces)
        if is_whole and all(each.gradient_slice is not None for each in members.values()):
            gradients = shard.sums  # of the reducer, which lie where they lay at every step
        else:
            grads = {row: (each.grad, each.start) for row, each in members.items()}
            gradients = shard.tables.gradients(grads, is_on_host)
        device = shard.home.device
        backend_of(device).prepare(spec, device, gradients.aligned)
        table = np.zeros((shard.tables.num_rows, len(variant.scalars)), dtype=np.float32)
        # Few are evaluated, by scalars_of(): the rows of each are filled together.
        alike: dict[int, tuple[tuple[float, ...], list[int]]] = {}
        for row, each in members.items():
            values = scalars[each.entry][0]
            alike.setdefault(id(values), (values, []))[1].append(row)
        for values, of_rows in alike.values():
            table[of_rows] = values
        noise = _noise(seed, shard, members) if spec.needs_noise else None
        yield Launch(shard, spec, gradients, torch.from_numpy(table).to(device), members, divisor, noise, is_on_host)


def _noise(seed: int, shard: Shard, members: Mapping[int, ParamUpdate]) -> torch.Tensor:
    """Makes a key for each param (each slice of a DTensor) and step, the same on whichever rank and shard it is."""
    counters = {}
    for row, each in members.items():
        step = each.entry.step + 1
        told = struct.pack("<qqq", seed, each.number, step)
        key, other_key = struct.unpack("<ii", hashlib.blake2b(told, digest_size=8).digest())
        counters[row] = (key, other_key, step * ROOT2 % 2**32)
    return shard.tables.noise(counters, shard.home.device)
