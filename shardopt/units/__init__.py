"""When is a param whole at stage 3, and when is it sharded again?

A unit is the params of a block, gathered together. ``schedule.py`` orders the gathers of a pass, ``passes.py`` follows
that order: the next gather starts while this unit computes, and what no one uses any more is resharded.
"""
