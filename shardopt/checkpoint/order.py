"""The order of a whole model's params, of which each rank knows a part. Strings, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def joined_order(parts: Sequence[Sequence[str]]) -> list[str]:
    """Returns all names of all parts, each once, in the order in which the whole model has them.

    The names of a module and of its submodules keep the order of the first part that has them; numbered modules are
    sorted by number. If all parts are equal, the result is that part.

    ::

        embed.weight  layers.0.weight  layers.2.weight       embed.weight  layers.0.weight  layers.1.weight
        layers.1.weight  layers.3.weight  head.weight        layers.2.weight  layers.3.weight  head.weight
    """
    if all(each == parts[0] for each in parts):
        return [name for each in parts[:1] for name in each]
    tree: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in parts for name in each):
        node = tree
        for step in name.split("."):
            node = node.setdefault(step, {})
        node[""] = name  # ends here
    found: list[str] = []
    _walk(tree, found)
    return found


def _walk(node: dict[str, Any], found: list[str]) -> None:
    steps = [step for step in node if step]
    if steps and all(step.isdecimal() for step in steps):
        steps.sort(key=int)
    if "" in node:
        found.append(node[""])
    for step in steps:
        _walk(node[step], found)
