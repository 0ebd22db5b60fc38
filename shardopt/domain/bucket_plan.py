"""Which params share a bucket, in which order: integers only, before anything is allocated, and on no rank at all."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..config import Options
from ..partition.layout import BucketLayout, split_into_buckets
from ..partition.placement import Placement, Placements
from ..rules import Rule
from .formats import Kept, kept_for
from .param import Candidate


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket before anything is allocated."""

    members: tuple[Candidate, ...]
    layout: BucketLayout
    states: tuple[str, ...]
    kept: Kept
    is_released: bool  # between uses: its params are gathered when they are needed


def plan_buckets(
    candidates: Sequence[Candidate],
    rule: Rule,
    options: Options,
    num_shards: int,
    bucket_bytes: Callable[[torch.device], int],
    kept_whole: Collection[torch.Tensor] = (),
) -> list[PlannedBucket]:
    """Layouts for these params, in backward order. ``kept_whole``: params that ``Tuning.keep`` names."""
    parts_with_params = Placements.of_stage(options.stage).param is Placement.SHARD
    formats: dict[tuple[torch.dtype, bool], Kept] = {}  # a model has thousands of params, and two kinds of formats

    def kept_of(param: torch.nn.Parameter) -> Kept:
        kind = param.dtype, param.numel() < options.tuning.compress_from
        if kind not in formats:
            formats[kind] = kept_for(rule, options, param.dtype, param.numel())
        return formats[kind]

    def key(candidate: Candidate) -> tuple[bool, str, tuple[str, ...], tuple[str, ...]]:
        _, param, group = candidate
        # Buckets of small params hold those of many layers: they are full last, and come last.
        is_whole = not parts_with_params or param.numel() < options.tuning.keep_below or param in kept_whole
        return is_whole, str(param.dtype), kept_of(param).key, rule.variant(group).states

    # Backward runs from the last param to the first; sorting is stable, so each kind keeps that order.
    backward = sorted(reversed(candidates), key=key)
    plan = []
    for (is_whole, _, _, states), same_kind in groupby(backward, key=key):
        kind = list(same_kind)
        sizes = [param.numel() * param.element_size() for _, param, _ in kind]
        for indices in split_into_buckets(sizes, bucket_bytes(kind[0][1].device)):
            members = tuple(kind[index] for index in indices)
            layout = BucketLayout(tuple(param.numel() for _, param, _ in members), num_shards)
            plan.append(PlannedBucket(members, layout, states, kept_of(members[0][1]), not is_whole))
    return plan
