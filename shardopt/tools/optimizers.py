"""The optimizers by their names on the command line: the names of their classes without "Sharded"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..optim.optimizer import ShardedOptimizer


def names() -> list[str]:
    """Returns the names of all public classes."""
    import shardopt  # not at the top: the package imports what all of this is made of

    public = (each.removeprefix("Sharded") for each in shardopt.__all__ if each.startswith("Sharded"))
    return sorted(each for each in public if each != "Optimizer")


def named(name: str) -> type[ShardedOptimizer]:
    """Returns the class, and loads it."""
    import shardopt

    found: type[ShardedOptimizer] = getattr(shardopt, f"Sharded{name}")
    return found
