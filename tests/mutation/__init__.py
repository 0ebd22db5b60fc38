"""What the tests cover and what they notice: coverage by test, and mutants of the package.

::

    python -m tests.mutation.record                   # runs the default suite under coverage.py: which test runs a line
    python -m tests.mutation.record --add tests/optim # runs some tests again, and adds what they run
    python -m tests.mutation.report                   # the table by folder and file
    python -m tests.mutation.run --seed 1 --count 120 # 120 mutants, each under the tests that run its line
    python -m tests.mutation.run --seed 1 --survivors # the survivors once more, after new tests were added
    python -m tests.mutation.run --seed 1 --survivors --tests-from PATH --tests tests/test_x.py   # another checkout's

``record`` leaves its data below ``.test_cache/coverage/``. A map of lines is good for the sources that it was recorded
with: after a change of a file of the package, record again. ``run`` draws the mutants when ``results/`` has no file of
the seed, and goes on with those that have not run yet when it has one: it can be stopped at any time. In that file each
survivor has a ``verdict``, to be written by hand: ``equivalent: why``, ``dead code: deleted``. A survivor that a new
test kills gets it from ``--survivors``. Run it once more to print the table anew.

``mutants.py`` makes mutants, ``covering.py`` finds the tests of a line, ``scratch.py`` runs them on a copy.
"""
