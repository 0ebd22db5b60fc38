"""An op: one part of an update that all ranks come to in the same order. A program is a list of them.

``program.py`` has the ops and makes programs; what an op works on is an ``Update`` (``update.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..domain.shard import Shard
    from ..partition.comm.together import Relay


class Op(Protocol):
    """One part of an update."""

    def run(self, update: Any, relay: Relay) -> None:
        """Does this rank's part; collective where other ranks wait for it, also if this rank has failed.

        Raises:
            Exception: an error that all ranks of the domain know of. Any other one goes into the relay.
        """


@dataclass(frozen=True)
class Program:
    """What the updates of one domain do, in order; frozen with the plan of its steps.

    Attributes:
        of_matrices: the shards whose rule is one of whole matrices, in the order of their updates.
    """

    ops: tuple[Op, ...] = ()
    of_matrices: tuple[Shard, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(_told, self.ops))


def _told(op: Op) -> str:
    what, number = (type(op).__doc__ or "").partition("\n")[0], getattr(op, "number", None)
    return f"{type(op).__name__}{'' if number is None else f' {number}'}: {what}"
