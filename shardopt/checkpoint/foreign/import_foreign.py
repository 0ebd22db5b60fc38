"""Foreign states as a checkpoint of ours: planned as one rank's, and written as such."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...domain.param_state import ParamState
from ...errors import CheckpointError, StateError
from ...optim.classes import Recipe
from ...partition.comm.group import Ranks
from .. import files, publish, values
from ..meeting import FileSignals
from ..plan_save import Piece, SavePlan
from ..records import NAME_OF_DTYPE, Key, Tensor, Tensors
from ..write import RankWriter, as_checkpoint_error
from .recognise import plain_hyper
from .source import Foreign, ForeignParam, Values

Advance = Callable[[int], None]


@dataclass(frozen=True)
class _Counted:
    """Elements that tell how many bytes of them were read."""

    values: Values
    advance: Advance

    def read(self, start: int, stop: int) -> torch.Tensor:
        self.advance((stop - start) * self.values.dtype.itemsize)
        return self.values.read(start, stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        self.values.write(start, values)


def plan_import(foreign: Foreign, recipe: Recipe, advance: Advance = lambda nbytes: None) -> SavePlan:
    """What will be written. Reads step counts, and no large tensor.

    Raises:
        CheckpointError: something does not fit the optimizer's rule, or the format.
    """
    pieces: list[Piece] = []
    tensors: Tensors = {}
    params: dict[str, Any] = {}

    def add(key: Key, found: Values) -> None:
        if found.dtype not in NAME_OF_DTYPE:
            raise CheckpointError(f"{key} is of {found.dtype}, which the file format cannot hold: nothing was written.")
        strides = torch.empty(found.shape, device="meta").stride()
        tensors[key] = described = Tensor(found.shape, tuple(strides), found.dtype, ())
        if found.numel:
            pieces.append(Piece(key, described, 0, found.numel, _Counted(found, advance)))

    groups = [{**recipe.defaults, **plain_hyper(group.hyper)} for group in foreign.groups]
    group_of = {name: groups[index] for index, group in enumerate(foreign.groups) for name in group.names}
    for name, param in foreign.params.items():
        add(Key("params", name, "param"), param.values)
        state = _checked(name, param, recipe, group_of.get(name))
        for kind in state.tensors:
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
        {"params": list(group.names), "values": values.encode(hyper, _no_tensor, "a param group")}
        for group, hyper in zip(foreign.groups, groups, strict=True)
    ]
    rule = recipe.rule
    shared = {
        "step": max((each["step"] for each in params.values()), default=0),
        "params": params,
        "optimizers": [{"rule": rule.name, "counts_steps": rule.counts_steps, "groups": described_groups}],
    }
    own = {"extra": {}, "module_extra": {}, "imported": foreign.origin}
    return SavePlan(tuple(sorted(pieces, key=lambda piece: -piece.tensor.dtype.itemsize)), tensors, shared, own)


def _no_tensor(tensor: torch.Tensor) -> str:
    raise CheckpointError(f"a param group holds a tensor of shape {tuple(tensor.shape)}: nothing was written.")


def _checked(name: str, param: ForeignParam, recipe: Recipe, group: Mapping[str, Any] | None) -> ParamState:
    """The state as the optimizer's own ``load_state_dict`` would take it, its tensors without values."""
    if group is None or not param.state:
        return ParamState()
    scalars = ("step", *recipe.rule.carried)
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
        raise CheckpointError(f"the step count of {name!r} is {step!r}: the file is damaged, and nothing was written.")
    like = torch.empty(param.values.shape, device="meta")
    try:
        return ParamState.from_torch(empty, recipe.rule, group, like, repr(name))
    except StateError as error:
        raise CheckpointError(f"{error} (Found while importing; nothing was written.)") from error


def write_import(plan: SavePlan, root: Path) -> Path:
    """Writes and publishes it beside the checkpoints that ``root`` holds; where it is.

    Raises:
        CheckpointError: the source cannot be read after all, or the disk not written; nothing was published.
    """
    was_there = files.is_directory(root)
    try:
        site, lock = publish.begin(root, plan.step)
    except OSError as error:
        raise as_checkpoint_error(error, root) from error
    try:
        RankWriter(site, lock, plan, FileSignals(site, Ranks.alone()), None).run()
    except BaseException:
        with suppress(OSError, CheckpointError):
            publish.abandon(site)
            if not was_there and not files.names(root):
                files.remove_directory(root)
        raise
    return site.published
