"""Plans a training before it starts: bytes on a rank by kind and tier, bytes that move, what fits.

The layouts are those that the optimizer makes, so padding, small params that stay whole and buckets are counted as they
will be. Activations, and what the allocator and the communication library keep, are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..arguments import whole
from ..config import Options
from ..domain.bucket_plan import NO_MATRICES, MatrixStats, PlannedBucket, matrix_stats, plan_buckets
from ..domain.formats import formats_for
from ..domain.param_names import matching
from ..domain.units import gathering_budget, units_of
from ..kernels.formats import BlockFormat
from ..offload import gradients as landing
from ..offload.disk.file_io import PAGE, padded
from ..offload.disk.pipeline import SLOTS
from ..optim.like import recipe
from ..partition.layout import BLOCK, BucketLayout
from ..partition.reducer import BUCKETS_UNDER_WAY, BYTES_UNDER_WAY
from ..partition.schedule import assumed_orders, plan_schedule
from ..partition.zero_stage import ZeroStage
from ..rules.matrix import MatrixVariant
from ..rules.rule import EMA
from .cut import Cut, parts_of
from .need import KINDS, Need
from .ways import TIERS

if TYPE_CHECKING:
    from ..config import Tuning
    from ..domain.formats import StreamFormats
    from ..domain.param import Candidate, Group
    from ..domain.units import UnitPlan
    from ..kernels.formats import Format
    from ..optim.optimizer import ShardedOptimizer
    from ..rules import Rule
    from .cut import Part
    from .ways import Tier, Way

_FP32, _BF16 = 4, 2


def plan(
    module: nn.Module,
    optimizer: ShardedOptimizer,
    ranks: int,
    way: Way,
    options: Options | None = None,
    cut: Cut | None = None,
) -> Need:
    """Returns what one way needs on one rank: of a pipeline, on one of the stage that needs most.

    Args:
        module: on any device, the meta device too; its params' dtypes are those of ``way`` instead. Of DTensors, what
            this rank has of them.
        optimizer: any instance of the class, for its rule and hyper-parameters; it is not touched.
        ranks: all those of the model.
        options: tuning and ``reduce_dtype`` are read from them.
        cut: divides the module; None: all ranks have all of it. Bytes that these ranks exchange to compute
            (activations, tokens, sums of partial results) are not counted.

    Raises:
        TypeError, ValueError: no module, a model without params, no rank; ranks or a model that the cut cannot divide.
    """
    return Planner(module, optimizer.rule, groups_for(module, optimizer), ranks, options, cut).need(way)


def groups_for(module: nn.Module, optimizer: ShardedOptimizer | type[ShardedOptimizer]) -> Sequence[Group]:
    """Returns the param groups that an optimizer, or one of its class with default arguments, makes of a module.

    Raises:
        TypeError: no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module takes an nn.Module, found {type(module).__name__}.")
    if isinstance(optimizer, type):
        return optimizer._groups_of(module, recipe(optimizer)[1], {})
    return optimizer._groups_of(module, optimizer.defaults, optimizer._given)


# Buckets with one layout, the same states and formats, and their number: layers are alike, and so are their buckets.
_Alike = Sequence[tuple[PlannedBucket, int]]


@dataclass(frozen=True)
class _Group:
    """What ranks share that hold the same params: a domain, as the optimizer has it.

    Attributes:
        ranks: their number.
        numel: of the params.
        matrices: where they lie that are made whole in each step.
        gathered: elements that are gathered in a step, more than once where it is so.
    """

    ranks: int
    numel: int
    matrices: MatrixStats
    alike: _Alike
    gathered: int


@dataclass(frozen=True)
class _Laid:
    """A stage of the pipeline, laid out.

    Attributes:
        groups: by name.
        kept: the formats of large params.
        shares: of all elements, those that have each state.
        margins: bytes of states with a value for each row or column, which every rank has whole.
        window: the most bytes that are gathered at once.
    """

    groups: dict[str, _Group]
    kept: StreamFormats
    shares: dict[str, float]
    margins: int
    window: int


class Planner:
    """Plans for one model, optimizer and number of ranks. Buckets that many ways have in common are laid out once."""

    def __init__(
        self,
        module: nn.Module,
        rule: Rule,
        groups: Sequence[Group],
        ranks: int,
        options: Options | None = None,
        cut: Cut | None = None,
    ):
        """
        Args:
            rule: of the optimizer.
            groups: its param groups, see :func:`groups_for`; the rest as for :func:`plan`.

        Raises:
            TypeError, ValueError: a model without params, no rank; ranks or a model that the cut cannot divide.
        """
        self._cut = cut or Cut()
        self._ranks = self._cut.data_parallel(whole(ranks, "ranks", least=1))
        self._rule, self._options = rule, options or Options()
        self._group_of = {param: group for group in groups for param in group["params"]}
        if not self._group_of:
            raise ValueError(f"{type(module).__name__} has no params: nothing would be sharded.")
        self._variants = {param: rule.variant(group, param.shape) for param, group in self._group_of.items()}
        # Those that are made whole in each step.
        self._matrices = {param for param, each in self._variants.items() if isinstance(each, MatrixVariant)}
        if self._matrices and self._cut.tensor > 1:
            raise ValueError(
                f"plan for tensor=1, or for another optimizer: {rule.name} looks at whole matrices, and what tensor "
                f"ranks tell each other of their slices is not planned, found tensor={self._cut.tensor}."
            )
        self._units = units_of(module, self._options.tuning.units)
        self._unit_of = {param: number for number, unit in enumerate(self._units) for param in unit.params}
        self._device, self._module = next(module.parameters()).device, module
        # In the order of the groups, as the optimizer has its params.
        self._parts: list[Part] = [
            {param: part[param] for param in self._group_of if param in part}
            for part in parts_of(module, self._units, self._cut)
        ]
        self._candidates: dict[tuple[int, torch.dtype], dict[nn.Parameter, Candidate]] = {}
        self._laid: dict[tuple[int, Way], _Laid] = {}

    @property
    def numel(self) -> int:
        """The params of a rank that has most."""
        return max(sum(piece.shape.numel() for piece in part.values()) for part in self._parts)

    def need(self, way: Way) -> Need:
        """Returns what this way needs on one rank, of the stage that needs most.

        A rule that looks at whole params releases no gradients.
        """
        return max(self.needs(way), key=lambda need: (need.on("device"), need.moved["wire"]))

    def needs(self, way: Way) -> list[Need]:
        """Returns what this way needs on one rank of each stage of the pipeline."""
        if self._matrices or self._rule.takes_norms:
            way = replace(way, release_gradients=False)
        return [self._need(way, stage) for stage in range(len(self._parts))]

    def _need(self, way: Way, stage: int) -> Need:
        laid, reduced = self._lay(way, stage), self._options.reduce_dtype or way.dtype
        kinds = self._bytes(laid, way, reduced)
        wire = {
            name: _on_the_wire(group, way, laid.kept, reduced, self._cut) + _in_slices(group, way)
            for name, group in laid.groups.items()
        }
        moved = {
            "wire": sum(wire.values()),
            # Masters and states come and go; sums go, and come where the GPU has the states.
            "bus": 2 * sum(kinds[kind].get("host", 0) for kind in ("master", "state"))
            + kinds["gradient"].get("host", 0) * (2 if way.tier == "host" else 1),
            "disk": 2 * sum(kinds[kind].get("disk", 0) for kind in ("master", "state")),
        }
        numel = sum(group.numel for group in laid.groups.values())
        matrices = sum((group.matrices for group in laid.groups.values() if way.stage), NO_MATRICES)
        return Need(way, kinds, _formula(way, laid.kept, laid.shares), moved, wire, numel, self._cut, matrices)

    def _bytes(self, laid: _Laid, way: Way, reduced: torch.dtype) -> dict[str, dict[str, int]]:
        """Returns the bytes by kind and tier. ``reduced``: the dtype in which gradients travel."""
        kinds: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}

        def add(kind: str, tier: str, nbytes: int) -> None:
            kinds[kind][tier] = kinds[kind].get(tier, 0) + nbytes

        for group in laid.groups.values():
            ranks, alike = group.ranks, group.alike
            copies = 1 if ZeroStage(way.stage).shards_states else ranks
            is_lone = sum(count for _, count in alike) == 1
            for bucket, count in alike:
                shard = bucket.layout.shard_numel
                held = shard if bucket.is_released else bucket.layout.numel
                add("param", "device", count * held * way.dtype.itemsize)
                add("master", way.tier, count * int(shard * _itemsize(bucket.formats.master)))
                add(
                    "state",
                    way.tier,
                    count * sum(int(shard * _itemsize(bucket.formats.states[each])) for each in bucket.states),
                )
                # The row of each block: of a shard, and of shards that one launch takes.
                add("buffer", "device", count * shard // BLOCK * 4 * (1 if is_lone else 2))
                if way.has_module:
                    # Copies of one shard sum its gradients in equal parts.
                    sums = BucketLayout((shard,), copies).numel * bucket.formats.gradient.itemsize
                    add("gradient", _sums_tier(way), 0 if way.release_gradients else count * sums)
            if way.has_module:
                slots = _slots(alike, reduced, ranks) if way.sums_rest else 0
                add("buffer", "device", _under_way(alike, reduced, ranks) + slots)
            else:
                add("gradient", "device", group.numel * way.dtype.itemsize)
                add("ddp", "device", group.numel * way.dtype.itemsize * (ranks > 1))
            if way.tier == "disk":
                add("buffer", "host", _staging(alike, way, self._options.tuning))
        add("state", "device", laid.margins)
        add("window", "device", laid.window)
        return kinds

    def _lay(self, way: Way, stage: int) -> _Laid:
        """Returns the stage laid out. Ways that differ in tiers share it."""
        common = replace(way, tier="device", sums_rest=False, release_gradients=False)
        if (stage, common) not in self._laid:
            self._laid[stage, common] = self._lay_out(common, stage)
        return self._laid[stage, common]

    def _lay_out(self, way: Way, stage: int) -> _Laid:
        given, tuning = self._options, self._options.tuning
        asked = Options(
            module=self._module if way.has_module else None,
            stage=way.stage,
            **way.options,
            reduce_dtype=given.reduce_dtype if way.has_module else None,
            tuning=tuning,
        )
        rule = self._rule
        if way.ema is not None and rule.average is None:
            rule = rule.averaging(way.ema)

        sizes = {"data": self._ranks, "experts": self._ranks // self._cut.experts}
        alike: dict[str, dict[Any, tuple[PlannedBucket, int]]] = {name: {} for name in sizes}
        units: Counter[int] = Counter()  # bytes of each, padding included
        numels: dict[str, Counter[int]] = {name: Counter() for name in sizes}
        matrices = dict.fromkeys(sizes, NO_MATRICES)
        for name, ranks in sizes.items():
            for bucket, unit in self._buckets(way, stage, rule, asked, name, ranks):
                if unit is not None:
                    units[unit] += bucket.layout.numel * way.dtype.itemsize
                    numels[name][unit] += sum(bucket.layout.numels)
                found = matrix_stats(rule, bucket.members, bucket.layout)
                if found is not NO_MATRICES:  # a trillion params have ten thousand buckets
                    matrices[name] += found
                key = bucket.layout, bucket.states, bucket.formats.key, bucket.is_released
                _, count = alike[name].get(key, (bucket, 0))
                alike[name][key] = bucket, count + 1
        part = self._parts[stage]
        kept = formats_for(rule, asked, way.dtype, tuning.compress_from)
        states = Counter[str]()  # state -> elements that have it
        margins = 0
        for param, piece in part.items():
            for margin in self._variants[param].margins:
                margins += 4 * math.prod(rule.state_shape(margin, param.shape))  # whole on every tensor rank too
            states.update(dict.fromkeys(self._variants[param].states, piece.shape.numel()))
        numel = sum(piece.shape.numel() for piece in part.values())
        averages = (EMA,) * (way.ema is not None)
        kept = replace(kept, states={name: kept.states[name] for name in (*states, *averages)})
        shares = {name: states[name] / numel if name in states else 1.0 for name in kept.states}
        window, turns = self._gathered(units, stage)
        groups = {
            name: _Group(
                ranks,
                sum(sum(bucket.layout.numels) * count for bucket, count in alike[name].values()),
                matrices[name],
                list(alike[name].values()),
                sum(numel * turns[name, unit] for unit, numel in numels[name].items()),
            )
            for name, ranks in sizes.items()
            if alike[name]
        }
        return _Laid(groups, kept, shares, margins, window)

    def _buckets(
        self, way: Way, stage: int, rule: Rule, asked: Options, name: str, ranks: int
    ) -> Iterator[tuple[PlannedBucket, int | None]]:
        """Yields the buckets of a group, and the number of the unit that each is, or is part of, if it is gathered."""
        tuning, candidates = self._options.tuning, self._of_dtype(way.dtype, stage)
        named = matching(self._module, tuning.keep) if way.stage == 3 else ()
        kept_whole = {mine for theirs, (_, mine, _) in candidates.items() if theirs in named}
        unit_of = None
        if way.stage == 3:
            unit_of = {mine: self._unit_of[theirs] for theirs, (_, mine, _) in candidates.items()}
        of_experts = name == "experts"
        own = [candidates[param] for param, piece in self._parts[stage].items() if piece.is_expert == of_experts]
        shards = ranks if ZeroStage(way.stage).shards_states else 1

        def bucket_bytes(_: torch.device) -> int:
            return tuning.bucket_bytes_of(self._device, way.has_module)

        for bucket in plan_buckets(own, rule, asked, shards, bucket_bytes, kept_whole, unit_of):
            yield bucket, unit_of[bucket.members[0][1]] if unit_of is not None and bucket.is_released else None

    def _gathered(self, units: Mapping[int, int], stage: int) -> tuple[int, dict[tuple[str, int], int]]:
        """Returns the most bytes that are gathered at once, and how often a step gathers what a group has of each unit.

        The modules run in their order, and micro-batches of a pipeline in that of 1F1B. Ranks on CPUs read each other's
        memory, as those of one machine do, unless ``Tuning(neighbours=False)`` says that params travel.

        Args:
            units: by the number of each unit, its bytes.
        """
        tuning, cut = self._options.tuning, self._cut
        names = {self._units[number].name: number for number in sorted(units)}
        part = self._parts[stage]
        orders = assumed_orders((name, _is_spread(self._units[number], part)) for name, number in names.items())
        nbytes = {name: units[number] for name, number in names.items()}
        travels = not (tuning.neighbours and self._device.type == "cpu")
        budget = gathering_budget(tuning, travels)
        schedule = plan_schedule(*orders, nbytes, budget)
        # How many forwards follow a forward.
        ahead = min(cut.pipeline - stage, cut.micro_batches) - 1 if cut.pipeline > 1 else 0
        turns = {(group, number): 2 * cut.micro_batches for group in ("data", "experts") for number in units}
        for name in schedule.kept:
            stays = cut.pipeline > 1 and budget.keeps(name)  # until the step
            # A backward finds what the forward before it kept.
            found = cut.micro_batches - ahead
            turns["data", names[name]] = 1 if stays else 2 * cut.micro_batches - found
            if budget.keeps(name):  # else the rest of its block is used last, and stays in place of its experts
                turns["experts", names[name]] = turns["data", names[name]]
        return schedule.most_bytes(nbytes), turns

    def _of_dtype(self, dtype: torch.dtype, stage: int) -> dict[nn.Parameter, Candidate]:
        if (stage, dtype) not in self._candidates:
            self._candidates[stage, dtype] = {
                param: (
                    "",
                    nn.Parameter(torch.empty(piece.shape, dtype=dtype, device="meta")),
                    self._group_of[param],
                )
                for param, piece in self._parts[stage].items()
            }
        return self._candidates[stage, dtype]


def _is_spread(unit: UnitPlan, part: Part) -> bool:
    """True if several modules of this pipeline stage use the unit."""
    return sum(any(param in part for param in module.parameters()) for module in unit.modules) > 1


def _itemsize(format: Format | None) -> float:
    """Returns the bytes of an element, with its share of a block's scale."""
    if format is None:
        return 0
    return format.itemsize + (_FP32 / BLOCK if isinstance(format, BlockFormat) else 0)


def _sums_tier(way: Way) -> Tier:
    return "host" if way.sums_rest else "device"


def _under_way(alike: _Alike, dtype: torch.dtype, ranks: int) -> int:
    """Returns the most bytes of buffers that gradients are reduced in: some are filled while others are sent."""
    layouts = [(bucket.layout.over(ranks), count) for bucket, count in alike]
    # A lone gradient that needs no padding is its own buffer.
    sizes = [(each.numel * dtype.itemsize, count) for each, count in layouts if each.numels != (each.numel,)]
    largest = max((size for size, _ in sizes), default=0)
    return min(sum(count for _, count in sizes), _most_under_way(largest)) * largest


def _most_under_way(nbytes: int) -> int:
    """Returns how many buckets of so many bytes can be in use at once."""
    return max(BUCKETS_UNDER_WAY, BYTES_UNDER_WAY // max(nbytes, 1)) + 1


def _slots(alike: _Alike, dtype: torch.dtype, ranks: int) -> int:
    """Returns the most bytes of slots in which offloaded sums are made; one more slot is being copied."""
    buckets = [bucket for bucket, _ in alike]
    least = min((bucket.layout.over(ranks).numel * dtype.itemsize for bucket in buckets), default=0)
    largest = max((bucket.layout.shard_numel * bucket.formats.gradient.itemsize for bucket in buckets), default=0)
    number = sum(count for _, count in alike)
    return max(landing.SLOTS, min(number, _most_under_way(least) + 1)) * largest


def _staging(alike: _Alike, way: Way, tuning: Tuning) -> int:
    """Returns the bytes of memory that states on a disk take: slots, and params as before the step."""
    chunk_bytes = padded(max(tuning.chunk_bytes, PAGE))
    turns, slot, kept = 0, 0, 0
    for bucket, count in alike:
        shard = bucket.layout.shard_numel
        elements = min(chunk_bytes // _FP32, shard)
        streams = [bucket.formats.master, *(bucket.formats.states[name] for name in bucket.states)]
        planes = [nbytes for format in streams if format is not None for nbytes in _plane_bytes(format, elements)]
        slot = max(slot, sum(map(padded, planes)))
        turns += count * -(-shard // max(elements, 1)) * bool(planes)
        kept += count * shard * way.dtype.itemsize
    return kept + min(SLOTS, turns) * slot


def _plane_bytes(format: Format, elements: int) -> list[int]:
    scales = [elements // BLOCK * _FP32] if isinstance(format, BlockFormat) else []
    return [elements * format.itemsize, *scales]


def _formula(way: Way, kept: StreamFormats, shares: Mapping[str, float]) -> str:
    """Returns "2 + 4/N, host 12/N": bytes a param of the device, then of other tiers that keep something.

    Args:
        shares: of all elements, those that have each state.
    """
    stage = ZeroStage(way.stage)
    gradient = 0 if way.release_gradients else kept.gradient.itemsize, way.stage > 0
    if not way.has_module:
        gradient = 2 * way.dtype.itemsize, False  # and DDP's buckets
    # Tier, bytes a param, whether they are sharded.
    sizes: list[tuple[str, float, bool]] = [("device", way.dtype.itemsize, stage.shards_params)]
    sizes += [(_sums_tier(way), *gradient)]
    sizes += [(way.tier, _itemsize(kept.master), stage.shards_states)]
    sizes += [(way.tier, shares[name] * _itemsize(format), stage.shards_states) for name, format in kept.states.items()]

    def of(tier: str) -> str:
        whole = sum(size for where, size, is_sharded in sizes if where == tier and not is_sharded)
        parts = sum(size for where, size, is_sharded in sizes if where == tier and is_sharded)
        return " + ".join([f"{round(whole, 2):g}"] * bool(whole) + [f"{round(parts, 2):g}/N"] * bool(parts))

    others = [tier for tier in TIERS[1:] if tier == way.tier or (way.sums_rest and tier == "host")]
    return ", ".join([of("device"), *(f"{tier} {of(tier) or 0}" for tier in others)])


def _on_the_wire(group: _Group, way: Way, kept: StreamFormats, reduced: torch.dtype, cut: Cut) -> int:
    """Returns the bytes that one rank receives in a step; an all-reduce is 2 (ranks - 1) / ranks of the params.

    Every micro-batch is reduced, unless all are reduced at once. At stage 3 every unit is gathered for the forward and
    for the backward; a unit that is kept between them only once.
    """
    rounds = 1 if cut.at_once and way.stage < 2 else cut.micro_batches
    size = way.dtype.itemsize
    if not way.has_module:
        gradients, params = 2 * size, size if way.stage else 0  # the caller reduces, once
    elif way.stage == 0 and way.release_gradients:
        gradients, params = reduced.itemsize * group.ranks * rounds, 0  # every rank receives all that the others have
    elif way.stage == 0:
        gradients, params = (reduced.itemsize + kept.gradient.itemsize) * rounds, 0  # sums come back as they are kept
    else:
        gradients, params = reduced.itemsize * rounds, size
    sharded = sum(
        sum(bucket.layout.numels) * count for bucket, count in group.alike if way.stage == 3 and bucket.is_released
    )
    moved = group.numel * gradients + (group.numel - sharded) * params + group.gathered * size
    return moved * (group.ranks - 1) // group.ranks


def _in_slices(group: _Group, way: Way) -> int:
    """Returns the bytes of slices that one rank receives in a step, on the average of all ranks.

    Each matrix that does not lie whole on one rank travels to its owner and back in bf16, but for what the owner has of
    it: the Nth part, or more.
    """
    is_sharded = ZeroStage(way.stage).shards_states
    return 2 * _BF16 * group.matrices.sliced * (group.ranks - 1) // group.ranks**2 if is_sharded else 0
