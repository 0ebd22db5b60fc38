"""Lays a model out as the optimizer would bind it: the buckets of each stage of the pipeline, and what is gathered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import Options
from ..domain.bucket_plan import NO_MATRICES, MatrixStats, PlannedBucket, matrix_stats, plan_buckets
from ..domain.formats import OWN_DTYPE, formats_for
from ..domain.holding import parts_of
from ..domain.model_units import gathering_budget, units_of
from ..domain.param_names import matching
from ..partition.zero_stage import ZeroStage
from ..rules.rule import EMA
from ..units.schedule import assumed_orders, plan_schedule
from .cut import params_by_stage

if TYPE_CHECKING:
    from ..domain.formats import StreamFormats
    from ..domain.model_units import UnitPlan
    from ..domain.param import Candidate, Group
    from ..rules import Rule
    from .cut import Cut, StageParams
    from .ways import Way

# Buckets with equal layouts, states and formats, as those of equal layers, with their number.
EqualBuckets = Sequence[tuple[PlannedBucket, int]]


@dataclass(frozen=True)
class DomainLayout:
    """The buckets of the ranks that hold the same params, as a domain of the optimizer has them.

    Attributes:
        ranks: number of ranks.
        numel: of the params.
        matrices: the matrices that each step makes whole.
        gathered: elements that a step gathers; an element that is gathered twice counts twice.
        order: the numbers of ``buckets``, once for each bucket, in backward order.
        regathered: elements that it gathers from parts, likewise.
        parts: in how many parts ranks hold what was gathered; 0: they hold none.
    """

    ranks: int
    numel: int
    matrices: MatrixStats
    buckets: EqualBuckets
    gathered: int
    order: Sequence[int]
    regathered: int = 0
    parts: int = 0


@dataclass(frozen=True)
class StageLayout:
    """One stage of the pipeline.

    Attributes:
        domains: by name, "data" and "experts".
        kept: the formats of large params.
        shares: of each state, the share of all elements that have it.
        margins: bytes of states with a value for each row or column, which every rank has whole.
        window: the most bytes that are gathered at once.
    """

    domains: dict[str, DomainLayout]
    kept: StreamFormats
    shares: dict[str, float]
    margins: int
    window: int


class ModelLayout:
    """Lays out the stages of one model for one optimizer and number of ranks. Ways that differ in tiers share a layout.

    Attributes:
        stages: what a rank of each stage of the pipeline holds.
        updates_matrices: True if the rule makes matrices whole in each step.
    """

    def __init__(
        self, module: nn.Module, rule: Rule, groups: Sequence[Group], ranks: int, options: Options, cut: Cut
    ) -> None:
        """``ranks``: those that are data-parallel; the rest as for :class:`Planner`, and its errors."""
        self._cut, self._ranks, self._rule, self._options = cut, ranks, rule, options
        self._group_of = {param: group for group in groups for param in group["params"]}
        if not self._group_of:
            raise ValueError(f"{type(module).__name__} has no params: nothing would be sharded.")
        self._variants = {param: rule.variant(group, param.shape) for param, group in self._group_of.items()}
        self.updates_matrices = any(each.around for each in self._variants.values())
        if self.updates_matrices and cut.tensor > 1:
            raise ValueError(
                f"plan for tensor=1, or for another optimizer: {rule.name} looks at whole matrices, and the messages "
                f"by which tensor ranks would exchange their slices are not planned, found tensor={cut.tensor}."
            )
        self._units = units_of(module, options.tuning.units)
        self._unit_of = {param: number for number, unit in enumerate(self._units) for param in unit.params}
        self._device, self._module = next(module.parameters()).device, module
        # In the order of the groups, as the optimizer has its params.
        self.stages: list[StageParams] = [
            {param: params[param] for param in self._group_of if param in params}
            for params in params_by_stage(module, self._units, cut)
        ]
        self._candidates: dict[tuple[int, torch.dtype], dict[nn.Parameter, Candidate]] = {}
        self._laid_out: dict[tuple[int, Way], StageLayout] = {}

    def stage(self, way: Way, number: int) -> StageLayout:
        """Returns the layout of a stage."""
        common = replace(way, tier="device", fraction=1.0, early_bytes=0, sums_rest=False, release_gradients=False)
        if (number, common) not in self._laid_out:
            self._laid_out[number, common] = self._lay_out(common, number)
        return self._laid_out[number, common]

    def _lay_out(self, way: Way, stage: int) -> StageLayout:
        given, tuning = self._options, self._options.tuning
        asked = Options(
            module=self._module if way.has_module else None,
            stage=way.stage,
            **way.options,
            reduce_dtype=given.reduce_dtype if way.has_module else None,
            compute_dtype=way.compute_dtype,
            tuning=tuning,
        )
        rule = self._rule
        if way.ema is not None and rule.average is None:
            rule = rule.averaging(way.ema)
        sizes = {"data": self._ranks, "experts": self._ranks // self._cut.experts}
        equal: dict[str, dict[Any, tuple[PlannedBucket, int]]] = {name: {} for name in sizes}
        numbers: dict[str, dict[Any, int]] = {name: {} for name in sizes}
        units: Counter[int] = Counter()  # bytes of each, padding included
        numels: dict[str, Counter[int]] = {name: Counter() for name in sizes}
        orders: dict[str, list[int]] = {name: [] for name in sizes}
        matrices = dict.fromkeys(sizes, NO_MATRICES)
        for name, ranks in sizes.items():
            for bucket, unit in self._buckets(way, stage, rule, asked, name, ranks):
                if unit is not None:
                    units[unit] += bucket.layout.numel * way.seen.itemsize
                    numels[name][unit] += sum(bucket.layout.numels)
                found = matrix_stats(rule, bucket.members, bucket.layout)
                if found is not NO_MATRICES:  # a trillion params have ten thousand buckets
                    matrices[name] += found
                key = bucket.layout, bucket.states, bucket.formats.key, bucket.shards_params
                _, count = equal[name].get(key, (bucket, 0))
                equal[name][key] = bucket, count + 1
                orders[name].append(numbers[name].setdefault(key, len(numbers[name])))
        window, turns = self._gathered(units, stage)
        domains: dict[str, DomainLayout] = {}
        for name, ranks in sizes.items():
            if equal[name]:
                parts = parts_of(tuning.reshard_after_forward, ranks, name == "experts") if numels[name] else 0
                gathered = sum(numel * turns[name, unit] for unit, numel in numels[name].items())
                first = sum(numels[name].values())  # of each step: from then on ranks hold parts
                domains[name] = DomainLayout(
                    ranks,
                    sum(sum(bucket.layout.numels) * count for bucket, count in equal[name].values()),
                    matrices[name],
                    list(equal[name].values()),
                    first if parts else gathered,
                    orders[name],
                    gathered - first if parts else 0,
                    parts,
                )
        kept, shares = self._kept_states(formats_for(rule, asked, way.seen, tuning.compress_from), way, stage)
        margins = sum(
            4 * math.prod(rule.state_shape(margin, param.shape))  # whole on every tensor rank too
            for param in self.stages[stage]
            for margin in self._variants[param].margins
        )
        return StageLayout(domains, kept, shares, margins, window)

    def _kept_states(self, kept: StreamFormats, way: Way, stage: int) -> tuple[StreamFormats, dict[str, float]]:
        """Returns the formats of states that this stage has, and the share of its elements that have each state."""
        states = Counter[str]()  # state -> elements that have it
        for param, local in self.stages[stage].items():
            states.update(dict.fromkeys(self._variants[param].states, local.shape.numel()))
        numel = sum(local.shape.numel() for local in self.stages[stage].values())
        averages = (EMA,) * (way.ema is not None)
        kept = replace(kept, states={name: kept.states[name] for name in (*states, *averages)})
        if way.stage == 3 and way.compute_dtype is not None:  # the slices of params are the masters
            kept = replace(kept, master=None)
        return kept, {name: states[name] / numel if name in states else 1.0 for name in kept.states}

    def _buckets(
        self, way: Way, stage: int, rule: Rule, asked: Options, name: str, ranks: int
    ) -> Iterator[tuple[PlannedBucket, int | None]]:
        """Yields the buckets of a domain, each with the number of its unit, or None if it is never gathered."""
        tuning, candidates = self._options.tuning, self._of_dtype(way.dtype, stage)
        named = matching(self._module, tuning.keep) if way.stage == 3 else ()
        kept_whole = {mine for theirs, (_, mine, _) in candidates.items() if theirs in named}
        unit_of = None
        if way.stage == 3:
            unit_of = {mine: self._unit_of[theirs] for theirs, (_, mine, _) in candidates.items()}
        of_experts = name == "experts"
        own = [candidates[param] for param, local in self.stages[stage].items() if local.is_expert == of_experts]
        shards = ranks if ZeroStage(way.stage).shards_states else 1

        def bucket_bytes(_: torch.device) -> int:
            return tuning.bucket_bytes_of(self._device, way.has_module)

        seen = OWN_DTYPE if way.compute_dtype is None else lambda _: way.seen
        for bucket in plan_buckets(own, rule, asked, shards, bucket_bytes, kept_whole, unit_of, dtype_of=seen):
            yield bucket, unit_of[bucket.members[0][1]] if unit_of is not None and bucket.shards_params else None

    def _gathered(self, units: Mapping[int, int], stage: int) -> tuple[int, dict[tuple[str, int], int]]:
        """Returns the most bytes that are gathered at once, and how often a step gathers each unit of each domain.

        The modules run in their order, and micro-batches of a pipeline in that of 1F1B. Ranks on CPUs read each other's
        memory, as those of one machine do, unless ``Tuning(neighbours=False)`` says that params travel.

        Args:
            units: number of a unit -> its bytes.
        """
        tuning, cut = self._options.tuning, self._cut
        names = {self._units[number].name: number for number in sorted(units)}
        params = self.stages[stage]
        orders = assumed_orders((name, _is_spread(self._units[number], params)) for name, number in names.items())
        nbytes = {name: units[number] for name, number in names.items()}
        travels = not (tuning.neighbours and self._device.type == "cpu")
        budget = gathering_budget(tuning, travels)
        schedule = plan_schedule(*orders, nbytes, budget)
        # How many forwards follow a forward.
        ahead = min(cut.pipeline - stage, cut.micro_batches) - 1 if cut.pipeline > 1 else 0
        turns = {(domain, number): 2 * cut.micro_batches for domain in ("data", "experts") for number in units}
        for name in schedule.kept:
            stays = cut.pipeline > 1 and budget.keeps(name)  # until the step
            found = cut.micro_batches - ahead  # backwards that find what the forward before them kept
            turns["data", names[name]] = 1 if stays else 2 * cut.micro_batches - found
            if budget.keeps(name):  # else the rest of its block is used last, and stays in place of its experts
                turns["experts", names[name]] = turns["data", names[name]]
        return schedule.most_bytes(nbytes), turns

    def _of_dtype(self, dtype: torch.dtype, stage: int) -> dict[nn.Parameter, Candidate]:
        """Returns params of this dtype in place of the model's, with the shapes of this stage."""
        if (stage, dtype) not in self._candidates:
            self._candidates[stage, dtype] = {
                param: (
                    "",
                    nn.Parameter(torch.empty(local.shape, dtype=dtype, device="meta")),
                    self._group_of[param],
                )
                for param, local in self.stages[stage].items()
            }
        return self._candidates[stage, dtype]


def _is_spread(unit: UnitPlan, params: StageParams) -> bool:
    """True if the unit is used early and late in a pass of this pipeline stage."""
    return unit.is_around or sum(any(param in params for param in each.parameters()) for each in unit.modules) > 1
