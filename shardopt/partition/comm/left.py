"""What ranks tell of the error by which one of them left a round: others raise one of its type as well.

So `except torch.OutOfMemoryError:` skips a batch on every rank, whichever ran out of memory.
"""

from __future__ import annotations

import functools

import torch

from ...errors import CommunicationError

# Types that a rank can tell, by their number. Those of Python's and torch's that hold no more than a message; any other
# error is told as the nearest of its bases, or as 0.
_KINDS: tuple[type[Exception] | None, ...] = (
    None,
    torch.OutOfMemoryError,
    MemoryError,
    ValueError,
    TypeError,
    IndexError,
    FloatingPointError,
    OverflowError,
    ZeroDivisionError,
    AssertionError,
    NotImplementedError,
)


class RankLeft(CommunicationError):
    """Another rank left the round by itself: no wait has failed, so the wires can be used on.

    Raised by the name of its public base, see :func:`error_of`.
    """


def kind_of(error: BaseException | None) -> int:
    """Returns the number of an error's type."""
    return next((_KINDS.index(each) for each in type(error).__mro__ if each in _KINDS), 0)


@functools.cache
def error_of(kind: int) -> type[RankLeft]:
    """Returns the type of the error that other ranks raise: a CommunicationError, and of this kind."""
    base = _KINDS[kind] if 0 <= kind < len(_KINDS) else None
    bases = (RankLeft,) if base is None else (RankLeft, base)
    return type(CommunicationError.__name__, bases, {"__module__": CommunicationError.__module__})
