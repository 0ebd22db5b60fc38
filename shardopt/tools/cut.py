"""Divides a model by tensor, pipeline or expert parallelism: which params one rank has, and of which shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..arguments import flag, whole
from ..domain.dtensors import is_dtensor
from ..domain.param_names import without_wrappers

if TYPE_CHECKING:
    from ..domain.model_units import UnitPlan

_EXPERTS = re.compile(r"(?:^|\.)experts\.(?:(\d+)\.)?")


@dataclass(frozen=True)
class Cut:
    """How many ranks a model is divided over; the remaining factor is data-parallel.

    Attributes:
        tensor: ranks that share each matrix evenly (params with two dimensions above 1); each holds all other params.
        pipeline: stages with as many blocks each; the first and the last also have what is before and after the blocks.
        experts: ranks that share the experts of a layer evenly: params in a module that is called ``experts``.
        micro_batches: backwards of a step.
        at_once: those of stages 0 and 1 run under ``no_sync()``, and ``reduce_gradients()`` follows.

    Raises:
        TypeError, ValueError: a field is not a count, or both tensor and experts are above 1.
    """

    tensor: int = 1
    pipeline: int = 1
    experts: int = 1
    micro_batches: int = 1
    at_once: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            flag(value, field.name) if field.name == "at_once" else whole(value, field.name, least=1)
        if self.tensor > 1 and self.experts > 1:
            raise ValueError(
                "plan for tensor or for experts: whether tensor ranks cut experts, copy them or hold different ones is "
                f"not known, found tensor={self.tensor} and experts={self.experts}."
            )

    def data_parallel(self, ranks: int) -> int:
        """Returns the number of ranks that hold the same params, apart from experts.

        Raises:
            ValueError: the cut does not divide the ranks.
        """
        each = self.tensor * self.pipeline
        if ranks % (each * self.experts):
            raise ValueError(
                f"give ranks that {each * self.experts} divides (tensor {self.tensor} x pipeline {self.pipeline} x "
                f"experts {self.experts}): {ranks} would leave some ranks without a part of the model."
            )
        return ranks // each

    def __str__(self) -> str:
        found = {field.name: getattr(self, field.name) for field in fields(self)[:3]}
        return ", ".join(f"{name} {size}" for name, size in found.items() if size > 1)


@dataclass(frozen=True)
class LocalParam:
    """The slice of one param that a rank has."""

    shape: torch.Size
    is_expert: bool


StageParams = Mapping[nn.Parameter, LocalParam]  # of one stage of the pipeline, in the order of the model


def params_by_stage(module: nn.Module, units: Sequence[UnitPlan], cut: Cut) -> list[StageParams]:
    """Returns the params that a rank of each pipeline stage has. A tied weight is on each stage that uses it.

    Raises:
        ValueError: the model has fewer blocks than stages, or no experts.
    """
    named = [(without_wrappers(name), each) for name, each in module.named_parameters(remove_duplicate=False)]
    owners = {name: found for name, _ in named if cut.experts > 1 and (found := _EXPERTS.search(name)) is not None}
    if cut.experts > 1 and not owners:
        raise ValueError(
            f"put experts in a module that is called experts, or omit experts={cut.experts}: no param of "
            f"{type(module).__name__} has such a name, and nothing would be spread."
        )
    counts = Counter[str]()  # of the experts of a layer that are modules
    for name, found in owners.items():
        if found[1] is not None:
            counts[name[: found.start(1)]] = max(counts[name[: found.start(1)]], int(found[1]) + 1)
    stage_of = _stages(named, units, cut.pipeline)
    stages: list[dict[nn.Parameter, LocalParam]] = [{} for _ in range(cut.pipeline)]
    for number, (name, param) in enumerate(named):
        shape, owner = _local_shape(param), owners.get(name)
        if owner is None:
            shape = _first_of(shape, cut.tensor) if sum(size > 1 for size in shape) > 1 else shape
        elif owner[1] is None:  # experts that are stacked
            shape = _first_of(shape, cut.experts)
        elif int(owner[1]) >= -(-counts[name[: owner.start(1)]] // cut.experts):
            continue
        stages[stage_of[number]].setdefault(param, LocalParam(shape, owner is not None))
    return list(stages)


def _local_shape(param: nn.Parameter) -> torch.Size:
    return param._local_tensor.shape if is_dtensor(param) else param.shape  # type: ignore[attr-defined]


def _first_of(shape: torch.Size, ranks: int) -> torch.Size:
    """Returns the shape of the largest of even slices along the first dimension that is not 1."""
    at = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    return torch.Size([*shape[:at], -(-shape[at] // ranks), *shape[at + 1 :]])


def _stages(named: Sequence[tuple[str, nn.Parameter]], units: Sequence[UnitPlan], stages: int) -> list[int]:
    """Returns the pipeline stage of each param: of its block, else of the block before it."""
    if stages == 1:
        return [0] * len(named)
    kinds = [tuple(param.shape for param in unit.params) for unit in units]
    # Of all kinds of units, blocks are those that have most of the params.
    common = max(kinds, key=lambda kind: kinds.count(kind) * len(kind))
    blocks = [unit for unit, kind in zip(units, kinds, strict=True) if kind == common]
    if len(blocks) < stages:
        raise ValueError(
            f"plan for at most {len(blocks)} stages: this model has {len(blocks)} blocks that are alike, and "
            f"pipeline={stages} would leave a stage without one."
        )
    stage_of = {param: number * stages // len(blocks) for number, unit in enumerate(blocks) for param in unit.params}
    found, last = list[int](), 0
    for _, param in named:
        last = max(last, stage_of.get(param, 0))
        found.append(stage_of.get(param, last))
    return found
