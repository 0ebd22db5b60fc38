"""The arguments of ``save_checkpoint`` and ``load_checkpoint``, checked before the first collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..arguments import flag, path, whole
from ..optim.optimizer import ShardedOptimizer
from .names import read_names

if TYPE_CHECKING:
    from ..engine import Engine


class SaveArguments(NamedTuple):
    """The arguments of ``save_checkpoint``, checked and in Python's own types."""

    root: Path
    extra: dict[str, Any]
    step: int | None
    keep: int | None
    asynchronous: bool
    allow_nonfinite: bool
    full_precision: bool
    names: dict[nn.Module, str]


def check_module(module: nn.Module) -> None:
    """Raises TypeError unless this is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            "give the arguments in the order directory, module, optimizer: module takes the nn.Module whose names a "
            f"checkpoint goes by, found {type(module).__name__}."
        )


def engines_of(optimizer: object) -> list[Engine]:
    """Returns the engines of the optimizers that a caller gave: one, several or none.

    Raises:
        TypeError: one that is not shardopt's, or a container that is not a list of them.
        ValueError: an empty list, which would drop the states, or one optimizer twice.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping | str) or not isinstance(optimizer, torch.optim.Optimizer | Iterable):
        raise TypeError(
            f"optimizer takes one of shardopt's optimizers, a list of them, or None for the module alone, found "
            f"{type(optimizer).__name__}."
        )
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    found: list[Engine] = []
    if not given:
        raise ValueError("optimizer is an empty list: give None for the module alone.")
    for index, each in enumerate(given):
        if not isinstance(each, ShardedOptimizer):
            raise TypeError(
                "use the Sharded class of that name, or save its state_dict()'s tensors as extra: a checkpoint holds "
                f"the states of shardopt's optimizers, found {type(each).__module__}.{type(each).__qualname__}."
            )
        if any(each.engine is other for other in found):
            raise ValueError(f"optimizer lists the one at index {index} twice: list each once.")
        each.engine.check_open()
        found.append(each.engine)
    return found


def directory_of(directory: object) -> Path:
    """Returns the path. Raises TypeError or ValueError for anything else, or an empty one.

    It is absolute: a save in the background goes on where it began, though the script changes its directory meanwhile.
    """
    return Path(path(directory, "directory")).absolute()


def read_save_arguments(
    directory: object,
    extra: object,
    step: object,
    keep: object,
    asynchronous: object,
    allow_nonfinite: object,
    full_precision: object,
    names: object,
) -> SaveArguments:
    """Returns the arguments checked. Raises TypeError or ValueError, by the argument's name."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra takes a dict with string keys, found {type(extra).__name__}: give it a name in one.")
    if wrong := [key for key in extra or {} if not isinstance(key, str)]:
        raise TypeError(f"extra takes a dict with string keys, found {wrong[0]!r}: give that value a name.")
    return SaveArguments(
        directory_of(directory),
        dict(extra or {}),
        None if step is None else whole(step, "step", least=0, or_none=", or None to count"),
        None if keep is None else whole(keep, "keep", least=1, or_none=", or None to keep all"),
        flag(asynchronous, "asynchronous"),
        flag(allow_nonfinite, "allow_nonfinite"),
        flag(full_precision, "full_precision"),
        read_names(names),
    )
