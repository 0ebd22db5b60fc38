"""What does a script see?

The optimizers, with torch's names, arguments and methods. Each method is a line into the engine: nothing here knows
how a step is taken, where a state lies or how a tensor travels.
"""

from .classes import (
    ShardedAdadelta,
    ShardedAdagrad,
    ShardedAdam,
    ShardedAdamax,
    ShardedAdamW,
    ShardedASGD,
    ShardedLion,
    ShardedNAdam,
    ShardedRAdam,
    ShardedRMSprop,
    ShardedRprop,
    ShardedSGD,
    recipe,
)
from .optimizer import ShardedOptimizer

__all__ = [
    "ShardedASGD",
    "ShardedAdadelta",
    "ShardedAdagrad",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedAdamax",
    "ShardedLion",
    "ShardedNAdam",
    "ShardedOptimizer",
    "ShardedRAdam",
    "ShardedRMSprop",
    "ShardedRprop",
    "ShardedSGD",
    "recipe",
]
