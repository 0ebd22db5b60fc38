"""When is a param whole at stage 3, and when is it sharded again?

A unit is the params of a block, gathered together. ``schedule.py`` orders the gathers of a pass, ``gatherer.py`` runs
them: it starts the next gather while this unit computes, and reshards what no one uses any more.
"""
