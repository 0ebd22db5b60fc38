"""Time for what the stand-ins of CUDA record: durations of works on a machine, and when each engine does which of them.

* ``hardware.py``: machines as a few numbers, and how long a work takes on one.
* ``schedule.py``: which work runs when, if each engine does one at a time; what the end waited for.
"""
