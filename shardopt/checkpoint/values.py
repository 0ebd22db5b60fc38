"""Values beside the big tensors, as JSON: hyper-parameters of groups, and what the user gives as ``extra``.

JSON has no tuples, no infinities and no tensors. Those are objects of one key that begins with ``$``; a user's key that
does so is itself wrapped. A float is written with the digits that give back its very bits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ..errors import CheckpointError

Keep = Callable[[torch.Tensor], str]  # takes a tensor to be saved, gives the name under which it will be found
Find = Callable[[str], torch.Tensor]


# Python's own stack ends at a thousand calls, of which each level takes two or three, on loading too.
_DEEPEST = 100


def encode(value: Any, keep: Keep, where: str, depth: int = 0) -> Any:
    """A JSON-able form of ``value``, which lies in ``depth`` lists and dicts.

    Raises:
        CheckpointError: it holds something that is neither a tensor nor JSON-able; ``where`` names the place.
    """
    if depth > _DEEPEST:
        raise CheckpointError(
            f"flatten what is saved: it holds itself, or has more than {_DEEPEST} levels of lists and dicts, which "
            f"could not be read back. Nothing was saved. They begin at {where[:80]}..."
        )
    if isinstance(value, torch.Tensor):
        return {"$tensor": keep(value)}
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, tuple | list):
        items = [encode(item, keep, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items_by_key = {key: encode(item, keep, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        return {"$dict": items_by_key} if any(key.startswith("$") for key in value) else items_by_key
    raise CheckpointError(
        f"{where} is a {type(value).__name__}{' with keys that are no strings' if isinstance(value, dict) else ''}: a "
        "checkpoint holds tensors, numbers, strings, None, lists, tuples and dicts with string keys, so that no code "
        "is needed to read it. Nothing was saved. Convert it first: float(x), x.tolist(), dataclasses.asdict(x)."
    )


def decode(value: Any, find: Find) -> Any:
    """What :func:`encode` was given; ``find`` gives the tensors."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key == "$tensor":
            return find(content)
        if key == "$float":
            return float(content)
        if key == "$tuple":
            return tuple(decode(item, find) for item in content)
        if key == "$dict":
            return {name: decode(item, find) for name, item in content.items()}
    return {key: decode(item, find) for key, item in value.items()}
