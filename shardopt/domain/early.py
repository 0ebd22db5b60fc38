"""What updates buckets while backward goes on, for a step to come: a protocol, since that lies above, in ``step/``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .shard import Shard


class Early(Protocol):
    """See :class:`shardopt.step.early.EarlyUpdates`."""

    @property
    def nbytes(self) -> Mapping[str, int]:
        """The bytes of all copies, by tier."""

    def begin_round(self) -> None:
        """A backward begins that adds to the sums."""

    def update(self, domain: Any, shard: Shard, divisor: int) -> None:
        """Updates a copy of a shard whose sum has arrived, and is to be divided by so much."""

    def ready(self, launches: Mapping[Shard, Sequence[Any]], factors: Any) -> Collection[Shard]:
        """Returns those of the shards that a step has only to take."""

    def take(self, domain: Any, shard: Shard) -> None:
        """Makes the copies of a shard its params and states."""

    def end_step(self) -> None:
        """A step has ended: it was taken, or skipped."""

    def forget(self) -> None:
        """Gradients are set to None, or to zero."""

    def lose_round(self) -> None:
        """The sums of the open round are lost."""

    def free(self) -> None:
        """Drops what was updated, and frees all copies."""
