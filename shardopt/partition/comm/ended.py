"""Ranks whose processes end: they still serve their states, and come to no exchange of a group any more.

A rank that ends says how many exchanges it has begun in each group. A rank that has begun more waits for it in vain::

    rank 0    exchange 7   exchange 8 ....... in vain: rank 1 may go, which ends the wait          time ->
    rank 1    exchange 7   its process ends
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

from .notes import note_of

if TYPE_CHECKING:
    from types import FrameType

    import torch.distributed as dist

# Where a thread stands while it waits for other ranks: in torch's calls, in a backward whose gradients DDP reduces, or
# in a wait of ours.
_TORCH = os.path.dirname(torch.__file__)
_WAITS = (os.path.join(_TORCH, "distributed", ""), os.path.join(_TORCH, "nn", "parallel", ""), graph.__file__)


class _Exchanges:
    """Exchanges of a group that the group's own number does not tell.

    Attributes:
        ended: the ranks that end, each with the number of exchanges that it has begun.
        unsent: messages of gathers that this rank completed for a rank apart, beside those that it would have sent
            itself.
    """

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self.unsent = 0


def begun(group: dist.ProcessGroup) -> int:
    """Returns how many collectives and messages this rank has begun in a group, by whatever library."""
    found = 0
    for device in group._device_types:
        with suppress(RuntimeError):  # a backend that does not count
            backend: Any = group._get_backend(device)
            found += backend._get_sequence_number_for_group()
    return found + note_of(group, _Exchanges).unsent


def note_unsent(group: dist.ProcessGroup, count: int) -> None:
    """Counts messages that another rank has begun and this one has not, because it completed a gather of it alone."""
    note_of(group, _Exchanges).unsent += count


def note_ended(group: dist.ProcessGroup, rank: int, count: int) -> None:
    """Records that a rank ends, which has begun so many exchanges in the group."""
    note_of(group, _Exchanges).ended[rank] = count


def ended_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the ranks of the group that have said that they end."""
    return [] if group is None else sorted(note_of(group, _Exchanges).ended)


def is_ahead(groups: Sequence[dist.ProcessGroup]) -> bool:
    """True if this rank has begun an exchange to which a rank that ends never came."""
    return any(begun(group) > count for group in groups for count in note_of(group, _Exchanges).ended.values())


def waits() -> bool:
    """True if some thread of this process stands where ranks wait for each other."""
    return any(_is_wait(frame) for frame in sys._current_frames().values())


def _is_wait(innermost: FrameType) -> bool:
    name = innermost.f_code.co_filename
    return name.startswith(_WAITS) or (name, innermost.f_code.co_name) in _OWN_WAITS


_OWN_WAITS = {
    (os.path.join(os.path.dirname(__file__), file), function)
    for file, function in (
        ("group.py", "wait"),
        ("patience.py", "wait_for_message"),
        ("patience.py", "wait_for_collective"),
    )
}
