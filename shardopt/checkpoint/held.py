"""Which block of a param this rank holds."""

from __future__ import annotations

from typing import Any

from ..domain.dtensors import box_of
from ..errors import BindingError, CheckpointError
from .block import Block


def block_of(param: Any, name: str) -> Block:
    """Returns what this rank holds of a param: a box of a DTensor, all of a plain tensor.

    Raises:
        CheckpointError: it cannot be told which elements a rank holds of a DTensor.
    """
    try:
        return Block(tuple(param.shape), *box_of(param, repr(name)))
    except BindingError as error:
        raise CheckpointError(f"{error} Nothing was saved or loaded.") from error
