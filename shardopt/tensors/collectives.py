"""A script's own collectives on ``param.grad``, which is the mean over ranks already: averaging it again is refused.

A collective over other ranks (of a tensor-parallel group) writes to a gradient that this rank holds whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError
from .fetched_view import written_by_collective
from .gradient_edits import in_dtype
from .gradient_slice import GradientSlice, change
from .part import Part, refusal
from .strides import flattened


def call_collective(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Calls a collective of ``torch.distributed`` on gradients.

    Raises:
        StateError: it would average them again, or write to one of which this rank holds a slice only.
    """
    parts = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, Part)]
    slices = {part: _slice_of(part) for part in parts}
    if "reduce" in str(function) and any(_is_among(arguments, own) for own in slices.values() if own is not None):
        raise _averaged(function)
    written = [each for each in tree_leaves(written_by_collective(function, arguments)) if isinstance(each, Part)]
    for part in written:
        own = slices[part]
        if own is None:
            raise refusal(function)
        if own.gather is not None:
            raise _of_slices(function)
    wholes = {part: _whole_of(part) for part in parts}
    found = function(*tree_map_only(Part, wholes.__getitem__, arguments), **keywords)
    for part in written:
        _wait(found)
        own = slices[part]
        assert own is not None
        change(own, in_dtype(part.dtype, partial(_take, flattened(wholes[part]))), str(function), ())
    return found


def _slice_of(part: Any) -> GradientSlice | None:
    return part.whole_slice() if hasattr(part, "gradient_slice") else None


def _whole_of(part: Any) -> Tensor:
    """Returns the whole; a gradient that this rank holds whole in its own memory, where device and dtype allow."""
    own = _slice_of(part)
    if own is not None and own.gather is None:
        return part.whole()  # type: ignore[no-any-return]
    return part.read_whole().to(part.device)  # type: ignore[no-any-return]


def _take(values: Tensor, mean: Tensor) -> None:
    mean.copy_(values)


def _wait(found: Any) -> None:
    """Waits for what a collective has begun: what it wrote is copied."""
    from torch.distributed import Work

    for each in tree_leaves(found):
        if isinstance(each, torch.ScriptObject):
            Work.unbox(each).wait()


def _is_among(arguments: tuple[Any, ...], own: GradientSlice) -> bool:
    """True if all ranks of a collective, and not one alone, are among those over which the gradient is the mean."""
    from torch.distributed import ProcessGroup, get_process_group_ranks

    if own.group is None:
        return False
    averaged = set(get_process_group_ranks(own.group))
    for each in arguments:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            ranks = get_process_group_ranks(ProcessGroup.unbox(each))
            return len(ranks) > 1 and averaged.issuperset(ranks)
    return False


def _averaged(function: Any) -> StateError:
    return StateError(
        "param.grad is the mean over ranks already: remove the script's own averaging, or pass the params without "
        f"the module (stage 0 or 1). {function} would average it a second time."
    )


def _of_slices(function: Any) -> StateError:
    return StateError(
        "call full_tensor() on every rank and communicate that, or optimizer.sum_tied(param, group): "
        f"{function} was called on param.grad, of which this rank holds a slice only, and would write to a copy."
    )
