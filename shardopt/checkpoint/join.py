"""Makes one plan of what all ranks of a model plan to save, and the same manifest on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..domain.agreement import first_difference
from ..errors import CheckpointError
from .claims import different_params
from .collectives import HolderReport
from .mesh_ranks import numbers_of
from .order import joined_order
from .records import BoxPlace, GradientInfo, OptimizerInfo, ParamInfo, TensorKey, Tensors
from .typed_json import Count, Encoded, Json, Names, omitted, to_json

if TYPE_CHECKING:
    from .claims import Claims
    from .collectives import Collectives
    from .mesh_ranks import Holder
    from .model import Model
    from .plan_save import SavePlan, WriteItem

_MIX = 0x9E3779B1  # odd, so that an element's place changes what it adds
_OF_PARAMS = ("params", "gradients")  # sections whose tensors belong to params


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What ranks that hold the same plan to save, the same on all of them.

    Attributes:
        groups: by optimizer and group, the names of these params.
        optimizers, step: of the data-parallel ranks alone; the groups without params.
    """

    params: dict[str, ParamInfo]
    groups: tuple[tuple[Names, ...], ...]
    optimizers: tuple[OptimizerInfo, ...] = omitted(())
    step: Count | None = omitted(None)
    tensors: Tensors


@dataclass(frozen=True, kw_only=True)
class PlannedOfOne:
    """What the first of these ranks plans to save; the last three of the data-parallel ranks alone."""

    gradients: dict[str, GradientInfo]
    module_extra: Encoded
    mesh: tuple[Count, ...]
    extra: Tensors


Report: TypeAlias = HolderReport[Planned, PlannedOfOne]


def join(plan: SavePlan, model: Model, collectives: Collectives, phase: str) -> None:
    """Collective: the plan then says what all ranks save, and its items are those that this rank writes.

    Raises:
        CheckpointError: ranks differ, or use one name for different params. On every rank; nothing was written.
    """
    reports = collectives.gather_by_holder(_reports(plan, model), (Planned, PlannedOfOne), phase)
    collectives.together(lambda: _take_reports(plan, model, reports), phase)
    _compare_copies(plan, model, collectives, phase)
    _drop_copies(plan, model)


def _reports(plan: SavePlan, model: Model) -> list[Report]:
    """Returns this rank's reports of what it plans to save, one for each set of ranks that hold the same."""
    found = []
    for holders, members in model.by_holders():
        boxes = {member.box_name for member in members if member.is_planned}
        names = boxes | {member.name for member in members if member.is_planned}
        params = {member.name: plan.params[member.name] for member in members}
        common = Planned(
            params=params,
            groups=tuple(
                tuple(tuple(name for name in group.params if name in params) for group in each.groups)
                for each in plan.optimizers
            ),
            tensors={
                key: each for key, each in plan.tensors.items() if key.section in _OF_PARAMS and key.name in names
            },
        )
        reduced = {name: about for name, about in (plan.gradients or {}).items() if name in boxes}
        own = PlannedOfOne(gradients=reduced, module_extra={}, mesh=(), extra={})
        if holders is model.data_ranks:
            extra = {key: each for key, each in plan.tensors.items() if key.section == "extra"}
            own = replace(own, module_extra=plan.module_extra, mesh=tuple(sorted(model.mesh)), extra=extra)
            buffers = {key: each for key, each in plan.tensors.items() if key.section == "buffers"}
            optimizers, all_tensors = _without_params(plan.optimizers), common.tensors | buffers
            common = replace(common, optimizers=optimizers, step=plan.step, tensors=all_tensors)
        found.append(HolderReport(numbers_of(holders), common, own if holders.rank == 0 else None))
    return found


def _take_reports(plan: SavePlan, model: Model, reports: Sequence[Report]) -> None:
    """Makes the plan's tensors, params and optimizers those of all ranks."""
    of_data_ranks = [each for each in reports if each.common.step is not None]
    params: dict[str, ParamInfo] = {}
    for each in reports:
        for name, about in each.common.params.items():
            params[name] = _merged(name, params[name], about) if name in params else about
    for name, boxes in model.claims.boxes.items():
        blocks = tuple(BoxPlace(box.offsets, box.sizes) for box in boxes)
        params[name] = replace(params[name], shape=boxes[0].shape, blocks=blocks)
    plan.tensors = {key: each for key, each in plan.tensors.items() if key.section == "extra"}
    for each in reports:
        for key, tensor in each.common.tensors.items():
            if plan.tensors.setdefault(key, tensor) != tensor:
                raise different_params(
                    f"{key} is kept as {plan.tensors[key]}, and as {tensor} on ranks {list(each.holder)}"
                )
    _check_kinds(model.claims, plan.tensors)
    plan.step = max(each.common.step for each in of_data_ranks if each.common.step is not None)
    if plan.step_is_counted:
        plan.step = max([plan.step, *(about.step for about in params.values())])
    plan.params, plan.optimizers = params, _joined_optimizers(of_data_ranks, reports)
    own = dict(plan.gradients or {})
    plan.gradients = own | {name: about for each in reports if each.own for name, about in each.own.gradients.items()}
    _take_extra_states(plan, of_data_ranks)


def _merged(name: str, one: ParamInfo, other: ParamInfo) -> ParamInfo:
    """Returns a param's record with the aliases of two sets of ranks; all else must agree."""
    difference = first_difference(*(to_json(replace(each, aliases=())) for each in (one, other)))
    if difference is not None:
        where, ours, theirs = difference
        raise different_params(f"{where} of {name!r} is {ours!r} on some ranks and {theirs!r} on others")
    return replace(one, aliases=tuple(sorted({*one.aliases, *other.aliases})))


def _check_kinds(claims: Claims, tensors: Iterable[TensorKey]) -> None:
    """Raises CheckpointError unless all boxes of a param have the same masters and states."""
    kinds: dict[str, set[str]] = {}
    for key in tensors:
        if key.section == "params" and not key.is_of_scales:
            kinds.setdefault(key.name, set()).add(key.kind)
    for name, boxes in claims.boxes.items():
        first, *others = (box.name_in(name) for box in boxes)
        for each in others:
            if kinds.get(each) != kinds.get(first):
                raise CheckpointError(
                    f"give all ranks the same options: {first!r} has {sorted(kinds.get(first, ()))}, {each!r} has "
                    f"{sorted(kinds.get(each, ()))}, so no rank could load both. Nothing was written."
                )


def _joined_optimizers(of_data_ranks: Sequence[Report], reports: Sequence[Report]) -> tuple[OptimizerInfo, ...]:
    """Returns the optimizers with the params of all ranks: groups with the same number are one group."""
    first, *others = (to_json(each.common.optimizers, tuple[OptimizerInfo, ...]) for each in of_data_ranks)
    for report, optimizers in zip(of_data_ranks[1:], others, strict=True):
        difference = first_difference(first, optimizers, "optimizers")
        if difference is not None:
            where, ours, theirs = difference
            raise CheckpointError(
                "give all ranks of the model the same param groups with the same values, empty ones too: "
                f"{where} is {ours!r} on ranks {list(of_data_ranks[0].holder)}, {theirs!r} on ranks "
                f"{list(report.holder)}. Nothing was written."
            )

    def joined(number: int, index: int) -> Names:
        return tuple(joined_order([names for each in reports if (names := each.common.groups[number][index])]))

    return tuple(
        replace(
            each,
            groups=tuple(replace(group, params=joined(number, index)) for index, group in enumerate(each.groups)),
        )
        for number, each in enumerate(of_data_ranks[0].common.optimizers)
    )


def _without_params(optimizers: Iterable[OptimizerInfo]) -> tuple[OptimizerInfo, ...]:
    return tuple(replace(each, groups=tuple(replace(group, params=()) for group in each.groups)) for each in optimizers)


def _take_extra_states(plan: SavePlan, of_data_ranks: Sequence[Report]) -> None:
    """Takes the extra states of all modules; of copies, those of the first ranks count, as for buffers."""
    found: dict[str, tuple[Json, Holder, PlannedOfOne]] = {}
    for number, (holder, _, own) in enumerate(of_data_ranks):
        assert own is not None
        for name, state in own.module_extra.items():
            before, first, its_own = found.setdefault(name, (state, holder, own))
            are_copies = its_own is own or set(its_own.mesh) & {*holder}
            if not are_copies and before != state:
                raise different_params(f"the extra states of modules {name!r} on ranks {first} and {holder}")
        if number:
            plan.tensors.update({key: each for key, each in own.extra.items() if "." in key.name})
    plan.module_extra = {name: state for name, (state, *_) in found.items()}


# -- copies ------------------------------------------------------------------------------------------------------------


def _compare_copies(plan: SavePlan, model: Model, collectives: Collectives, phase: str) -> None:
    """Collective: raises CheckpointError if ranks that no tensor mesh connects hold different values by one name."""
    if not model.claims.contested and not model.buffer_claims.contested:
        return
    own = collectives.together(lambda: _digests(plan, model), phase)
    totals: dict[tuple[str, str], dict[Holder, dict[str, int]]] = {}
    for theirs in collectives.all_gather(own, phase):
        for section, box, holder, kinds in theirs:
            total = totals.setdefault((section, box), {}).setdefault(tuple(holder), {})
            for kind, digest in kinds.items():
                total[kind] = (total.get(kind, 0) + digest) % (1 << 64)
    for (_, box), by_holder in totals.items():
        (first, expected), *others = by_holder.items()
        for holder, found in others:
            if found != expected:
                kind = next(kind for kind in {**expected, **found} if expected.get(kind) != found.get(kind))
                raise different_params(
                    f"{kind} of {box!r} differs between ranks {list(first)} and ranks {list(holder)} (if it is one "
                    "param that is tied over both, its copies have diverged)"
                )


def _digests(plan: SavePlan, model: Model) -> list[tuple[str, str, Holder, dict[str, int]]]:
    """Returns this rank's part of the digests of contested tensors: sums of bits, weighted by the elements' places."""
    found: dict[tuple[str, str], tuple[Holder, dict[str, int]]] = {}
    holder_of = {("params", member.box_name): member.holders for member in model.params.values()}
    holder_of |= {("buffers", name): model.data_ranks for name in model.buffers}
    for item in plan.items:
        key = item.key
        claims = model.buffer_claims if key.section == "buffers" else model.claims
        if key.section in ("params", "buffers") and key.name in claims.contested:
            ranks = holder_of[key.section, key.name]
            _, kinds = found.setdefault((key.section, key.name), (numbers_of(ranks), {}))
            kinds[key.kind] = _digest(item)
    return [(*where, holder, kinds) for where, (holder, kinds) in found.items()]


def _digest(item: WriteItem) -> int:
    at, total = item.start, 0
    for chunk in item.chunks():
        bits = chunk.contiguous().view(torch.uint8).reshape(chunk.numel(), -1).to(torch.int64)
        weights = torch.arange(at, at + chunk.numel(), dtype=torch.int64).mul_(_MIX).bitwise_or_(1).unsqueeze(1)
        total += int((bits.add_(1).mul_(weights) * torch.arange(1, 2 * bits.shape[1], 2)).sum())
        at += chunk.numel()
    return total % (1 << 64)


def _drop_copies(plan: SavePlan, model: Model) -> None:
    """Keeps the items that this rank writes."""
    dropped = set()
    for member in model.params.values():
        if model.claims.writers.get(member.box_name) != numbers_of(member.holders):
            dropped.add(("params", member.box_name))
    for name in model.buffers:
        if model.buffer_claims.writers[name] != numbers_of(model.data_ranks):
            dropped.add(("buffers", name))
    plan.items = [item for item in plan.items if item.key[:2] not in dropped]
