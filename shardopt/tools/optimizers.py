"""The optimizers by the names that commands take: those of their classes, without "Sharded"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..optim import classes, large_batch, muon

if TYPE_CHECKING:
    from ..optim.optimizer import ShardedOptimizer

# A module of optimizers more is a row here.
MODULES = (classes, large_batch, muon)
OPTIMIZERS: dict[str, type[ShardedOptimizer]] = {
    name.removeprefix("Sharded"): getattr(module, name) for module in MODULES for name in module.__all__
}
