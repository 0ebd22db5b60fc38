"""``from shardopt.plan import plan``: the planner, where its documentation says that it is; see :mod:`.tools.plan`."""

from .tools.cut import Cut
from .tools.need import Need
from .tools.plan import plan
from .tools.ways import Way

__all__ = ["Cut", "Need", "Way", "plan"]
