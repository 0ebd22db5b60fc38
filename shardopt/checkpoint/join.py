"""Makes one plan of what all ranks of a model plan to save, and the same manifest on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import first_difference
from ..errors import CheckpointError
from .claims import different_params
from .collectives import HolderReport
from .mesh_ranks import numbers_of
from .order import joined_order
from .records import TensorKey, tensors_from_json, tensors_to_json

if TYPE_CHECKING:
    from .claims import Claims
    from .collectives import Collectives
    from .mesh_ranks import Holder
    from .model import Model
    from .plan_save import SavePlan, WriteItem

_MIX = 0x9E3779B1  # odd, so that an element's place changes what it adds
_OF_PARAMS = ("params", "gradients")  # sections whose tensors belong to params


def join(plan: SavePlan, model: Model, collectives: Collectives, phase: str) -> None:
    """Collective: the plan then says what all ranks save, and its items are those that this rank writes.

    Raises:
        CheckpointError: ranks differ, or use one name for different params. On every rank; nothing was written.
    """
    reports = collectives.gather_by_holder(_reports(plan, model), phase)
    collectives.together(lambda: _take_reports(plan, model, reports), phase)
    _compare_copies(plan, model, collectives, phase)
    _drop_copies(plan, model)


def _reports(plan: SavePlan, model: Model) -> list[HolderReport]:
    """Returns this rank's reports of what it plans to save, one for each set of ranks that hold the same."""
    found = []
    for holders, members in model.by_holders():
        boxes = {member.box_name for member in members if member.is_planned}
        names = boxes | {member.name for member in members if member.is_planned}
        tensors = {key: each for key, each in plan.tensors.items() if key.section in _OF_PARAMS and key.name in names}
        params = {member.name: plan.shared["params"][member.name] for member in members}
        groups = [
            [[name for name in group["params"] if name in params] for group in each["groups"]]
            for each in plan.shared["optimizers"]
        ]
        common: dict[str, Any] = {"params": params, "groups": groups}
        reduced = {name: about for name, about in plan.own["gradients"].items() if name in boxes}
        own: dict[str, Any] = {"gradients": reduced}
        if holders is model.data_ranks:
            tensors |= {key: each for key, each in plan.tensors.items() if key.section == "buffers"}
            common["optimizers"], common["step"] = _without_params(plan.shared["optimizers"]), plan.step
            own["module_extra"], own["mesh"] = plan.own["module_extra"], sorted(model.mesh)
            extra = {key: each for key, each in plan.tensors.items() if key.section == "extra"}
            own["extra"] = tensors_to_json(extra)
        common["tensors"] = tensors_to_json(tensors)
        found.append(HolderReport(numbers_of(holders), common, own if holders.rank == 0 else None))
    return found


def _take_reports(plan: SavePlan, model: Model, reports: Sequence[HolderReport]) -> None:
    """Makes the plan's tensors, params and optimizers those of all ranks."""
    of_data_ranks = [each for each in reports if "optimizers" in each.common]
    params: dict[str, Any] = {}
    for each in reports:
        for name, about in each.common["params"].items():
            params[name] = _merged(name, params[name], about) if name in params else about
    for name, boxes in model.claims.boxes.items():
        described = [[list(box.offsets), list(box.sizes)] for box in boxes]
        params[name] = {**params[name], "shape": list(boxes[0].shape), "blocks": described}
    plan.tensors = {key: each for key, each in plan.tensors.items() if key.section == "extra"}
    for each in reports:
        for key, tensor in tensors_from_json(each.common["tensors"]).items():
            if plan.tensors.setdefault(key, tensor) != tensor:
                raise different_params(
                    f"{key} is kept as {plan.tensors[key]}, and as {tensor} on ranks {list(each.holder)}"
                )
    _check_kinds(model.claims, plan.tensors)
    step = max([report.common["step"] for report in of_data_ranks])
    if plan.step_is_counted:
        step = max([step, *(about["step"] for about in params.values())])
    plan.shared = {"step": step, "params": params, "optimizers": _joined_optimizers(of_data_ranks, reports)}
    for each in reports:
        plan.own["gradients"].update(each.own["gradients"])
    _take_extra_states(plan, of_data_ranks)


def _merged(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a param's record with the aliases of two sets of ranks; all else must agree."""
    aliases = sorted({*one["aliases"], *other["aliases"]})
    difference = first_difference({**one, "aliases": []}, {**other, "aliases": []})
    if difference is not None:
        where, ours, theirs = difference
        raise different_params(f"{where} of {name!r} is {ours!r} on some ranks and {theirs!r} on others")
    return {**one, "aliases": aliases}


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


def _joined_optimizers(of_data_ranks: Sequence[HolderReport], reports: Sequence[HolderReport]) -> list[dict[str, Any]]:
    """Returns the optimizers with the params of all ranks: groups with the same number are one group."""
    first = of_data_ranks[0].common["optimizers"]
    for report in of_data_ranks[1:]:
        difference = first_difference(first, report.common["optimizers"], "optimizers")
        if difference is not None:
            where, ours, theirs = difference
            raise CheckpointError(
                "give all ranks of the model the same param groups with the same values, empty ones too: "
                f"{where} is {ours!r} on ranks {list(of_data_ranks[0].holder)}, {theirs!r} on ranks "
                f"{list(report.holder)}. Nothing was written."
            )

    def joined(number: int, index: int) -> list[str]:
        return joined_order([names for each in reports if (names := each.common["groups"][number][index])])

    return [
        {**each, "groups": [{**group, "params": joined(number, index)} for index, group in enumerate(each["groups"])]}
        for number, each in enumerate(first)
    ]


def _without_params(optimizers: Sequence[Any]) -> list[Any]:
    return [{**each, "groups": [{**group, "params": []} for group in each["groups"]]} for each in optimizers]


def _take_extra_states(plan: SavePlan, of_data_ranks: Sequence[HolderReport]) -> None:
    """Takes the extra states of all modules; of copies, those of the first ranks count, as for buffers."""
    found: dict[str, tuple[Any, HolderReport]] = {}
    for report in of_data_ranks:
        for name, state in report.own["module_extra"].items():
            before, first = found.setdefault(name, (state, report))
            are_copies = first is report or set(first.own["mesh"]) & {*report.holder}
            if not are_copies and before != state:
                ranks = f"{first.holder} and {report.holder}"
                raise different_params(f"the extra states of modules {name!r} on ranks {ranks}")
        if report is not of_data_ranks[0]:
            described = tensors_from_json(report.own["extra"])
            plan.tensors.update({key: each for key, each in described.items() if "." in key.name})
    plan.own["module_extra"] = {name: state for name, (state, _) in found.items()}


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


def _digests(plan: SavePlan, model: Model) -> list[Any]:
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
    return [[*where, list(holder), kinds] for where, (holder, kinds) in found.items()]


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
