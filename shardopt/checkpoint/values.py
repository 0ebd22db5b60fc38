"""Encodes small values as JSON: hyper-parameters of groups, and the user's ``extra``.

JSON has no tuples, no infinities, no tensors, and strings alone as keys. What it lacks is an object with one key that
begins with ``$``; a dict of the user's with such a key is wrapped itself. A float is written with enough digits to
restore its exact bits. A Counter comes back as one: the scheduler MultiStepLR keeps its milestones in one.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .typed_json import Json

MOST_LEVELS = 100  # of nested lists, tuples and dicts; a container that holds itself has no end

Keep = Callable[[torch.Tensor], str]  # takes a tensor to save, returns its name in the checkpoint
Find = Callable[[str], torch.Tensor]


def encode(value: object, keep: Keep, where: str) -> Json:
    """Returns a JSON-able form of ``value``.

    Raises:
        CheckpointError: the value holds itself, or a type that JSON lacks; ``where`` names the place.
    """
    return _encode(value, keep, where, 0)


def encode_dict(value: Mapping[str, object], keep: Keep, where: str) -> Mapping[str, Json]:
    """Returns what :func:`encode` makes of a dict: an object."""
    encoded = _encode(dict(value), keep, where, 0)
    assert isinstance(encoded, Mapping)
    return encoded


def _encode(value: object, keep: Keep, where: str, level: int) -> Json:
    if level > MOST_LEVELS:
        raise CheckpointError(
            f"save a flat copy of what is needed: {where[:200]}... nests more than {MOST_LEVELS} lists and dicts, and "
            "may hold itself. Nothing was saved."
        )
    if isinstance(value, torch.Tensor):
        return {"$tensor": keep(value)}
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, tuple | list):
        items = [_encode(item, keep, f"{where}[{index}]", level + 1) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(key, str) or type(key) is int for key in value):
        if isinstance(value, Counter) or not all(isinstance(key, str) for key in value):
            items = [[key, _encode(item, keep, f"{where}[{key!r}]", level + 1)] for key, item in value.items()]
            return {"$counter" if isinstance(value, Counter) else "$items": items}
        items_by_key = {key: _encode(item, keep, f"{where}[{key!r}]", level + 1) for key, item in value.items()}
        return {"$dict": items_by_key} if any(key.startswith("$") for key in value) else items_by_key
    raise CheckpointError(
        f"convert {where} first (float(x), x.tolist(), dataclasses.asdict(x)): it is a {type(value).__name__}"
        f"{' with keys of other types' if isinstance(value, dict) else ''}; a checkpoint holds tensors, numbers, "
        "strings, None, lists, tuples and dicts with strings or integers as keys. Nothing was saved."
    )


def decode_dict(value: Mapping[str, Json], find: Find) -> dict[str, Any]:
    """Returns the dict that :func:`encode_dict` encoded."""
    found: dict[str, Any] = decode(value, find)
    return found


def decode(value: Json, find: Find) -> Any:
    """Returns the value that :func:`encode` encoded; ``find`` returns the tensors."""
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
        if key in ("$items", "$counter"):
            items = {name: decode(item, find) for name, item in content}
            return Counter(items) if key == "$counter" else items
    return {key: decode(item, find) for key, item in value.items()}
