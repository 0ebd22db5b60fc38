"""Writes foreign states as a checkpoint of ours: planned and written as by one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...domain.param_state import ParamState
from ...errors import CheckpointError, StateError
from ...partition.comm.group import Ranks
from .. import files, publish, values
from ..elements import contiguous_strides
from ..plan_save import SavePlan
from ..records import NAME_OF_DTYPE, Key, Tensor
from ..write import RankWriter, as_checkpoint_error
from .source import Values, plain_hyper

if TYPE_CHECKING:
    from ...rules import Rule
    from ..elements import Read
    from ..plan_save import Piece
    from .source import Foreign, ForeignParam


def plan_import(foreign: Foreign, rule: Rule, defaults: Mapping[str, Any]) -> SavePlan:
    """Returns the plan of what will be written. Reads step counts, and no large tensor.

    Args:
        rule, defaults: of the optimizer that the states are of.

    Raises:
        CheckpointError: something does not fit the optimizer's rule, or the format.
    """
    plan = SavePlan(Ranks.alone())
    params: dict[str, Any] = {}

    def add(key: Key, found: Values) -> None:
        if found.dtype not in NAME_OF_DTYPE:
            raise CheckpointError(f"{key} is of {found.dtype}, which the file format cannot hold: nothing was written.")
        described = Tensor(found.shape, contiguous_strides(found.shape), found.dtype, ())
        plan.add(key, described, 0, found.numel, found.read)

    groups = [{**defaults, **plain_hyper(hyper)} for _, hyper in foreign.groups]
    group_of = {name: group for (names, _), group in zip(foreign.groups, groups, strict=True) for name in names}
    for name, param in foreign.params.items():
        add(Key("params", name, "param"), param.values)
        state = _checked(name, param, rule, group_of.get(name))
        for kind in (*state.tensors, *state.margins):
            add(Key("params", name, kind), param.state[kind].as_dtype(torch.float32))
        params[name] = {
            "aliases": list(param.aliases),
            "optimizer": 0 if name in group_of else None,
            "step": state.step,
            "carried": {key: float(value).hex() for key, value in state.carried.items()},
            "has_state": state.step > 0,
        }
    for name, buffer in foreign.buffers.items():
        add(Key("buffers", name, "value"), buffer)
    described_groups = [
        {"params": list(names), "values": values.encode(group, _no_tensor, "a param group")}
        for (names, _), group in zip(foreign.groups, groups, strict=True)
    ]
    plan.shared = {
        "step": max((each["step"] for each in params.values()), default=0),
        "params": params,
        "optimizers": [{"rule": rule.name, "counts_steps": rule.counts_steps, "groups": described_groups}],
    }
    plan.own = {"extra": {}, "module_extra": {}, "imported": foreign.origin}
    return plan


def _no_tensor(tensor: torch.Tensor) -> str:
    raise CheckpointError(f"a param group holds a tensor of shape {tuple(tensor.shape)}: nothing was written.")


def _checked(name: str, param: ForeignParam, rule: Rule, group: Mapping[str, Any] | None) -> ParamState:
    """Returns the state as the optimizer's own ``load_state_dict`` would take it, its tensors without values."""
    if group is None or not param.state:
        return ParamState()
    scalars = ("step", *rule.carried)
    given = {
        key: value.item() if isinstance(value, Values) and key in scalars else value
        for key, value in param.state.items()
    }
    empty = {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Values) else value
        for key, value in given.items()
    }
    step = empty.get("step", 0)
    if not isinstance(step, int | float) or step != int(step) or not 0 <= step < 1 << 62:
        raise CheckpointError(f"the file is damaged: the step count of {name!r} is {step!r}. Nothing was written.")
    like = torch.empty(param.values.shape, device="meta")
    try:
        return ParamState.from_torch(empty, rule, group, like, repr(name))
    except StateError as error:
        raise CheckpointError(f"{error} (Found while importing; nothing was written.)") from error


def write_import(plan: SavePlan, root: Path, advance: Callable[[int], None]) -> Path:
    """Writes and publishes the checkpoint beside those that ``root`` holds. Returns its path.

    Args:
        advance: told how many bytes were read.

    Raises:
        CheckpointError: the source cannot be read after all, or the disk not written; nothing was published.
    """
    plan.pieces = [replace(piece, read=_told(piece, advance)) for piece in plan.pieces]
    was_there = files.is_directory(root)
    try:
        site, lock = publish.begin(root, plan.step)
    except OSError as error:
        raise as_checkpoint_error(error, root) from error
    try:
        RankWriter(site, lock, plan, None).run()
    except BaseException:
        with suppress(OSError, CheckpointError):
            publish.abandon(site)
            if not was_there and not files.names(root):
                files.remove_directory(root)
        raise
    return site.published


def _told(piece: Piece, advance: Callable[[int], None]) -> Read:
    def read(start: int, stop: int) -> torch.Tensor:
        advance((stop - start) * piece.tensor.dtype.itemsize)
        return piece.read(start, stop)

    return read
