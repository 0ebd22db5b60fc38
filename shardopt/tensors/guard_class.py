"""Classes for params that are guarded: a param keeps its own class as a base, so ``isinstance`` answers as before."""

import types
from typing import Any


def guard_class(guard: type, own: type, name: str) -> type:
    """Returns a class ``name`` with the methods of ``guard`` ahead of those of ``own``, for ``param.__class__``."""
    # Without __slots__ the layout would differ, and Python would refuse the assignment to __class__.
    body: dict[str, Any] = {"__slots__": ()}
    return types.new_class(name, (guard, own), {}, lambda space: space.update(body))
