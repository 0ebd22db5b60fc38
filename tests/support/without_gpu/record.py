"""Runs all tests that need GPUs on the stand-ins, and writes their counts as a result: ``scripts/gpu_without_gpu.sh``.

One process of pytest for each file, so that a device that failed in one takes nothing along into the next.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bench.common import write_result
from tests.support.paths import ROOT

# What a run without these tests would hide.
SIZES = {
    "tests/kernels/test_gpu.py::test_a_step_waits_for_nothing_but_its_decision": "2^18 elements for 2^24",
    "tests/kernels/test_gpu.py::test_offload_frees_the_device_and_reload_takes_it_back": "2^20 elements for 2^26",
    "tests/kernels/test_rounding.py::test_all_patterns_on_a_gpu": "every 8191st of all 2^32 patterns",
}
NOT_RUN = [
    "machine code: PTX is executed, and what ptxas makes of it is not looked at",
    "the kernels of ATen, cuBLAS, cuDNN and NCCL: the CPU computes in their place",
    "several machines; NCCL's own limits, buffers and transports",
    "CUDA graphs; CUDA's own out-of-memory behaviour beyond a limit of bytes",
    "anything that is measured in time",
    "a rank that dies within a forward or a backward: only deaths before a step",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="default: all that hold a test with the mark gpu")
    parser.add_argument("--out", type=Path, help="directory of the result's JSON (default: bench/results)")
    arguments = parser.parse_args()
    files = arguments.files or marked()
    found = {file: run(file) for file in files}
    total = Counter[str]()
    for each in found.values():
        total.update(each["counts"])
    settings = argparse.Namespace(quick=False, out=arguments.out, files=files)
    results = {"counts": dict(total), "by file": found, "reduced sizes": SIZES, "not executed": NOT_RUN}
    write_result("gpu-without-gpu", settings, torch.device("cpu"), results)
    return int(total["passed"] == 0 or set(total) != {"passed"})


def marked() -> list[str]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.gpu" in path.read_text()]


def run(file: str) -> dict[str, Any]:
    """How many tests of a file ended how, and which of them did not pass."""
    print(f"== {file}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={report}"]
        subprocess.run([*command, file], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    ends = {case.get("name", ""): next((each.tag for each in case if each.tag in TAGS), "passed") for case in cases}
    return {
        "counts": dict(Counter(ends.values())) or {"error": 1},
        "not passed": [re.sub(r"0x[0-9a-f]+", "", name) for name, end in ends.items() if end != "passed"],
        "seconds": round(time.monotonic() - start),
    }


TAGS = ("failure", "error", "skipped")


if __name__ == "__main__":
    sys.exit(main())
