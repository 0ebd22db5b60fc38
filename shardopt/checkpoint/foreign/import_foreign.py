"""Writes what another library saved as a checkpoint, planned and written as by one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...domain.param_state import ParamState
from ...errors import CheckpointError, StateError
from ...partition.comm.group import Ranks
from ...tensors.safetensors_format import NAME_OF_DTYPE
from .. import files, publish, values
from ..elements import contiguous_strides
from ..plan_save import SavePlan
from ..records import GroupInfo, OptimizerInfo, ParamInfo, TensorInfo, TensorKey
from ..write import RankWriter, as_checkpoint_error
from .source import LazyTensor, plain_hyper

if TYPE_CHECKING:
    from ...rules import Rule
    from ..elements import Read
    from ..plan_save import WriteItem
    from .source import Foreign, ForeignParam, Hyper


def plan_import(foreign: Foreign, rule: Rule, defaults: Hyper) -> SavePlan:
    """Returns the plan. Reads step counts, and no large tensor.

    Args:
        rule, defaults: of the optimizer that the states belong to.

    Raises:
        CheckpointError: a tensor does not fit the optimizer's rule, or the file format.
    """
    plan = SavePlan(Ranks.alone())

    def add(key: TensorKey, found: LazyTensor) -> None:
        if found.dtype not in NAME_OF_DTYPE:
            raise CheckpointError(
                f"convert {key} first: it is of {found.dtype}, which the file format cannot hold. Nothing was written."
            )
        described = TensorInfo(found.shape, contiguous_strides(found.shape), found.dtype)
        plan.add(key, described, 0, found.numel, found.read)

    groups = [{**defaults, **plain_hyper(hyper)} for _, hyper in foreign.groups]
    group_of = {name: group for (names, _), group in zip(foreign.groups, groups, strict=True) for name in names}
    for name, param in foreign.params.items():
        add(TensorKey("params", name, "param"), param.values)
        state = _checked(name, param, rule, group_of.get(name))
        for kind in (*state.tensors, *state.margins):
            add(TensorKey("params", name, kind), param.state[kind].as_dtype(torch.float32))
        plan.params[name] = ParamInfo(
            aliases=tuple(param.aliases),
            optimizer=0 if name in group_of else None,
            step=state.step,
            carried={key: float(value) for key, value in state.carried.items()},
            has_state=state.step > 0,
        )
    for name, buffer in foreign.buffers.items():
        add(TensorKey("buffers", name, "value"), buffer)
    described = tuple(
        GroupInfo(params=tuple(names), values=values.encode_dict(group, _no_tensor, "a param group"))
        for (names, _), group in zip(foreign.groups, groups, strict=True)
    )
    plan.step = max((about.step for about in plan.params.values()), default=0)
    plan.optimizers = (OptimizerInfo(rule=rule.name, counts_steps=rule.counts_steps, groups=described),)
    plan.imported = foreign.origin
    return plan


def _no_tensor(tensor: torch.Tensor) -> str:
    raise CheckpointError(f"a param group holds a tensor of shape {tuple(tensor.shape)}: nothing was written.")


def _checked(name: str, param: ForeignParam, rule: Rule, group: Hyper | None) -> ParamState:
    """Returns the state as ``load_state_dict`` would read it, its tensors without values."""
    if group is None or not param.state:
        return ParamState()
    scalars = ("step", *rule.carried)
    given = {
        key: value.item() if isinstance(value, LazyTensor) and key in scalars else value
        for key, value in param.state.items()
    }
    empty = {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, LazyTensor) else value
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
    """Writes and publishes the checkpoint in ``root``. Returns its path.

    Args:
        advance: takes the number of bytes that were read.

    Raises:
        CheckpointError: reading the source or writing the checkpoint failed; nothing was published.
    """
    plan.items = [replace(item, read=_counted(item, advance)) for item in plan.items]
    was_there = files.leads_to_directory(root)
    try:
        target = publish.begin(root, plan.step)
    except OSError as error:
        raise as_checkpoint_error(error, root) from error
    try:
        RankWriter(target, plan, None).run()
    except BaseException:
        with suppress(OSError, CheckpointError):
            publish.abandon(target)
            if not was_there and not files.names(root):
                files.remove_directory(root)
        raise
    return target.published


def _counted(item: WriteItem, advance: Callable[[int], None]) -> Read:
    def read(start: int, stop: int) -> torch.Tensor:
        advance((stop - start) * item.tensor.dtype.itemsize)
        return item.read(start, stop)

    return read
