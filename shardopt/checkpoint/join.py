"""Makes one plan of what all ranks of a model plan to save, and the same manifest on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import first_difference
from ..errors import CheckpointError
from .claims import different_params
from .everyone import numbers_of
from .meeting import Content
from .order import joined_order
from .records import Key, tensors_from_json, tensors_to_json

if TYPE_CHECKING:
    from .claims import Claims
    from .everyone import Holder
    from .meeting import Meeting
    from .model import Model
    from .plan_save import Piece, SavePlan

_MIX = 0x9E3779B1  # odd, so that an element's place changes what it adds


def join(plan: SavePlan, model: Model, meeting: Meeting, phase: str) -> None:
    """Collective: the plan then says what all ranks save, and this rank's pieces are those that it writes.

    Raises:
        CheckpointError: ranks differ, or use one name for different params. On every rank; nothing was written.
    """
    told = meeting.by_holders(_contents(plan, model), phase)
    meeting.together(lambda: _take(plan, model, told), phase)
    _compare_copies(plan, model, meeting, phase)
    _drop_copies(plan, model)


def _contents(plan: SavePlan, model: Model) -> list[Content]:
    found = []
    for holders, members in model.by_holders():
        blocks = {member.block_name for member in members if member.is_planned}
        names = blocks | {member.name for member in members if member.is_planned}
        tensors = {key: each for key, each in plan.tensors.items() if key.section in _OF_PARAMS and key.name in names}
        params = {member.name: plan.shared["params"][member.name] for member in members}
        groups = [
            [[name for name in group["params"] if name in params] for group in each["groups"]]
            for each in plan.shared["optimizers"]
        ]
        common: dict[str, Any] = {"params": params, "groups": groups}
        reduced = {name: about for name, about in plan.own["gradients"].items() if name in blocks}
        own: dict[str, Any] = {"gradients": reduced}
        if holders is model.home:
            tensors |= {key: each for key, each in plan.tensors.items() if key.section == "buffers"}
            common["optimizers"], common["step"] = _without_params(plan.shared["optimizers"]), plan.step
            own["module_extra"], own["mesh"] = plan.own["module_extra"], sorted(model.mesh)
            extra = {key: each for key, each in plan.tensors.items() if key.section == "extra"}
            own["extra"] = tensors_to_json(extra)
        common["tensors"] = tensors_to_json(tensors)
        found.append(Content(numbers_of(holders), common, own if holders.rank == 0 else None))
    return found


_OF_PARAMS = ("params", "gradients")


def _take(plan: SavePlan, model: Model, told: Sequence[Content]) -> None:
    homes = [each for each in told if "optimizers" in each.common]
    params: dict[str, Any] = {}
    for each in told:
        for name, about in each.common["params"].items():
            params[name] = _merged(name, params[name], about) if name in params else about
    for name, blocks in model.claims.blocks.items():
        boxes = [[list(block.offsets), list(block.sizes)] for block in blocks]
        params[name] = {**params[name], "shape": list(blocks[0].shape), "blocks": boxes}
    plan.tensors = {key: each for key, each in plan.tensors.items() if key.section == "extra"}
    for each in told:
        for key, tensor in tensors_from_json(each.common["tensors"]).items():
            if plan.tensors.setdefault(key, tensor) != tensor:
                raise different_params(
                    f"{key} is kept as {plan.tensors[key]}, and as {tensor} on ranks {list(each.holder)}"
                )
    _check_kinds(model.claims, plan.tensors)
    step = max([home.common["step"] for home in homes])
    if plan.step_is_counted:
        step = max([step, *(about["step"] for about in params.values())])
    plan.shared = {"step": step, "params": params, "optimizers": _joined_optimizers(homes, told)}
    for each in told:
        plan.own["gradients"].update(each.own["gradients"])
    _take_extra_states(plan, homes)


def _merged(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what two sets of ranks say of a param, which must be the same but for its other names."""
    aliases = sorted({*one["aliases"], *other["aliases"]})
    difference = first_difference({**one, "aliases": []}, {**other, "aliases": []})
    if difference is not None:
        where, ours, theirs = difference
        raise different_params(f"{where} of {name!r} is {ours!r}, and elsewhere {theirs!r}")
    return {**one, "aliases": aliases}


def _check_kinds(claims: Claims, tensors: Iterable[Key]) -> None:
    """Raises CheckpointError unless there is the same of all blocks of a param."""
    kinds: dict[str, set[str]] = {}
    for key in tensors:
        if key.section == "params" and not key.is_of_scales:
            kinds.setdefault(key.name, set()).add(key.kind)
    for name, blocks in claims.blocks.items():
        first, *others = (block.name_in(name) for block in blocks)
        for each in others:
            if kinds.get(each) != kinds.get(first):
                raise CheckpointError(
                    f"give all ranks the same options: of {first!r} there are {sorted(kinds.get(first, ()))}, of "
                    f"{each!r} {sorted(kinds.get(each, ()))}. Nothing was written."
                )


def _joined_optimizers(homes: Sequence[Content], told: Sequence[Content]) -> list[dict[str, Any]]:
    """Returns the optimizers with the params of all ranks: groups of one number are one group."""
    first = homes[0].common["optimizers"]
    for home in homes[1:]:
        difference = first_difference(first, home.common["optimizers"], "optimizers")
        if difference is not None:
            where, ours, theirs = difference
            raise CheckpointError(
                "give all ranks of the model the same param groups with the same values, empty ones too: "
                f"{where} is {ours!r} on ranks {list(homes[0].holder)}, {theirs!r} on ranks {list(home.holder)}. "
                "Nothing was written."
            )

    def joined(number: int, index: int) -> list[str]:
        return joined_order([names for each in told if (names := each.common["groups"][number][index])])

    return [
        {**each, "groups": [{**group, "params": joined(number, index)} for index, group in enumerate(each["groups"])]}
        for number, each in enumerate(first)
    ]


def _without_params(optimizers: Sequence[Any]) -> list[Any]:
    return [{**each, "groups": [{**group, "params": []} for group in each["groups"]]} for each in optimizers]


def _take_extra_states(plan: SavePlan, homes: Sequence[Content]) -> None:
    """Takes the extra states of all modules; those of a part's first ranks count, as its buffers do."""
    found: dict[str, tuple[Any, Content]] = {}
    for home in homes:
        for name, state in home.own["module_extra"].items():
            before, first = found.setdefault(name, (state, home))
            are_copies = first is home or set(first.own["mesh"]) & {*home.holder}
            if not are_copies and before != state:
                ranks = f"{first.holder} and {home.holder}"
                raise different_params(f"the extra states of modules {name!r} on ranks {ranks}")
        if home is not homes[0]:
            described = tensors_from_json(home.own["extra"])
            plan.tensors.update({key: each for key, each in described.items() if "." in key.name})
    plan.own["module_extra"] = {name: state for name, (state, _) in found.items()}


# -- copies ------------------------------------------------------------------------------------------------------------


def _compare_copies(plan: SavePlan, model: Model, meeting: Meeting, phase: str) -> None:
    """Collective: raises CheckpointError if ranks that no tensor mesh connects hold different values under one name."""
    if not model.claims.contested and not model.buffer_claims.contested:
        return
    own = meeting.together(lambda: _digests(plan, model), phase)
    totals: dict[tuple[str, str], dict[Holder, dict[str, int]]] = {}
    for theirs in meeting.everyones(own, phase):
        for section, block, holder, kinds in theirs:
            total = totals.setdefault((section, block), {}).setdefault(tuple(holder), {})
            for kind, digest in kinds.items():
                total[kind] = (total.get(kind, 0) + digest) % (1 << 64)
    for (_, block), by_holder in totals.items():
        (first, expected), *others = by_holder.items()
        for holder, found in others:
            if found != expected:
                kind = next(kind for kind in {**expected, **found} if expected.get(kind) != found.get(kind))
                raise different_params(
                    f"{kind} of {block!r} has other values on ranks {list(first)} than on ranks {list(holder)} (where "
                    "it is one param, tied over both, its copies have come apart)"
                )


def _digests(plan: SavePlan, model: Model) -> list[Any]:
    """Returns this rank's part of sums over the bits of what is contested, weighted by the elements' places."""
    found: dict[tuple[str, str], tuple[Holder, dict[str, int]]] = {}
    holder_of = {("params", member.block_name): member.holders for member in model.params.values()}
    holder_of |= {("buffers", name): model.home for name in model.buffers}
    for piece in plan.pieces:
        key = piece.key
        claims = model.buffer_claims if key.section == "buffers" else model.claims
        if key.section in ("params", "buffers") and key.name in claims.contested:
            ranks = holder_of[key.section, key.name]
            _, kinds = found.setdefault((key.section, key.name), (numbers_of(ranks), {}))
            kinds[key.kind] = _digest(piece)
    return [[*where, list(holder), kinds] for where, (holder, kinds) in found.items()]


def _digest(piece: Piece) -> int:
    at, total = piece.start, 0
    for chunk in piece.chunks():
        bits = chunk.contiguous().view(torch.uint8).reshape(chunk.numel(), -1).to(torch.int64)
        weights = torch.arange(at, at + chunk.numel(), dtype=torch.int64).mul_(_MIX).bitwise_or_(1).unsqueeze(1)
        total += int((bits.add_(1).mul_(weights) * torch.arange(1, 2 * bits.shape[1], 2)).sum())
        at += chunk.numel()
    return total % (1 << 64)


def _drop_copies(plan: SavePlan, model: Model) -> None:
    """Leaves the pieces that this rank writes."""
    dropped = set()
    for member in model.params.values():
        if model.claims.writers.get(member.block_name) != numbers_of(member.holders):
            dropped.add(("params", member.block_name))
    for name in model.buffers:
        if model.buffer_claims.writers[name] != numbers_of(model.home):
            dropped.add(("buffers", name))
    plan.pieces = [piece for piece in plan.pieces if piece.key[:2] not in dropped]
