"""What does a script see?

The optimizers, with torch's names, arguments and methods. Each method is a line into the engine: nothing here knows
how a step is taken, where a state lies or how a tensor travels.
"""

from . import classes
from .classes import *  # noqa: F403  the optimizers
from .like import recipe
from .optimizer import ShardedOptimizer

__all__ = [*classes.__all__, "ShardedOptimizer", "recipe"]
