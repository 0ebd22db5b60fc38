"""Promise: PyTorch's CUDA build and Triton's launcher run on a null device; a step makes as many calls as this says.

The calls are those of ``bench/host.py --device null``, on one rank, of a model of any size: the package's own and the
optimizer's, beside the model's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.without_gpu import is_here
from tests.support.without_gpu.build import LIBRARIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_here(), reason="a GPU computes what it is given")]

# By phase; what is not named is none.
STAGES_0_TO_2 = {
    "backward": {"Triton launches": 1, "copies to the host": 1, "copies on the device": 1, "host waits": 1},
    "clip": {"copies to the device": 1, "copies to the host": 1, "host waits": 1},
    "step": {"Triton launches": 1, "copies to the device": 1},
}
OURS = {
    "stage 0": STAGES_0_TO_2,
    "stage 1": STAGES_0_TO_2,
    "stage 2": STAGES_0_TO_2,
}
KINDS = {kind for its in STAGES_0_TO_2.values() for kind in its} | {"collectives", "device allocations"}


def run_null(*arguments: str) -> subprocess.CompletedProcess[str]:
    where = str(LIBRARIES)
    environment = {**os.environ, "WITHOUT_GPU_NULL": "1", "TRITON_LIBCUDA_PATH": where, "LD_LIBRARY_PATH": where}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_calls_of_a_step(tmp_path: Path) -> None:
    done = run_null("bench/host.py", "--device", "null", "--quick", "--blocks", "1", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    for name, wanted in OURS.items():
        for blocks, phases in results[name]["calls"].items():
            found = {
                phase: {kind: count for kind, count in its.items() if kind in KINDS}
                for phase, its in phases.items()
                if phase != "forward"
            }
            assert found == wanted, (name, blocks)
    # Torch's own, as it calls CUDA: one gradient, one copy into DDP's bucket; one all-reduce.
    ddp = results["DDP, torch fused AdamW"]["calls"]["3 blocks"]["backward"]
    assert ddp["copies on the device"] == 3 * 12 + 4 and ddp["collectives"] == 1


# What was brought there is read as it was brought, until something is launched: nothing computes.
PROGRAM = """
import torch
x = torch.tensor([1.0, 2.0]).cuda()
print(x.tolist(), x.clone().tolist(), (x + x).tolist(), x.tolist())
"""


def test_what_is_read_of_it_is_zeros() -> None:
    done = run_null("-c", PROGRAM)
    assert done.stdout.split("\n")[0] == "[1.0, 2.0] [1.0, 2.0] [0.0, 0.0] [0.0, 0.0]", done.stdout + done.stderr
