"""``from shardopt.plan import plan``: the planner, where its documentation says that it is; see :mod:`.tools.plan`."""

from .tools.cut import Cut
from .tools.plan import Need, Way, plan

__all__ = ["Cut", "Need", "Way", "plan"]
