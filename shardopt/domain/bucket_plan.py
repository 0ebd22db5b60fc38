"""Plans which params share a bucket, in which order: with integers only, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from ..partition.layout import BucketLayout, split_into_buckets
from ..partition.matrix_plan import cost_of
from ..partition.packing import Packable, Packer, Split
from ..partition.zero_stage import ZeroStage
from ..rules.matrix import MatrixRule, matrices_of
from .formats import OWN_DTYPE, formats_for

if TYPE_CHECKING:
    from ..config import Options
    from ..rules import Rule
    from .formats import DtypeOf, StreamFormats
    from .param import Candidate, Group


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket before anything is allocated.

    Attributes:
        formats: of masters, states and sums of gradients.
        shards_params: True if its params are sharded, and gathered when they are needed.
        dtype: in which the model sees its params.
        is_cast: True if its params were handed over in fp32, and the model sees less of them.
    """

    members: tuple[Candidate, ...]
    layout: BucketLayout
    states: tuple[str, ...]
    formats: StreamFormats
    shards_params: bool
    dtype: torch.dtype
    is_cast: bool

    @property
    def keeps_exact(self) -> bool:
        """True if ranks keep slices in fp32 of what is gathered in less: these slices are the masters."""
        return self.is_cast and self.shards_params


@dataclass(frozen=True)
class MatrixStats:
    """How many matrices of a rule of whole matrices lie whole in a shard of their bucket.

    Attributes:
        matrices: their number.
        whole: the number of those that lie whole on one rank.
        sliced: elements of the others, whose slices travel.
        numel: of all params in buckets that have matrices.
        padding: elements of these buckets that belong to no param.
    """

    matrices: int = 0
    whole: int = 0
    sliced: int = 0
    numel: int = 0
    padding: int = 0

    def __add__(self, other: MatrixStats) -> MatrixStats:
        return MatrixStats(  # field by field: a model of a trillion params has ten thousand buckets to add
            self.matrices + other.matrices,
            self.whole + other.whole,
            self.sliced + other.sliced,
            self.numel + other.numel,
            self.padding + other.padding,
        )

    def __str__(self) -> str:
        return f"{self.whole} of {self.matrices} (padding {self.padding / max(self.numel, 1):.1%})"


NO_MATRICES = MatrixStats()


def plan_buckets(
    candidates: Sequence[Candidate],
    rule: Rule,
    options: Options,
    num_shards: int,
    bucket_bytes: Callable[[torch.device], int],
    kept_whole: Collection[torch.Tensor] = (),
    unit_of: Mapping[torch.nn.Parameter, int] | None = None,
    stage_of: Mapping[torch.nn.Parameter, int] | None = None,
    slices: Collection[torch.Tensor] = (),
    dtype_of: DtypeOf = OWN_DTYPE,
) -> list[PlannedBucket]:
    """Returns layouts for these params, in backward order; that of params within a bucket of whole matrices may differ.

    Args:
        bucket_bytes: the size of a bucket on a device.
        kept_whole: the params that ``Tuning.keep`` names.
        unit_of: the number of the unit that each param is gathered with, in the order of the model's modules. A bucket
            of sharded params holds params of one unit, whatever their bytes.
        stage_of: the number of the pipeline stage of each param, where this rank holds several: a backward reduces the
            buckets of one.
        slices: the params that may be slices of matrices, which no layout makes whole.
        dtype_of: tells in which dtype the model will see a param.
    """
    shards_params = ZeroStage(options.stage).shards_params
    known: dict[tuple[torch.dtype, bool], StreamFormats] = {}  # once a kind: there may be thousands of params

    def formats_of(param: torch.nn.Parameter) -> StreamFormats:
        kind = dtype_of(param), param.numel() < options.tuning.compress_from
        if kind not in known:
            known[kind] = formats_for(rule, options, kind[0], param.numel())
        return known[kind]

    def stays_whole(param: torch.nn.Parameter) -> bool:
        return not shards_params or param.numel() < options.tuning.keep_below or param in kept_whole

    def is_cast(param: torch.nn.Parameter) -> bool:
        return dtype_of is not OWN_DTYPE and dtype_of(param) is not torch.float32

    def key(candidate: Candidate) -> tuple[Any, ...]:
        """Equal for params that may share a bucket, and in the order of buckets."""
        _, param, group = candidate
        # A bucket of whole params holds those of many layers: backward fills it last, so it comes last.
        is_whole = stays_whole(param)
        unit = 0 if is_whole or unit_of is None else -unit_of[param]
        stage = -stage_of.get(param, 0) if stage_of else 0
        # The params of a bucket share one variant, see launches_of().
        variant = rule.variant(group, param.shape).states, rule.of(group).name, rule.answers(group, param.shape)
        return is_whole, stage, unit, str(dtype_of(param)), is_cast(param), formats_of(param).key, *variant

    # Backward runs from the last param to the first; sorting is stable, so each kind keeps that order.
    backward = sorted(((key(each), each) for each in reversed(candidates)), key=itemgetter(0))
    plan, packer = [], Packer(num_shards)
    for _, same_kind in groupby(backward, key=itemgetter(0)):
        kind = [each for _, each in same_kind]
        _, first, group = kind[0]
        dtype = dtype_of(first)
        is_whole, states = stays_whole(first), rule.variant(group, first.shape).states
        most = bucket_bytes(first.device) if is_whole or unit_of is None else None
        packs = num_shards > 1 and isinstance(rule.of(group), MatrixRule)
        if packs and not any(param in slices for _, param, _ in kind):
            splits = packer.split([_packable(param, group, dtype.itemsize) for _, param, group in kind], most)
        else:
            splits = _splits(kind, dtype.itemsize, most, num_shards)
        for indices, layout in splits:
            members = tuple(kind[index] for index in indices)
            formats = formats_of(members[0][1])
            planned = PlannedBucket(members, layout, states, formats, not is_whole, dtype, is_cast(first))
            plan.append(replace(planned, formats=replace(formats, master=None)) if planned.keeps_exact else planned)
    return plan


def _splits(kind: Sequence[Candidate], itemsize: int, bucket_bytes: int | None, num_shards: int) -> Iterator[Split]:
    sizes = [param.numel() * itemsize for _, param, _ in kind]
    for indices in split_into_buckets(sizes, sum(sizes) if bucket_bytes is None else bucket_bytes):
        yield Split(indices, BucketLayout(tuple(kind[index][1].numel() for index in indices), num_shards))


def _packable(param: torch.nn.Parameter, group: Group, itemsize: int) -> Packable:
    shapes = matrices_of(param.shape, group.get("matrices"))
    sizes = tuple(rows * columns for rows, columns in shapes)
    return Packable(param.numel(), sizes, sum(cost_of(*each) for each in shapes), itemsize)


def matrix_stats(rule: Rule, members: Sequence[Candidate], layout: BucketLayout) -> MatrixStats:
    """Counts the matrices of one bucket; there are none if its rule is elementwise."""
    if not members or not isinstance(rule.of(members[0][2]), MatrixRule):
        return NO_MATRICES
    numel = sum(layout.numels)
    found = MatrixStats(numel=numel, padding=layout.numel - numel)
    for (_, param, group), offset in zip(members, layout.offsets, strict=False):
        each = _packable(param, group, param.element_size())
        whole = each.whole(offset, layout.shard_numel)
        found += MatrixStats(len(each.matrices), len(whole), each.numel - sum(whole))
    return found
