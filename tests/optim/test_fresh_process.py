"""``from shardopt import ShardedAdamW`` in a fresh process loads little beyond ``import torch``, and does little.

The promise is 0.1 s, which ``bench/cold_start.py`` measures. What makes it longer is counted here, the same on every
machine: modules of others (Numba and Triton take a second each), modules of the package, calls of functions.
"""

import json
import os
import subprocess
import sys

from tests.support.paths import ROOT

CHILD = """
import json, sys
import torch

before, calls, most = set(sys.modules), 0, int(sys.argv[1])

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
    if calls > most:  # by far: counting the rest would take minutes
        sys.setprofile(None)

sys.setprofile(count)
from shardopt import ShardedAdamW
sys.setprofile(None)
print(json.dumps([sorted(set(sys.modules) - before), calls]))
"""
# Half a millisecond each. Add none that takes longer: import it where it is used.
OTHERS = {"hmac", "numpy._typing._add_docstring", "numpy.typing", "secrets"}
OURS = 36  # modules; the engine and all below it load with the first optimizer
CALLS = 110_000  # 96,500 on Python 3.11, of which reading the rules' sources and making dataclasses are most


def test_import_loads_and_does_little() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(2 * CALLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    modules, calls = json.loads(done.stdout)
    ours = [name for name in modules if name.partition(".")[0] == "shardopt"]
    assert set(modules) - set(ours) <= OTHERS
    assert len(ours) <= OURS and calls <= CALLS, (len(ours), calls)
