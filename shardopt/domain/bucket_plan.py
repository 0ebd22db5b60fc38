"""Plans which params share a bucket, in which order: with integers only, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from ..partition.layout import BucketLayout, split_into_buckets
from ..partition.placement import Placement, Placements
from .formats import kept_for

if TYPE_CHECKING:
    from ..config import Options
    from ..rules import Rule
    from .formats import StreamFormats
    from .param import Candidate


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket before anything is allocated.

    Attributes:
        kept: the formats of masters, states and sums of gradients.
        is_released: True if its params are sharded, and gathered when they are needed.
    """

    members: tuple[Candidate, ...]
    layout: BucketLayout
    states: tuple[str, ...]
    kept: StreamFormats
    is_released: bool


def plan_buckets(
    candidates: Sequence[Candidate],
    rule: Rule,
    options: Options,
    num_shards: int,
    bucket_bytes: Callable[[torch.device], int],
    kept_whole: Collection[torch.Tensor] = (),
    unit_of: Mapping[torch.nn.Parameter, int] | None = None,
    stage_of: Mapping[torch.nn.Parameter, int] | None = None,
) -> list[PlannedBucket]:
    """Returns layouts for these params, in backward order.

    Args:
        bucket_bytes: the size of a bucket on a device.
        kept_whole: the params that ``Tuning.keep`` names.
        unit_of: the number of the unit that each param is gathered with, in the order of the model's modules. A bucket
            of sharded params holds params of one unit, whatever their bytes.
        stage_of: the number of the pipeline stage of each param, where this rank holds several: a backward reduces the
            buckets of one.
    """
    shards_params = Placements.of_stage(options.stage).param is Placement.SHARD
    formats: dict[tuple[torch.dtype, bool], StreamFormats] = {}  # once a kind: there may be thousands of params

    def kept_of(param: torch.nn.Parameter) -> StreamFormats:
        kind = param.dtype, param.numel() < options.tuning.compress_from
        if kind not in formats:
            formats[kind] = kept_for(rule, options, param.dtype, param.numel())
        return formats[kind]

    def key(
        candidate: Candidate,
    ) -> tuple[bool, int, int, str, tuple[str, ...], tuple[str, ...], str, tuple[bool, ...]]:
        _, param, group = candidate
        # A bucket of whole params holds those of many layers: backward fills it last, so it comes last.
        is_whole = not shards_params or param.numel() < options.tuning.keep_below or param in kept_whole
        unit = 0 if is_whole or unit_of is None else -unit_of[param]
        stage = -stage_of.get(param, 0) if stage_of else 0
        states, name = rule.variant(group, param.shape).states, rule.of(group).name
        # The params of a bucket share one variant, see launches_of().
        answers = rule.answers(group, param.shape)
        return is_whole, stage, unit, str(param.dtype), kept_of(param).key, states, name, answers

    # Backward runs from the last param to the first; sorting is stable, so each kind keeps that order.
    backward = sorted(reversed(candidates), key=key)
    plan = []
    for (is_whole, _, _, _, _, states, _, _), same_kind in groupby(backward, key=key):
        kind = list(same_kind)
        sizes = [param.numel() * param.element_size() for _, param, _ in kind]
        most = bucket_bytes(kind[0][1].device) if is_whole or unit_of is None else sum(sizes)
        for indices in split_into_buckets(sizes, most):
            members = tuple(kind[index] for index in indices)
            layout = BucketLayout(tuple(param.numel() for _, param, _ in members), num_shards)
            plan.append(PlannedBucket(members, layout, states, kept_of(members[0][1]), not is_whole))
    return plan
