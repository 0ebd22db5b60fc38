"""What this process notes of each process group: for all optimizers in the group, as long as it lives.

Each module that notes something has a class for it, and asks for the group's object of that class::

    class _Transports:
        count = 0

    note_of(group, _Transports).count += 1

A note must not refer to its group, which it would keep alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

_Note = TypeVar("_Note")

_NOTES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()


def note_of(group: dist.ProcessGroup, kind: Callable[[], _Note]) -> _Note:
    """Returns the group's note of a kind, made at the first call. Threads that ask at once find the same one."""
    notes = _NOTES.get(group)
    if notes is None:
        notes = _NOTES.setdefault(group, {})
    found: _Note | None = notes.get(kind)
    return notes.setdefault(kind, kind()) if found is None else found


def noted(kind: Callable[[], _Note]) -> Iterator[tuple[dist.ProcessGroup, _Note]]:
    """Returns all groups that have a note of this kind, and their notes."""
    for group, notes in list(_NOTES.items()):
        if kind in notes:
            yield group, notes[kind]
